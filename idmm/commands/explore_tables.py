"""What ``idmm explore`` found, as five tables: their rows, their sheets, and what is said of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from idmm import similarity
from idmm.data.cache import ImageStore
from idmm.data.composite import picture, shown_of
from idmm.data.split import counted
from idmm.pictures import shortened
from idmm.progress import aligned, log
from idmm.report.sheets import BLUE, CELL, LARGE, ORANGE, Tile, caption_sheet, in_rows, one_of_each

WORST = 10  # that are shown of each
PAIRS, ROWS, QUERIES = 24, 16, 8  # on the sheets: pairs, labels and clusters, neighbours
BESIDE = 6  # images beside the first of a row
WIDE = 8  # images in a row of clusters and outliers
THUMB = 96  # longest side of a thumbnail (pixels)
FAR_OUT = 3.0  # interquartile ranges above the third quartile (Tukey's far out values)


@dataclass
class Explored:
    """The training images of a run, and what was found about them."""

    run: Path
    names: list[str]  # as in the split, [N]
    digests: list[str]  # of the files
    labels: np.ndarray | None  # int64 [N], -1 where an image has none; None: there are no labels
    classes: list[str]  # name of each label
    by: str  # what was compared: instances or features
    rows: np.ndarray  # float32 [N, d]
    store: ImageStore
    features: np.ndarray  # float32 [N, d2]
    notes: list[str]  # what is missing, and why
    small: dict[int, np.ndarray] = field(default_factory=dict)  # thumbnails that were made

    def label(self, i: int) -> str | None:
        """Returns the name of an image's class."""
        return None if self.labels is None or self.labels[i] < 0 else self.classes[self.labels[i]]

    def thumbnail(self, i: int) -> np.ndarray:
        """Returns a small picture of an image, uint8 [h, w, 3]."""
        if i not in self.small:
            seen = Image.fromarray(picture(self.store, i))
            seen.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
            self.small[i] = np.asarray(seen)
        return self.small[i]


@dataclass(frozen=True)
class Found:
    """What the rows say of the images."""

    near: similarity.Neighbours  # by cosine
    pairs: list[tuple[int, int, float | None, float, str]]  # likely duplicates: numbers, score, cosine, kind
    margins: np.ndarray | None  # of the votes on each label, float64 [N]
    suggested: np.ndarray | None  # class that the neighbours have, int64 [N]
    isolation: np.ndarray  # the larger, the more of an outlier, float64 [N]
    cluster: np.ndarray  # int64 [N], the largest is 0
    centrality: np.ndarray  # cosine with the cluster's centre, float32 [N]


@dataclass(frozen=True)
class Sheet:
    """What is drawn of a table; images by their numbers, which need not be there to say what would be drawn."""

    rows: list[tuple[str, list]]  # text, and (number, caption, frame) of each image
    title: str
    note: str = ""
    cell: float = CELL  # inches


@dataclass
class Section:
    """A table, with what is said of it."""

    name: str  # of its files
    title: str
    said: str  # what was found, in a line
    count: int  # of what was found
    rows: list[Sequence] | None  # of the CSV, the header first; None: there is no such table
    worst: list[Sequence]  # rows to be shown
    lines: list[str]  # what it means and what to do next
    sheet: Sheet | None = None
    sheets: list[str] = field(default_factory=list)  # files, once they are drawn

    def draw(self, seen: Explored, out: Path) -> None:
        """Draws the sheet into a folder, where there is something to show."""
        if self.sheet is None:
            return
        log.info("drawing %s.png", self.name)
        rows = [(text, [Tile(seen.thumbnail(tile[0]), *tile[1:]) for tile in tiles]) for text, tiles in self.sheet.rows]
        note = "; ".join(filter(None, [self.sheet.note, shown_of(seen.store)]))
        caption_sheet(rows, out / f"{self.name}.png", self.sheet.title, note, self.sheet.cell)
        self.sheets = [f"{self.name}.png"]

    def shown(self) -> list[str]:
        """Returns the worst as lines of aligned columns."""
        if not self.worst:
            return []
        rows = (self.rows[0], *self.worst)
        return aligned([["" if cell is None else str(cell) for cell in row] for row in rows])

    def plain(self) -> dict:
        """Returns it for explore.json."""
        return {"name": self.name, "title": self.title, "count": self.count, "lines": [self.said, *self.lines]}


