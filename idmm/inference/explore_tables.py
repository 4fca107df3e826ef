"""What ``idmm explore`` found, as four tables with a sheet of thumbnails each and a map, and what it prints."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from idmm.data.image_store import ImageStore
from idmm.data.split import counted
from idmm.errors import one_line
from idmm.evaluation import similarity
from idmm.figures.sheets import BLUE, CELL, LARGE, ORANGE, Tile, caption_sheet, in_rows, one_of_each
from idmm.figures.style import COLOURS, save, shortened
from idmm.files import write_csv
from idmm.progress import aligned

NEIGHBOURS = 5  # that are listed of each image
WORST = 10  # that are printed of each kind
PAIRS, ROWS, QUERIES = 24, 16, 8  # on the sheets: pairs, labels and clusters, neighbours
BESIDE = 6  # images beside the first of a row
WIDE = 8  # images in a row of clusters
MAPPED = 2000  # images on the map
THUMB = 96  # longest side of a thumbnail (pixels)


@dataclass(frozen=True)
class Explored:
    """The training images of a run, and what they are compared by."""

    store: ImageStore
    labels: np.ndarray | None  # int64 [N], -1 where an image has none; None: there are no labels
    rows: np.ndarray  # float32 [N, d]
    notes: list[str]  # what is missing, and why

    def label(self, i: int) -> str | None:
        """Returns the name of an image's class."""
        return None if self.labels is None or self.labels[i] < 0 else self.store.classes[self.labels[i]]

    def draw(self, out: Path, rows: list[tuple[str, list]], title: str, note: str = "", cell: float = CELL) -> None:
        """Draws a sheet, ``rows`` with (number, caption, frame) for each image."""
        rows = [(text, [Tile(self._thumbnail(i), *tile) for i, *tile in tiles]) for text, tiles in rows]
        caption_sheet(rows, out, title, note, cell)

    def _thumbnail(self, i: int) -> np.ndarray:
        seen = Image.fromarray(self.store.picture(i))
        seen.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
        return np.asarray(seen)


@dataclass(frozen=True)
class Found:
    """What the rows say of the images."""

    near: similarity.Neighbours  # by cosine
    pairs: list[tuple[int, int, float | None, float, str]]  # likely duplicates: numbers, score, cosine, kind
    margins: np.ndarray | None  # of the votes on each label, float64 [N]
    suggested: np.ndarray | None  # class that the neighbours have, int64 [N]
    cluster: np.ndarray  # int64 [N], the largest is 0
    centrality: np.ndarray  # cosine with the cluster's centre, float32 [N]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _class(seen: Explored, *numbers: int) -> list[str | None]:
    """The classes of images as cells; nothing where there are no labels."""
    return [] if seen.labels is None else [seen.label(i) for i in numbers]


def _worst(rows: list[list], count: int) -> list[str]:
    """The first rows of a table as lines."""
    shown = [["" if cell is None else one_line(str(cell)) for cell in row] for row in rows[: 1 + min(count, WORST)]]
    return [f"  {line}" for line in aligned(shown)] if count else []


def _duplicates(seen: Explored, found: Found, out: Path) -> list[str]:
    pairs, names = found.pairs, seen.store.names
    rows = [["rank", "path", "duplicate", "score", "cosine", "kind"]]
    rows[0] += ["class", "duplicate_class"] * (seen.labels is not None)
    for rank, (i, j, score, cosine, kind) in enumerate(pairs, start=1):
        rows.append([rank, names[i], names[j], _number(score), _number(cosine), kind, *_class(seen, i, j)])
    write_csv(out / "duplicates.csv", rows)
    drawn, groups = [], one_of_each([pair[:2] for pair in pairs])
    for (i, j, score, _, kind), many in [(pairs[n], many) for n, many in groups.items()][:PAIRS]:
        why = (kind if score is None else f"{kind}, {score:.2f}") + (f"; {many} alike" if many > 2 else "")
        drawn.extend((n, f"{text}\n{names[n]}\n{seen.label(n) or ''}", None) for n, text in ((i, why), (j, "")))
    if pairs:
        title = f"A pair of {len(drawn) // 2} of {counted(len(groups), 'group')} of likely duplicates"
        note = f"{counted(len(pairs), 'likely pair')} in all; alike: images of the group"
        seen.draw(out / "duplicates.png", in_rows(drawn), title, note, LARGE)
    same = sum(kind == "same file" for *_, kind in pairs)
    return [
        f"Likely duplicates: {counted(len(pairs), 'likely pair')}, {same} of them the same file",
        *_worst(rows, len(pairs)),
        "One picture then has two targets. exclude.txt names copies for --data.exclude, all but those of the same",
        "file behind a #: remove it where you agree, and train again.",
    ]


