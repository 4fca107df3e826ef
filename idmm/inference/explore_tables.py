"""The results of ``idmm explore``: tables with thumbnails, neighbours, a map, and the printed summary."""

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
from idmm.figures import COLOURS, save, shortened
from idmm.files import write_csv
from idmm.progress import aligned
from idmm.sheets import BLUE, CELL, LARGE, ORANGE, Tile, caption_sheet, in_rows, one_of_each

WORST = 10  # printed of each kind
PAIRS, ROWS, QUERIES = 24, 16, 8  # on the sheets: pairs, labels, neighbours
NEXT = 6  # images after the first of a row
MAPPED = 2000  # images on the map
THUMBNAIL = 96  # longest side (pixels)


@dataclass(frozen=True)
class Images:
    """The training images of a run, and the rows that they are compared by."""

    store: ImageStore
    labels: np.ndarray | None  # int64 [N], -1 for an image without one. None: there are no labels
    rows: np.ndarray  # float32 [N, d]
    notes: list[str]  # on missing labels

    def label(self, i: int) -> str | None:
        """Return the name of an image's class."""
        return None if self.labels is None or self.labels[i] < 0 else self.store.classes[self.labels[i]]

    def columns(self, *names: str) -> list[str]:
        """Return a table's columns on classes: none without labels."""
        return [] if self.labels is None else list(names)

    def classes(self, *numbers: int) -> list[str | None]:
        """Return the classes of images as cells: none without labels."""
        return [] if self.labels is None else [self.label(i) for i in numbers]

    def draw(self, out: Path, rows: list[tuple[str, list]], title: str, note: str = "", cell: float = CELL) -> None:
        """Draw a sheet. ``rows`` have (number, caption, frame) for each image."""
        rows = [(text, [Tile(self._thumbnail(i), *tile) for i, *tile in tiles]) for text, tiles in rows]
        caption_sheet(rows, out, title, note, cell)

    def _thumbnail(self, i: int) -> np.ndarray:
        image = Image.fromarray(self.store.picture(i))
        image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        return np.asarray(image)


@dataclass(frozen=True)
class Duplicate:
    """A pair of images that may be the same."""

    first: int
    second: int
    score: float | None  # None: the same file
    cosine: float
    kind: str  # "same file" or "near"


@dataclass(frozen=True)
class Similarities:
    """The result of comparing the images' rows."""

    near: similarity.Neighbours  # by cosine
    duplicates: list[Duplicate]  # likely ones
    margins: np.ndarray | None  # of the votes on each label, float64 [N]
    suggested: np.ndarray | None  # class of the neighbours, int64 [N]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _worst(rows: list[list], count: int) -> list[str]:
    """Return the first rows of a table as lines."""
    if not count:
        return []
    cells = [["" if cell is None else one_line(str(cell)) for cell in row] for row in rows[: 1 + min(count, WORST)]]
    return [f"  {line}" for line in aligned(cells)]


def _duplicates(images: Images, result: Similarities, out: Path) -> list[str]:
    pairs, names = result.duplicates, images.store.names
    rows = [["rank", "path", "duplicate", "score", "cosine", "kind", *images.columns("class", "duplicate_class")]]
    for rank, pair in enumerate(pairs, start=1):
        i, j = pair.first, pair.second
        score, cosine = _number(pair.score), _number(pair.cosine)
        rows.append([rank, names[i], names[j], score, cosine, pair.kind, *images.classes(i, j)])
    write_csv(out / "duplicates.csv", rows)
    tiles, groups = [], one_of_each([(pair.first, pair.second) for pair in pairs])
    for number, size in list(groups.items())[:PAIRS]:
        pair = pairs[number]
        reason = pair.kind if pair.score is None else f"{pair.kind}, {pair.score:.2f}"
        if size > 2:
            reason += f", group of {size}"
        for i, text in ((pair.first, reason), (pair.second, "")):
            tiles.append((i, f"{text}\n{names[i]}\n{images.label(i) or ''}", None))
    if pairs:
        title = f"A pair from each of {len(tiles) // 2} of {counted(len(groups), 'group')} of likely duplicates"
        note = f"{counted(len(pairs), 'likely pair')} in all"
        images.draw(out / "duplicates.png", in_rows(tiles), title, note, LARGE)
    same = sum(pair.kind == "same file" for pair in pairs)
    return [
        f"Likely duplicates: {counted(len(pairs), 'likely pair')}, {same} of them the same file",
        *_worst(rows, len(pairs)),
        "A picture with a duplicate has two targets. exclude.txt lists copies for --data.exclude. Copies that are not",
        "the same file are commented out with a #: remove it if you agree, and train again.",
    ]


