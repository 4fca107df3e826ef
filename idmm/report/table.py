"""A grid's cells as tables: how each is printed, and what is best. Every format prints these same texts and marks."""

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

from idmm.report.stats import SHARES, Estimate, SeedStats, difference, format_number, pooled, seed_stats

MISSING, FAILED, SOME_FAILED, NO_BETTER = "—", "failed", "†", "‡"
BELOW_BASELINE = "§"


class Readout(NamedTuple):
    """What is measured, in percent: as tables are called, as a column is headed, and in words."""

    label: str
    unit: str
    said: str


# by protocol and the result's name; of each protocol the first is what a cell stands for
READOUTS = {
    ("finetune", "top1"): Readout("fine-tuning", "accuracy", "Top-1 accuracy after fine-tuning"),
    ("probe", "top1"): Readout("linear probe", "accuracy", "Top-1 accuracy of a linear probe"),
    ("probe", "knn"): Readout("kNN", "accuracy", "Top-1 accuracy of kNN"),
    ("detect", "ap"): Readout("detection", "AP", "Average precision (COCO's) of boxes"),
    ("detect", "mask_ap"): Readout("instance masks", "mask AP", "Average precision (COCO's) of instance masks"),
    ("segment", "miou"): Readout("segmentation", "mIoU", "Mean intersection over union of the classes"),
}
MAIN = {protocol: metric for protocol, metric in reversed(READOUTS)}


class Row(NamedTuple):
    """Where backbones start from."""

    source: str
    method: str

    @property
    def is_scratch(self) -> bool:
        return self == SCRATCH

    @property
    def label(self) -> str:
        return "from scratch" if self.is_scratch else f"{self.source}, {self.method}"

    @property
    def heads(self) -> tuple[str, str]:
        """What stands in the first two columns of a table."""
        return (self.label, "no pretraining") if self.is_scratch else (self.source, self.method)


SCRATCH = Row("scratch", "none")


@dataclass(frozen=True)
class TableCell:
    """A place of a table; its texts are free of markup."""

    stats: SeedStats
    gain: Estimate | None  # over the same backbone from scratch on the same target; of scratch itself there is none
    unusual_n: bool  # a mean of more or fewer runs than most
    no_better: bool  # than naming the largest class for every test image, as far as these images can show
    below_baseline: bool  # worse than the baseline
    best_of_column: bool  # of its backbone: ahead of each other row by a difference that the runs show
    best_of_source: bool  # likewise among the methods of its source

    @property
    def mean(self) -> str:
        if self.stats.mean is None:
            return FAILED if self.stats.status == "failed" else MISSING
        return format_number(self.stats.mean)

    @property
    def std(self) -> str:
        return "" if self.stats.std is None else format_number(self.stats.std)

    @property
    def some_failed(self) -> bool:
        return self.stats.n > 0 and self.stats.failed > 0

    @property
    def notes(self) -> list[str]:
        """What follows the mean."""
        std, n = f"± {self.std}" if self.std else "", f"n = {self.stats.n}" if self.unusual_n else ""
        return [note for note in (std, n, self.signs) if note]

    @property
    def signs(self) -> str:
        """The signs that the legend explains."""
        return SOME_FAILED * self.some_failed + NO_BETTER * self.no_better + BELOW_BASELINE * self.below_baseline