def _labels(seen: Explored, found: Found, out: Path) -> list[str]:
    if seen.labels is None:
        return ["Likely label errors: not looked for, the images have no labels"]
    names, classes = seen.store.names, seen.store.classes
    order = np.lexsort((np.arange(len(names)), -found.margins))
    order = order[seen.labels[order] >= 0]
    rows = [["rank", "path", "class", "suggested", "score", "likely"]]
    for rank, i in enumerate(order.tolist(), start=1):
        suggested = classes[found.suggested[i]] if found.suggested[i] >= 0 else None
        likely = "yes" if found.margins[i] > similarity.LIKELY else "no"
        rows.append([rank, names[i], seen.label(i), suggested, _number(found.margins[i]), likely])
    write_csv(out / "labels.csv", rows)
    count = int((found.margins > similarity.LIKELY).sum())
    drawn = []
    for i in order[:count][:ROWS].tolist():
        text = f"labelled {shortened(seen.label(i), 18)}\nneighbours: {shortened(classes[found.suggested[i]], 18)}"
        tiles = [(i, f"{seen.label(i)}\n{names[i]}", ORANGE)]
        for j in found.near.index[i, :BESIDE].tolist():
            tiles.append((j, seen.label(j) or "no label", BLUE if seen.labels[j] == found.suggested[i] else None))
        drawn.append((text, tiles))
    if drawn:
        note = "orange: the image in question; blue: neighbours of the class that they suggest"
        seen.draw(out / "labels.png", drawn, f"{len(drawn)} of {counted(count, 'likely label error')}", note)
    return [
        f"Likely label errors: {counted(count, 'image')} whose nearest images carry another label",
        *_worst(rows, count),
        "Look at each: move the file to the class that it is of, or leave it out with --data.exclude.",
    ]


def _clusters(seen: Explored, found: Found, out: Path) -> list[str]:
    names = seen.store.names
    order = np.lexsort((np.arange(len(names)), -found.centrality, found.cluster))
    groups = [order[found.cluster[order] == c] for c in range(found.cluster.max() + 1)]
    rows, drawn = [["cluster", "path", "cosine", *(["class"] if seen.labels is not None else [])]], []
    for number, members in enumerate(groups, start=1):
        rows += [[number, names[i], _number(found.centrality[i]), *_class(seen, i)] for i in members.tolist()]
        text = f"cluster {number}\n{counted(len(members), 'image')}"
        if seen.labels is not None:
            ((label, times),) = Counter(seen.label(i) or "no label" for i in members.tolist()).most_common(1)
            text += f"\n{100 * times / len(members):.0f} % {shortened(label, 18)}"
        drawn.append((text, [(i, names[i], None) for i in members[:WIDE].tolist()]))
    write_csv(out / "clusters.csv", rows)
    title = f"{min(ROWS, len(groups))} of {counted(len(groups), 'cluster')}"
    seen.draw(out / "clusters.png", drawn[:ROWS], title, "the images nearest to the centre of each, the nearest first")
    return [
        f"Clusters: {len(groups)}, of {len(groups[-1])} to {len(groups[0])} images. Small ones are often another kind "
        "of picture."
    ]


def _neighbours(seen: Explored, found: Found, out: Path) -> list[str]:
    near, names = found.near, seen.store.names
    rows = [["path", "rank", "neighbour", "cosine"]]
    for i, name in enumerate(names):
        listed = zip(near.index[i, :NEIGHBOURS].tolist(), near.value[i, :NEIGHBOURS], strict=True)
        rows += [[name, rank, names[j], _number(cosine)] for rank, (j, cosine) in enumerate(listed, start=1)]
    write_csv(out / "neighbours.csv", rows)
    drawn = []
    for i in np.unique(np.linspace(0, len(names) - 1, QUERIES).astype(int)).tolist():
        beside = zip(near.index[i, :BESIDE].tolist(), near.value[i, :BESIDE].tolist(), strict=True)
        drawn.append(("", [(i, names[i], BLUE), *((j, f"{names[j]}\n{cosine:.2f}", None) for j, cosine in beside)]))
    note = "blue: some images, evenly drawn; beside each its nearest, with the cosine"
    seen.draw(out / "neighbours.png", drawn, "Nearest images", note)
    return ["Nearest images: those of each image are in neighbours.csv (cosine; 1: alike)."]


def _map(seen: Explored, found: Found, out: Path) -> list[str]:
    """Draws the images as points in a plane, so that neighbours stay neighbours (t-SNE; IDMM, Figure 2)."""
    from sklearn.manifold import TSNE

    numbers = np.unique(np.linspace(0, len(seen.rows) - 1, MAPPED).astype(int))
    unit = similarity.unit_rows(seen.rows)[numbers]
    places = TSNE(perplexity=min(30, (len(unit) - 1) / 3), init="pca", random_state=0).fit_transform(unit)  # [M, 2]
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    axis.scatter(*places.T, s=8, color="0.8")
    largest = Counter(seen.label(i) for i in numbers.tolist() if seen.label(i) is not None).most_common(len(COLOURS))
    for (name, _), colour in zip(largest, COLOURS, strict=False):
        axis.scatter(*places[[seen.label(i) == name for i in numbers.tolist()]].T, s=8, color=colour, label=name)
    if largest:
        figure.legend(loc="outside right center", frameon=False, markerscale=2)
    axis.set(title=f"{len(numbers)} images, t-SNE", xticks=[], yticks=[])
    save(figure, out / "map.png")
    return [f"Map: map.png has the images as points{', the largest classes in colour' if largest else ''}."]


# by the name of its files: what writes a kind and returns what is printed of it
KINDS = {
    "duplicates": _duplicates, "labels": _labels, "clusters": _clusters, "neighbours": _neighbours, "map": _map,
}  # fmt: skip