def sections(seen: Explored, found: Found, neighbours: int) -> list[Section]:
    """Returns the tables of what was found among the images; ``neighbours``: listed for each."""
    made = [_duplicates(seen, found), _labels(seen, found), _outliers(seen, found), _clusters(seen, found)]
    return [*made, _neighbours(seen, found, neighbours)]


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _class(seen: Explored, *numbers: int) -> list[str | None]:
    """The classes of images as cells; nothing where there are no labels."""
    return [] if seen.labels is None else [seen.label(i) for i in numbers]


# ---------------------------------------------------------------------- duplicates
def _duplicates(seen: Explored, found: Found) -> Section:
    pairs, labelled = found.pairs, seen.labels is not None
    rows = [["rank", "path", "duplicate", "score", "cosine", "kind", *(["class", "duplicate_class"] * labelled)]]
    for rank, (i, j, score, cosine, kind) in enumerate(pairs, start=1):
        values = (_number(score), _number(cosine), kind)
        rows.append([rank, seen.names[i], seen.names[j], *values, *_class(seen, i, j)])
    same = sum(kind == "same file" for *_, kind in pairs)
    said = f"{counted(len(pairs), 'likely pair')}, {same} of them the same file"
    lines = [
        "One picture then has two targets: instance discrimination is punished for recognising it. exclude.txt names "
        "copies for --data.exclude, all but those of the same file behind a #: remove it where you agree, and train "
        "again."
    ]
    drawn, groups = [], one_of_each([pair[:2] for pair in pairs])
    for (i, j, score, _, kind), many in [(pairs[n], many) for n, many in groups.items()][:PAIRS]:
        why = (kind if score is None else f"{kind}, {score:.2f}") + (f"; {many} alike" if many > 2 else "")
        drawn.extend((n, f"{text}\n{seen.names[n]}\n{seen.label(n) or ''}", None) for n, text in ((i, why), (j, "")))
    title = f"A pair of {len(drawn) // 2} of {counted(len(groups), 'group')} of likely duplicates"
    note = f"{counted(len(pairs), 'likely pair')} in all; alike: images of the group"
    sheet = Sheet(in_rows(drawn), title, note, LARGE) if pairs else None
    return Section("duplicates", "Likely duplicates", said, len(pairs), rows, rows[1 : 1 + WORST], lines, sheet)


# ---------------------------------------------------------------------- labels
def _labels(seen: Explored, found: Found) -> Section:
    about = ("labels", "Likely label errors")
    if seen.labels is None:
        return Section(*about, "not looked for, the images have no labels", 0, None, [], [])
    order = np.lexsort((np.arange(len(seen.names)), -found.margins))
    order = order[seen.labels[order] >= 0]
    rows = [["rank", "path", "class", "suggested", "score", "likely", "neighbours"]]
    for rank, i in enumerate(order.tolist(), start=1):
        likely = "yes" if found.margins[i] > similarity.LIKELY else "no"
        voters = [label for label in seen.labels[found.near.index[i]] if label >= 0][: similarity.VOTERS]
        voted = Counter(seen.classes[label] for label in voters).most_common(3)
        text = ", ".join(f"{name} {count}" for name, count in voted)
        named = (seen.label(i), seen.classes[found.suggested[i]] if found.suggested[i] >= 0 else None)
        rows.append([rank, seen.names[i], *named, _number(found.margins[i]), likely, text])
    count = int((found.margins > similarity.LIKELY).sum())
    said = f"{counted(count, 'image')} whose nearest images carry another label"
    lines = ["Look at each: move the file to the class that it is of, or leave it out with --data.exclude."]
    drawn = []
    for i in order[:count][:ROWS].tolist():
        text = f"labelled {shortened(seen.label(i), 18)}\nneighbours: {shortened(seen.classes[found.suggested[i]], 18)}"
        tiles = [(i, f"{seen.label(i)}\n{seen.names[i]}", ORANGE)]
        for j in found.near.index[i, :BESIDE].tolist():
            tiles.append((j, seen.label(j) or "no label", BLUE if seen.labels[j] == found.suggested[i] else None))
        drawn.append((text, tiles))
    note = "orange: the image in question; blue: neighbours of the class that they suggest"
    sheet = Sheet(drawn, f"{len(drawn)} of {counted(count, 'likely label error')}", note) if count else None
    return Section(*about, said, count, rows, rows[1 : 1 + min(WORST, count)], lines, sheet)


