"""The results of ``idmm explore``: tables with thumbnails, neighbours, a map, and a summary."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox, OffsetImage

from idmm.data.check import ImageRef, Pair, one_of_each
from idmm.data.image_store import ImageStore
from idmm.data.split import spread
from idmm.evaluation import Floats, Integers, similarity
from idmm.figures import COLOURS, save, shortened
from idmm.files import write_csv
from idmm.progress import aligned
from idmm.report.sheets import (
    BLUE,
    LARGE,
    ORANGE,
    SheetRow,
    Tile,
    caption_sheet,
    in_rows,
    thumbnail,
)
from idmm.text import counted, one_line

WORST = 10  # printed of each kind
PAIRS = 24  # on the sheet of duplicates
ROWS = 16  # on the sheet of labels
QUERIES = 8  # rows on a sheet of neighbours
NEXT = 6  # images after the first of a row
MAPPED = 2000  # images on the map
APART = 0.05  # least distance of two thumbnails on the map, relative to its sides
THUMBNAIL = 22  # longest side of a thumbnail on the map (points)

WEIGHT = "classifier.weight"  # W in the state of a run of IDMM

Row = Sequence[str | int | None]  # of a CSV file
Stores = dict[str, ImageStore]  # by split


@dataclass(frozen=True)
class Similarities:
    """The N images of a run, and the result of comparing them."""

    stores: Stores
    images: list[ImageRef]  # of all splits
    unit: Floats  # rows that the images are compared by, of length 1, [N, d]
    near: similarity.Neighbours  # by cosine
    duplicates: list[Pair]  # likely ones, those of different classes first
    margins: Floats  # of the votes on each label, [N]
    suggested: list[str | None]  # class of the neighbours
    maps: dict[str, Floats]  # run -> features of the images, [N, d]
    classes: list[str]  # on the map. Empty: all

    def tile(self, image: ImageRef, caption: str, frame: str | None = None) -> Tile:
        """Return the thumbnail of an image."""
        store = self.stores[image.split]
        return thumbnail(store.picture(image.index), caption, frame)


def _worst(rows: list[Row], count: int) -> list[str]:
    """Return the header and the first of ``count`` rows of a table as lines, none without rows."""
    if not count:
        return []
    texts = []
    for row in rows[: 1 + min(count, WORST)]:
        cells = ["" if cell is None else str(cell) for cell in row]
        texts.append(list(map(one_line, cells)))
    return [f"  {line}" for line in aligned(texts)]


def _duplicates(similarities: Similarities, out: Path) -> list[str]:
    """Write likely duplicates as a table and a sheet of pairs."""
    pairs = similarities.duplicates
    columns = ["rank", "path", "duplicate", "cosine", "kind", "class", "duplicate_class"]
    if not any(image.label for image in similarities.images):
        columns = columns[:5]
    rows: list[Row] = [columns]
    for rank, pair in enumerate(pairs, start=1):
        first = pair.first
        second = pair.second
        cosine = f"{pair.similarity:.4g}"
        row: Row = [rank, first.name, second.name, cosine, pair.kind, first.label, second.label]
        rows.append(row[: len(columns)])
    write_csv(out / "duplicates.csv", rows)
    tiles = []
    for pair in one_of_each(pairs)[:PAIRS]:
        kind = f"{pair.kind}, {pair.similarity:.2f}"
        for image, text in ((pair.first, kind), (pair.second, "")):
            caption = f"{text}\n{image.name}\n{image.label or ''}"
            tiles.append(similarities.tile(image, caption))
    count = counted(len(pairs), "likely pair")
    if pairs:
        title = f"{len(tiles) // 2} of {count} of duplicates, with their cosine"
        caption_sheet(in_rows(tiles), out / "duplicates.png", title, cell=LARGE)
    same = sum(pair.kind == "same file" for pair in pairs)
    conflicts = sum(pair.disagrees for pair in pairs)
    return [
        f"Likely duplicates: {count}, {same} of them the same file",
        f"The labels of {counted(conflicts, 'pair')} differ. These come first.",
        *_worst(rows, len(pairs)),
        "To train without copies, pass exclude.txt to --data.exclude. "
        "It names the copies of a file.",
        "Copies that are not the same file have a # there: remove it if you agree.",
    ]


def _labels(similarities: Similarities, out: Path) -> list[str]:
    """Write labels that neighbours do not share as a table and a sheet."""
    images = similarities.images
    margins = similarities.margins
    order = []
    for i in np.argsort(-margins, kind="stable").tolist():
        if images[i].label is not None:
            order.append(i)
    if not order:
        return ["Likely label errors: skipped, the images have no labels"]
    rows: list[Row] = [["rank", "path", "class", "suggested", "score", "split"]]
    for rank, i in enumerate(order, start=1):
        image = images[i]
        suggested = similarities.suggested[i]
        rows.append([rank, image.name, image.label, suggested, f"{margins[i]:.4g}", image.split])
    write_csv(out / "labels.csv", rows)
    count = int((margins > similarity.LIKELY).sum())
    sheet = [_label_row(similarities, i) for i in order[: min(count, ROWS)]]
    if sheet:
        note = "Orange: the image in question. Blue: neighbours of the suggested class"
        title = f"{len(sheet)} of {counted(count, 'likely label error')}"
        caption_sheet(sheet, out / "labels.png", title, note)
    return [
        f"Likely label errors: {counted(count, 'image')} whose nearest images have another label",
        *_worst(rows, count),
        "Check each: move the file to its class, or exclude it with --data.exclude.",
    ]


def _label_row(similarities: Similarities, i: int) -> SheetRow:
    """Return an image whose label is likely wrong, with its neighbours."""
    image = similarities.images[i]
    suggested = similarities.suggested[i]
    tiles = [similarities.tile(image, f"{image.label}\n{image.name}", ORANGE)]
    for j in similarities.near.index[i, :NEXT].tolist():
        neighbour = similarities.images[j]
        frame = BLUE if neighbour.label == suggested else None
        tiles.append(similarities.tile(neighbour, neighbour.label or "no label", frame))
    label = shortened(str(image.label), 18)
    return SheetRow(f"labelled {label}\nneighbours: {shortened(str(suggested), 18)}", tiles)


def _neighbours(similarities: Similarities, out: Path) -> list[str]:
    """Draw the nearest images of some."""
    near = similarities.near
    images = similarities.images
    sheet = []
    for i in spread(len(images), QUERIES).tolist():
        tiles = [similarities.tile(images[i], images[i].name, BLUE)]
        for j, cosine in zip(near.index[i, :NEXT], near.value[i, :NEXT], strict=True):
            caption = f"{images[j].name}\n{cosine:.2f}"
            tiles.append(similarities.tile(images[j], caption))
        sheet.append(SheetRow("", tiles))
    note = "Blue: a sample of the images. Then the nearest of each, with the cosine"
    caption_sheet(sheet, out / "neighbours.png", "Nearest images", note)
    return [
        "Nearest images: neighbours.png shows those of some images, with the cosine (1: the same)."
    ]


def _map(similarities: Similarities, out: Path) -> list[str]:
    """Draw the images in a plane in which neighbours stay neighbours (t-SNE; IDMM, Figure 2)."""
    images = similarities.images
    maps = similarities.maps
    for run, rows in maps.items():
        if not np.ptp(rows, axis=0).any():
            return [
                "Map: skipped, the features of all images are equal: "
                f"the network of {run} has collapsed"
            ]
    numbers = np.arange(len(images))
    if similarities.classes:
        numbers = np.flatnonzero([image.label in similarities.classes for image in images])
    numbers = numbers[spread(len(numbers), MAPPED)]
    labels = Counter(images[i].label for i in numbers if images[i].label)
    largest = [label for label, _ in labels.most_common(len(COLOURS))]
    colours = dict(zip(largest, COLOURS, strict=False))
    figure = Figure(figsize=(2 + 8 * len(maps), 8.5), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, (run, rows) in zip(axes, maps.items(), strict=True):
        _draw_map(axis, similarities, rows, numbers, colours)
        axis.set(title=f"{len(numbers)} images, t-SNE of {shortened(run)}", xticks=[], yticks=[])
    if colours:
        handles, names = axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside right center", frameon=False, markerscale=2)
    save(figure, out / "map.png")
    return [
        "Map: map.png has the images as points and some as thumbnails, "
        "the largest classes in colour."
    ]


def _draw_map(
    axis: Axes,
    similarities: Similarities,
    rows: Floats,
    numbers: Integers,
    colours: dict[str | None, str],
) -> None:
    """Draw the M images of ``numbers`` by their rows of features, [N, d]."""
    from sklearn.manifold import TSNE

    tsne = TSNE(perplexity=min(30, (len(numbers) - 1) / 3), init="pca", random_state=0)
    places = tsne.fit_transform(similarity.unit_rows(rows[numbers]))  # [M, 2]
    labels = [similarities.images[i].label for i in numbers]
    axis.scatter(places[:, 0], places[:, 1], s=8, color="0.8")
    for name, colour in colours.items():
        of_class = places[[label == name for label in labels]]
        axis.scatter(of_class[:, 0], of_class[:, 1], s=8, color=colour, label=name)
    shares = places / np.ptp(places, axis=0)
    shown: list[int] = []  # as thumbnails
    for i, share in enumerate(shares):
        distances = np.abs(shares[shown] - share).max(axis=1)
        if not (distances > APART).all():
            continue
        shown.append(i)
        image = similarities.images[numbers[i]]
        pixels = similarities.tile(image, "").image
        picture = OffsetImage(pixels, zoom=THUMBNAIL / max(pixels.shape))
        frame = {"edgecolor": colours.get(image.label, "0.8"), "linewidth": 1.5}
        axis.add_artist(AnnotationBbox(picture, places[i], pad=0.05, bboxprops=frame))


# ---------------------------------------------------------------------- rows of the N-way layer
def instance_rows(run: Path) -> Floats | None:
    """Return W of a run's last checkpoint, float32 [N, d]. None if the run has none."""
    file = run / "last" / "state.pt"
    if not file.exists():
        return None
    state = torch.load(file, map_location="cpu", weights_only=True)
    weights: dict[str, torch.Tensor] = state["method"]
    if WEIGHT not in weights:
        return None
    return weights[WEIGHT].float().numpy()