def _labels(images: Images, result: Similarities, out: Path) -> list[str]:
    if images.labels is None:
        return ["Likely label errors: skipped, the images have no labels"]
    names, classes = images.store.names, images.store.classes
    order = np.lexsort((np.arange(len(names)), -result.margins))
    order = order[images.labels[order] >= 0]
    rows = [["rank", "path", "class", "suggested", "score", "likely"]]
    for rank, i in enumerate(order.tolist(), start=1):
        suggested = classes[result.suggested[i]] if result.suggested[i] >= 0 else None
        likely = "yes" if result.margins[i] > similarity.LIKELY else "no"
        rows.append([rank, names[i], images.label(i), suggested, _number(result.margins[i]), likely])
    write_csv(out / "labels.csv", rows)
    count = int((result.margins > similarity.LIKELY).sum())
    sheet = []
    for i in order[:count][:ROWS].tolist():
        text = f"labelled {shortened(images.label(i), 18)}\nneighbours: {shortened(classes[result.suggested[i]], 18)}"
        tiles = [(i, f"{images.label(i)}\n{names[i]}", ORANGE)]
        for j in result.near.index[i, :NEXT].tolist():
            tiles.append((j, images.label(j) or "no label", BLUE if images.labels[j] == result.suggested[i] else None))
        sheet.append((text, tiles))
    if sheet:
        note = "Orange: the image in question. Blue: neighbours of the suggested class"
        images.draw(out / "labels.png", sheet, f"{len(sheet)} of {counted(count, 'likely label error')}", note)
    return [
        f"Likely label errors: {counted(count, 'image')} whose nearest images have another label",
        *_worst(rows, count),
        "Check each: move the file to its class, or exclude it with --data.exclude.",
    ]


def _neighbours(images: Images, result: Similarities, out: Path) -> list[str]:
    near, names, sheet = result.near, images.store.names, []
    for i in np.unique(np.linspace(0, len(names) - 1, QUERIES).astype(int)).tolist():
        nearest = zip(near.index[i, :NEXT].tolist(), near.value[i, :NEXT].tolist(), strict=True)
        sheet.append(("", [(i, names[i], BLUE), *((j, f"{names[j]}\n{cosine:.2f}", None) for j, cosine in nearest)]))
    note = "Blue: a sample of the images. Then the nearest of each, with the cosine"
    images.draw(out / "neighbours.png", sheet, "Nearest images", note)
    return ["Nearest images: neighbours.png shows those of some images, with the cosine (1: the same)."]


def _map(images: Images, result: Similarities, out: Path) -> list[str]:
    """Draw the images as points in a plane in which neighbours stay neighbours (t-SNE; IDMM, Figure 2)."""
    from sklearn.manifold import TSNE

    numbers = np.unique(np.linspace(0, len(images.rows) - 1, MAPPED).astype(int))
    unit = similarity.unit_rows(images.rows)[numbers]
    places = TSNE(perplexity=min(30, (len(unit) - 1) / 3), init="pca", random_state=0).fit_transform(unit)  # [M, 2]
    figure = Figure(figsize=(7, 6), layout="constrained")
    axis = figure.subplots()
    axis.scatter(*places.T, s=8, color="0.8")
    labels = [images.label(i) for i in numbers.tolist()]
    largest = Counter(label for label in labels if label is not None).most_common(len(COLOURS))
    for (name, _), colour in zip(largest, COLOURS, strict=False):
        axis.scatter(*places[[label == name for label in labels]].T, s=8, color=colour, label=name)
    axis.set(title=f"{len(numbers)} images, t-SNE", xticks=[], yticks=[])
    line = "Map: map.png has the images as points"
    if largest:
        line += ", the largest classes in colour"
        figure.legend(loc="outside right center", frameon=False, markerscale=2)
    save(figure, out / "map.png")
    return [f"{line}."]


# name of the files -> writes them and returns the printed lines
KINDS = {"duplicates": _duplicates, "labels": _labels, "neighbours": _neighbours, "map": _map}