class Table:
    """The cells of one readout of a grid (what grid.json holds), in the user's order, scratch first.

    Attributes:
        counts: Runs by their status.
        cells: ``(backbone, row, target)`` -> TableCell, of the places that the grid has.
        largest: Share of a target's largest class among its test images (percent), where a run of it tells.
        baseline: Accuracy of logistic regression on hand-made features of a target (percent), if a run of it has that.
        usual_n: Runs of most places that have a value; of equals the larger number, 0 where there is no value.
    """

    def __init__(self, grid: dict, protocol: str, metric: str | None = None):
        self.protocol, self.metric = protocol, metric or MAIN[protocol]
        self.label, self.unit, self.said = READOUTS[protocol, self.metric]
        runs = [run for run in grid["cells"] if run["protocol"] == protocol]
        self.backbones, self.targets, sources, methods = (
            _ordered(grid[f"{name}s"], (run[name] for run in runs))
            for name in ("backbone", "target", "source", "method")
        )
        groups: dict[tuple, list[dict]] = {}
        for run in runs:
            groups.setdefault((run["backbone"], Row(run["source"], run["method"]), run["target"]), []).append(run)
        seen = {row for _, row, _ in groups}
        rows = [row for row in starmap(Row, product(sources, methods)) if row in seen]
        self.rows = sorted(rows, key=lambda row: not row.is_scratch)
        self.has_scratch, self.counts = SCRATCH in self.rows, Counter(run["status"] for run in runs)
        self.largest = {run["target"]: run["largest_class"] for run in grid["cells"] if run.get("largest_class")}
        told = [run for run in grid["cells"] if run.get("baseline_top1") is not None]
        floors = {target: [run["baseline_top1"] for run in told if run["target"] == target] for target in self.targets}
        self.baseline = {target: statistics.fmean(found) for target, found in floors.items() if found}
        self._stats = {place: seed_stats(group, self.metric) for place, group in groups.items()}
        for column in product(self.backbones, self.targets):
            here = {place: stats for place, stats in self._stats.items() if (place[0], place[2]) == column}
            # seeds move nothing where a run names one class, which says nothing of the others
            moved = [stats for stats in here.values() if not self._no_better(stats, column[1])]
            self._stats |= pooled(here, moved or here.values())
        counts = Counter(stats.n for stats in self._stats.values() if stats.n)
        self.usual_n = max(counts, key=lambda n: (counts[n], n), default=0)
        self.cells = {place: self._cell(*place) for place in self._stats}

    @property
    def is_main(self) -> bool:
        """Whether it has what the cells of its protocol stand for."""
        return self.metric == MAIN[self.protocol]

    @property
    def progress(self) -> str:
        """How many runs are done, without markup."""
        rest = "".join(f", {self.counts[status]} {status}" for status in ("failed", "missing") if self.counts[status])
        return f"{self.protocol}: {self.counts['ok']} of {self.counts.total()} cells done{rest}"

    def __bool__(self) -> bool:
        return bool(self.cells)

    def _cell(self, backbone: str, row: Row, target: str) -> TableCell:
        stats = self._stats[backbone, row, target]
        gain = None if row.is_scratch else self.lead(backbone, target, row, SCRATCH)
        no_better = self._no_better(stats, target)
        others = [other for other in self.rows if other != row and self.mean(backbone, other, target) is not None]
        groups = others, [other for other in others if other.source == row.source]
        best = (
            bool(group) and stats.n > 0 and not no_better and all(self.ahead(backbone, target, row, o) for o in group)
            for group in groups
        )
        below_baseline = stats.mean is not None and stats.mean < self.baseline.get(target, -1)
        return TableCell(stats, gain, stats.n not in (0, self.usual_n), no_better, below_baseline, *best)

    def _no_better(self, stats: SeedStats, target: str) -> bool:
        return stats.images is not None and stats.mean - stats.images[0] <= self.largest.get(target, -1)

    def lead(self, backbone: str, target: str, row: Row, other: Row) -> Estimate | None:
        """Returns how far a row is ahead of another; None where one has no value."""
        one, two = (self._stats.get((backbone, each, target)) for each in (row, other))
        return difference(one, two) if one and two else None

    def ahead(self, backbone: str, target: str, row: Row, other: Row) -> bool:
        """Whether the runs show that a row is better than another."""
        lead = self.lead(backbone, target, row, other)
        return lead is not None and lead.shown and lead.value > 0

    def rows_of(self, backbone: str) -> list[Row]:
        """Returns the rows that the backbone has; a file of weights is of one backbone only."""
        return [row for row in self.rows if any((backbone, row, target) in self._stats for target in self.targets)]

    def cells_of(self, backbone: str, row: Row) -> list[TableCell | None]:
        """Returns one cell for each target, None where the grid has no such place."""
        return [self.cells.get((backbone, row, target)) for target in self.targets]

    def mean(self, backbone: str, row: Row, target: str) -> float | None:
        """Returns a cell's mean, None where there is no value."""
        stats = self._stats.get((backbone, row, target))
        return stats.mean if stats else None

    @property
    def runs(self) -> list[dict]:
        """All runs, those from scratch first, then as the user named them."""
        places = [(backbone, row, target) for row, backbone, target in product(self.rows, self.backbones, self.targets)]
        return [run for place in places if place in self._stats for run in self._stats[place].runs]

    def caption(self, spread: str = "standard deviation") -> str:
        """Returns what the numbers are, as a sentence without markup."""
        over = f", mean ± {spread} over n = {self.usual_n} runs" if self.usual_n > 1 else ", one run each"
        differs = any(cell.unusual_n for cell in self.cells.values())
        return f"{self.said}, in percent{over}{', another n where noted' if differs else ''}."

    def legend(self) -> str:
        """Returns what those marks mean that occur."""
        return legend([self])

    def intervals(self) -> str:
        """Returns what the intervals are, as a sentence without markup."""
        seeds, images = (
            any(getattr(cell.stats, name) is not None for cell in self.cells.values()) for name in ("half", "images")
        )
        counted = self.metric in SHARES  # right or wrong, image by image
        if not (seeds or images):
            return f"One run each{' and no number of test images' if counted else ''}: there are no intervals."
        parts = ["seeds (their spread is taken from all cells of a column together)"] * seeds + ["test images"] * images
        more = "" if seeds else "; another seed may move a number by more"
        more += "" if counted else f"; other test images would move {self.unit}, too"
        over = f"Intervals are 95 % intervals over {' and '.join(parts)}{more}."
        return f"{over} A difference whose interval contains 0 may be chance."


def legend(tables: Iterable[Table]) -> str:
    """Returns what those marks mean that occur in tables."""
    cells = [cell for table in tables for cell in table.cells.values()]
    marks = (
        ("bold: better than each other row of its column", any(cell.best_of_column for cell in cells)),
        ("underlined: better than its source's other methods", any(cell.best_of_source for cell in cells)),
        (f"{MISSING}: not run yet", any(cell.mean == MISSING for cell in cells)),
        (f"{SOME_FAILED}: some runs failed and are left out", any(cell.some_failed for cell in cells)),
        (f"{NO_BETTER}: no better than naming the largest class for every image", any(c.no_better for c in cells)),
        (
            f"{BELOW_BASELINE}: below the baseline, logistic regression on hand-made features",
            any(cell.below_baseline for cell in cells),
        ),
    )
    text = "; ".join(text for text, occurs in marks if occurs)
    return text and f"{text[0].upper()}{text[1:]}."


def run_label(run: dict) -> str:
    """Names a run for people."""
    seeds = dict.fromkeys(str(run[name]) for name in ("pretrain_seed", "seed") if run[name] is not None)
    start = Row(run["source"], run["method"]).label
    return f"{start}: {run['backbone']} on {run['target']}, seed {'/'.join(seeds)}, {run['protocol']}"


def _ordered(named: Iterable[str], seen: Iterable[str]) -> list[str]:
    """The labels that occur, first those that are named, in that order."""
    seen = dict.fromkeys(seen)
    return [label for label in dict.fromkeys([*named, *seen]) if label in seen]
