"""The results of ``idmm explore``: tables with thumbnails, neighbours, a map, and the printed
summary."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage

from idmm.data.check import ImageRef, Pair
from idmm.data.image_store import ImageStore
from idmm.evaluation import similarity
from idmm.figures import COLOURS, save, shortened
from idmm.files import write_csv
from idmm.progress import aligned
from idmm.report.sheets import (
    BLUE,
    LARGE,
    ORANGE,
    Tile,
    caption_sheet,
    in_rows,
    one_of_each,
    thumbnail,
)
from idmm.text import counted, one_line

WORST = 10  # printed of each kind
# on the sheets: pairs, labels, neighbours
PAIRS = 24
ROWS = 16
QUERIES = 8
NEXT = 6  # images after the first of a row
MAPPED = 2000  # images on the map
APART = 0.05  # least distance of two thumbnails on the map, relative to its sides
THUMBNAIL = 22  # longest side of a thumbnail on the map (points)


@dataclass(frozen=True)
class Similarities:
    """The images of a run, and the result of comparing them."""

    stores: dict[str, ImageStore]  # by split
    images: list[ImageRef]  # of all splits
    unit: np.ndarray  # rows that the images are compared by, of length 1, float32 [N, d]
    near: similarity.Neighbours  # by cosine
    duplicates: list[Pair]  # likely ones, those of different classes first
    margins: np.ndarray  # of the votes on each label, float64 [N]
    suggested: list[str | None]  # class of the neighbours
    maps: dict[str, np.ndarray] = field(default_factory=dict)  # run -> features of the images
    classes: list[str] = field(default_factory=list)  # on the map. None: all

    def tile(self, image: ImageRef, caption: str, frame: str | None = None) -> Tile:
        """Return the thumbnail of an image."""
        return thumbnail(self.stores[image.split].picture(image.index), caption, frame)


def _worst(rows: list[list], count: int) -> list[str]:
    """Return the header and the first of ``count`` rows of a table as lines, none without rows."""
    cells = [
        ["" if cell is None else one_line(str(cell)) for cell in row]
        for row in rows[: 1 + min(count, WORST)]
    ]
    if count:
        return [f"  {line}" for line in aligned(cells)]
    return []


def _duplicates(found: Similarities, out: Path) -> list[str]:
    pairs = found.duplicates
    with_classes = any(image.label for image in found.images)
    rows = [
        [
            "rank",
            "path",
            "duplicate",
            "cosine",
            "kind",
            *(["class", "duplicate_class"] if with_classes else []),
        ]
    ]
    for rank, pair in enumerate(pairs, start=1):
        if with_classes:
            classes = [pair.first.label, pair.second.label]
        else:
            classes = []
        rows.append(
            [rank, pair.first.name, pair.second.name, f"{pair.similarity:.4g}", pair.kind, *classes]
        )
    write_csv(out / "duplicates.csv", rows)
    tiles = []
    for pair in one_of_each(pairs)[:PAIRS]:
        for image, text in ((pair.first, f"{pair.kind}, {pair.similarity:.2f}"), (pair.second, "")):
            tiles.append(found.tile(image, f"{text}\n{image.name}\n{image.label or ''}"))
    if pairs:
        title = f"{len(tiles) // 2} of {counted(len(pairs), 'likely pair')} of duplicates, with their cosine"
        caption_sheet(in_rows(tiles), out / "duplicates.png", title, cell=LARGE)
    same = sum(pair.kind == "same file" for pair in pairs)
    conflicts = sum(pair.disagrees for pair in pairs)
    return [
        f"Likely duplicates: {counted(len(pairs), 'likely pair')}, {same} of them the same file",
        f"The labels of {counted(conflicts, 'pair')} differ. These come first.",
        *_worst(rows, len(pairs)),
        "To train without copies, pass exclude.txt to --data.exclude. It names the copies of a file.",
        "Copies that are not the same file have a # there: remove it if you agree.",
    ]


def _labels(found: Similarities, out: Path) -> list[str]:
    images = found.images
    suggested = found.suggested
    order = [
        i for i in np.argsort(-found.margins, kind="stable").tolist() if images[i].label is not None
    ]
    if not order:
        return ["Likely label errors: skipped, the images have no labels"]
    rows = [["rank", "path", "class", "suggested", "score", "split"]]
    for rank, i in enumerate(order, start=1):
        image = images[i]
        rows.append(
            [rank, image.name, image.label, suggested[i], f"{found.margins[i]:.4g}", image.split]
        )
    write_csv(out / "labels.csv", rows)
    count = int((found.margins > similarity.LIKELY).sum())
    sheet = []
    for i in order[: min(count, ROWS)]:
        label = images[i].label
        text = f"labelled {shortened(label, 18)}\nneighbours: {shortened(suggested[i], 18)}"
        tiles = [found.tile(images[i], f"{label}\n{images[i].name}", ORANGE)]
        for j in found.near.index[i, :NEXT].tolist():
            other = images[j].label
            tiles.append(
                found.tile(images[j], other or "no label", BLUE if other == suggested[i] else None)
            )
        sheet.append((text, tiles))
    if sheet:
        note = "Orange: the image in question. Blue: neighbours of the suggested class"
        title = f"{len(sheet)} of {counted(count, 'likely label error')}"
        caption_sheet(sheet, out / "labels.png", title, note)
    return [
        f"Likely label errors: {counted(count, 'image')} whose nearest images have another label",
        *_worst(rows, count),
        "Check each: move the file to its class, or exclude it with --data.exclude.",
    ]


def _neighbours(found: Similarities, out: Path) -> list[str]:
    near = found.near
    images = found.images
    sheet = []
    for i in np.unique(np.linspace(0, len(images) - 1, QUERIES).astype(int)).tolist():
        nearest = zip(near.index[i, :NEXT].tolist(), near.value[i, :NEXT].tolist(), strict=True)
        tiles = [found.tile(images[j], f"{images[j].name}\n{cosine:.2f}") for j, cosine in nearest]
        sheet.append(("", [found.tile(images[i], images[i].name, BLUE), *tiles]))
    note = "Blue: a sample of the images. Then the nearest of each, with the cosine"
    caption_sheet(sheet, out / "neighbours.png", "Nearest images", note)
    return [
        "Nearest images: neighbours.png shows those of some images, with the cosine (1: the same)."
    ]


def _map(found: Similarities, out: Path) -> list[str]:
    """Draw the images as points in a plane in which neighbours stay neighbours (t-SNE; IDMM, Figure
    2)."""
    from sklearn.manifold import TSNE

    numbers = np.arange(len(found.images))
    if found.classes:
        numbers = np.flatnonzero([image.label in found.classes for image in found.images])
    numbers = numbers[np.unique(np.linspace(0, len(numbers) - 1, MAPPED).astype(int))]
    tsne = TSNE(perplexity=min(30, (len(numbers) - 1) / 3), init="pca", random_state=0)
    labels = [found.images[i].label for i in numbers]
    largest = Counter(filter(None, labels)).most_common(len(COLOURS))
    colours = {name: colour for (name, _), colour in zip(largest, COLOURS, strict=False)}
    figure = Figure(figsize=(2 + 8 * len(found.maps), 8.5), layout="constrained")
    axes = figure.subplots(1, len(found.maps), squeeze=False)[0]
    for axis, (run, rows) in zip(axes, found.maps.items(), strict=True):
        if not np.ptp(rows, axis=0).any():
            return [
                f"Map: skipped, the features of all images are equal: the network of {run} has collapsed"
            ]
        places = tsne.fit_transform(similarity.unit_rows(rows[numbers]))  # [M, 2]
        axis.scatter(*places.T, s=8, color="0.8")
        for name, colour in colours.items():
            axis.scatter(
                *places[[label == name for label in labels]].T, s=8, color=colour, label=name
            )
        shares = places / np.ptp(places, axis=0)
        shown = []
        for i, share in enumerate(shares):
            if (np.abs(shares[shown] - share).max(axis=1) > APART).all():
                shown.append(i)
                tile = found.tile(found.images[numbers[i]], "")
                picture = OffsetImage(tile.image, zoom=THUMBNAIL / max(tile.image.shape))
                frame = {"edgecolor": colours.get(labels[i], "0.8"), "linewidth": 1.5}
                axis.add_artist(AnnotationBbox(picture, places[i], pad=0.05, bboxprops=frame))
        axis.set(title=f"{len(numbers)} images, t-SNE of {shortened(run)}", xticks=[], yticks=[])
    if largest:
        legend = {"loc": "outside right center", "frameon": False, "markerscale": 2}
        figure.legend(*axes[0].get_legend_handles_labels(), **legend)
    save(figure, out / "map.png")
    return [
        "Map: map.png has the images as points and some as thumbnails, the largest classes in colour."
    ]


# name of the files -> writes them and returns the printed lines
KINDS = {"duplicates": _duplicates, "labels": _labels, "neighbours": _neighbours, "map": _map}