def write_rows(similarities: Similarities, rows: Floats, out: Path) -> list[str]:
    """Draw images with the nearest rows of W and features (section 3.1 of IDMM's paper).

    Args:
        similarities: Those of the images of the run, the images of training first.
        rows: W, float32 [N, d], of the N training images.
        out: Folder of ``rows.png``.

    Returns:
        The printed lines.
    """
    images = similarities.images[: len(rows)]
    labels = [image.label for image in images]
    nearest = {
        "features": similarity.nearest(similarities.unit[: len(rows)], NEXT).index,
        "rows of W": similarity.nearest(similarity.unit_rows(rows), NEXT).index,
    }
    sheet = []
    for i in spread(len(images), QUERIES).tolist():
        image = images[i]
        for kind, index in nearest.items():
            tiles = [similarities.tile(image, image.name, BLUE)]
            for j in index[i].tolist():
                neighbour = images[j]
                frame = None
                if None not in (image.label, neighbour.label) and image.label != neighbour.label:
                    frame = ORANGE
                tiles.append(similarities.tile(neighbour, neighbour.name, frame))
            sheet.append(SheetRow(kind, tiles))
    note = "Blue: a sample of the images. Orange: of another class"
    caption_sheet(sheet, out / "rows.png", "Nearest features and nearest rows of W", note)
    lines = ["Nearest rows of W: rows.png shows them next to the nearest features."]
    for kind, index in nearest.items():
        share = _equal_classes(index, labels)
        if share is not None:
            lines.append(f"  {kind}: {100 * share:.1f} % of the {NEXT} nearest have the same class")
    return lines


def _equal_classes(index: Integers, labels: list[str | None]) -> float | None:
    """Return the share of neighbours [N, k] that have the class of their image.

    None: no image with a label has a neighbour with one.
    """
    classes = np.array([label or "" for label in labels])
    neighbours = classes[index]  # [N, k]
    labelled = (classes[:, None] != "") & (neighbours != "")
    if not labelled.any():
        return None
    return float((neighbours == classes[:, None])[labelled].mean())


# name of the files -> writes them and returns the printed lines
KINDS = {"duplicates": _duplicates, "labels": _labels, "neighbours": _neighbours, "map": _map}