# ---------------------------------------------------------------------- outliers
def _outliers(seen: Explored, found: Found) -> Section:
    far, order = found.isolation, np.lexsort((np.arange(len(seen.names)), -found.isolation))
    first, third = np.percentile(far, [25, 75])
    count = int((far > third + FAR_OUT * (third - first)).sum())
    rows = [["rank", "path", "distance", *(["class"] if seen.labels is not None else [])]]
    for rank, i in enumerate(order.tolist(), start=1):
        rows.append([rank, seen.names[i], _number(far[i]), *_class(seen, i)])
    said = f"{counted(count, 'image')} far out (distance to the 10th nearest image, by features); all are ranked"
    lines = ["Look at the first: leave out what does not belong here with --data.exclude; what is rare may be right."]
    tiles = [(i, f"{seen.names[i]}\n{far[i]:.3g}", None) for i in order[: 4 * WIDE].tolist()]
    title = f"The {len(tiles)} images that are furthest out"
    sheet = Sheet(in_rows(tiles, WIDE), title, "below each its distance")
    return Section("outliers", "Outliers", said, count, rows, rows[1 : 1 + WORST], lines, sheet)


# ---------------------------------------------------------------------- clusters and neighbours
def _clusters(seen: Explored, found: Found) -> Section:
    order = np.lexsort((np.arange(len(seen.names)), -found.centrality, found.cluster))
    groups = [order[found.cluster[order] == c] for c in range(found.cluster.max() + 1)]
    rows = [["cluster", "size", "medoid", "path", "cosine", *(["class"] if seen.labels is not None else [])]]
    worst, drawn = [], []
    for number, members in enumerate(groups, start=1):
        medoid = seen.names[members[0]]
        for i in members.tolist():
            shared = (number, len(members), medoid, seen.names[i], _number(found.centrality[i]))
            rows.append([*shared, *_class(seen, i)])
        worst.append(rows[-len(members)])
        mostly = _mostly(seen, members)
        text = f"cluster {number}\n{counted(len(members), 'image')}" + (f"\n{mostly}" if mostly else "")
        drawn.append((text, [(i, seen.names[i], None) for i in members[:WIDE].tolist()]))
    sizes = f"{len(groups[-1])} to {len(groups[0])} images"
    said = f"{len(groups)}, of {sizes}, each named by its medoid, the image nearest to its centre"
    lines = ["What the images fall into: small clusters are often another kind of picture."]
    note = "the images nearest to the centre of each, the nearest first"
    title = f"{min(ROWS, len(groups))} of {counted(len(groups), 'cluster')}"
    sheet = Sheet(drawn[:ROWS], title, note)
    return Section("clusters", "Clusters", said, len(groups), rows, worst[:WORST], lines, sheet)


def _mostly(seen: Explored, members: np.ndarray) -> str:
    if seen.labels is None:
        return ""
    (label, times), *_ = Counter(seen.label(i) or "no label" for i in members.tolist()).most_common(1)
    return f"{100 * times / len(members):.0f} % {shortened(label, 18)}"


def _neighbours(seen: Explored, found: Found, many: int) -> Section:
    near = found.near
    many = min(many, near.index.shape[1])
    rows = [["path", "rank", "neighbour", "cosine"]]
    for i, name in enumerate(seen.names):
        for rank in range(many):
            rows.append([name, rank + 1, seen.names[near.index[i, rank]], _number(near.value[i, rank])])
    spread = np.unique(np.linspace(0, len(seen.names) - 1, QUERIES).astype(int)).tolist()
    drawn = []
    for i in spread:
        tiles = [(i, seen.names[i], BLUE)]
        for j, cosine in zip(near.index[i, :BESIDE].tolist(), near.value[i, :BESIDE].tolist(), strict=True):
            tiles.append((j, f"{seen.names[j]}\n{cosine:.2f}", None))
        drawn.append(("", tiles))
    sheet = Sheet(drawn, "Nearest images", "blue: some images, evenly drawn; beside each its nearest, with the cosine")
    said = f"the {many} nearest of each image"
    lines = ["They are all in neighbours.csv, with how near they are (cosine; 1: alike)."]
    return Section("neighbours", "Nearest images", said, len(rows) - 1, rows, [], lines, sheet)
