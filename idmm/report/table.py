"""A grid's cells as tables, with the texts and marks that every format prints."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, NamedTuple

from idmm.config import METHODS
from idmm.report.stats import (
    Estimate,
    Grid,
    Run,
    SeedStats,
    difference,
    format_number,
    pooled,
    seed_stats,
)

MISSING = "—"
FAILED = "failed"
SOME_FAILED = "†"
NO_BETTER = "‡"
BELOW_BASELINE = "§"


LABELS = {"finetune": "fine-tuning", "probe": "linear probe"}  # by protocol


class Row(NamedTuple):
    """How backbones start: the rows of a table."""

    source: str
    method: str

    @property
    def label(self) -> str:
        """Its name in texts."""
        if self == SCRATCH:
            return "from scratch"
        return f"{self.source}, {self.method}"

    @property
    def heads(self) -> tuple[str, str]:
        """The texts in the first two columns of a table."""
        if self == SCRATCH:
            return (self.label, "no pretraining")
        return (self.source, self.method)

    @property
    def printed_method(self) -> str:
        """The method as papers write it."""
        if self.method in METHODS:
            return METHODS[self.method].__name__
        return self.heads[1]


SCRATCH = Row("scratch", "none")


class Place(NamedTuple):
    """A place of a table."""

    backbone: str
    row: Row
    target: str


@dataclass(frozen=True)
class TableCell:
    """The content of a place. Its texts have no markup."""

    stats: SeedStats
    # over the same backbone from scratch on the same target. None for scratch itself
    gain: Estimate | None
    unusual_n: bool  # a mean of more or fewer runs than most
    # than always predicting the largest class, within the interval over test images
    no_better: bool
    below_baseline: bool  # worse than the baseline
    # of its backbone: better than each other row by a difference that the runs show
    best_of_column: bool

    @property
    def mean(self) -> str:
        """The mean, or why there is none."""
        if self.stats.mean is not None:
            return format_number(self.stats.mean)
        if self.stats.failed:
            return FAILED
        return MISSING

    @property
    def std(self) -> str:
        """The standard deviation, empty for less than two runs."""
        return "" if self.stats.std is None else format_number(self.stats.std)

    @property
    def number(self) -> str:
        """The mean with the standard deviation, and with the number of runs if it is unusual."""
        number = self.mean
        if self.std:
            number += f" ± {self.std}"
        if self.unusual_n:
            number += f" (n = {self.stats.n})"
        return number

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.number} {self.signs}".rstrip()

    @property
    def signs(self) -> str:
        """The signs that the legend explains."""
        signs = ""
        for mark in MARKS:
            if mark.applies(self):
                signs += mark.sign
        return signs


class Mark(NamedTuple):
    """What the legend explains."""

    sign: str  # after the mean
    meaning: str  # a sentence
    applies: Callable[[TableCell], bool]


MARKS = (
    Mark("", "Bold: better than each other row of its column.", lambda cell: cell.best_of_column),
    Mark("", f"{MISSING}: not run yet.", lambda cell: cell.mean == MISSING),
    Mark(
        SOME_FAILED,
        f"{SOME_FAILED}: some runs failed and do not count.",
        lambda cell: cell.stats.n > 0 and cell.stats.failed > 0,
    ),
    Mark(
        NO_BETTER,
        f"{NO_BETTER}: no better than always predicting the largest class.",
        lambda cell: cell.no_better,
    ),
    Mark(
        BELOW_BASELINE,
        f"{BELOW_BASELINE}: below the baseline, logistic regression on hand-made features.",
        lambda cell: cell.below_baseline,
    ),
)


class Table:
    """The top-1 accuracies of a grid (grid.json), in the user's order, scratch first.

    Attributes:
        counts: Runs by their status.
        cells: The content of each place that has runs.
        largest: Share of a target's largest class among its test images (percent), if a run has it.
        baseline: Accuracy of the baseline on a target (percent), if a run has it.
        params: Parameters of a backbone without its classifier, if a run has it.
        usual_n: The most frequent number of several runs per cell, the larger of equals. 1: no cell
            has several.
        baseline_sizes: Number of images that a target's baseline was fitted to, if a run has it.
        test_sizes: Number of a target's test images, if a run has it.
    """

    def __init__(self, grid: Grid):
        runs: list[Run] = grid["cells"]
        self.protocol: str = grid["protocol"]
        self.label = LABELS[self.protocol]
        self.backbones = _labels(grid, "backbone")
        self.targets = _labels(grid, "target")
        self.counts = Counter(run["status"] for run in runs)
        self.largest = _known(runs, "target", "largest_class")
        self.baseline = _baselines(runs)
        self.test_sizes = _known(runs, "target", "test_size")
        self.baseline_sizes = _known(runs, "target", "baseline_train_size")
        self.params = _known(runs, "backbone", "backbone_params")
        self._models = {run["backbone"]: run["config"].get("model", {}) for run in runs}
        groups = defaultdict(list)
        for run in runs:
            row = Row(run["source"], run["method"])
            groups[Place(run["backbone"], row, run["target"])].append(run)
        used_rows = {place.row for place in groups}
        rows = starmap(Row, product(_labels(grid, "source"), _labels(grid, "method")))
        self.rows = [row for row in rows if row in used_rows]
        self.rows.sort(key=lambda row: row != SCRATCH)
        self._stats = {place: seed_stats(group) for place, group in groups.items()}
        for backbone, target in product(self.backbones, self.targets):
            self._pool(backbone, target)
        counts = Counter(stats.n for stats in self._stats.values() if stats.n)
        self.usual_n = max(counts, key=lambda n: (n > 1, counts[n], n), default=0)
        self.cells = {place: self._cell(place) for place in self._stats}

    def _pool(self, backbone: str, target: str) -> None:
        """Give the cells of a column their common variance over seeds."""
        column = {}
        moved = []
        for place, stats in self._stats.items():
            if (place.backbone, place.target) == (backbone, target):
                column[place] = stats
                # a run that predicts one class does not depend on the seed, unlike the others
                if not self._no_better(stats, target):
                    moved.append(stats)
        self._stats |= pooled(column, moved or column.values())

    def _cell(self, place: Place) -> TableCell:
        stats = self._stats[place]
        gain = None if place.row == SCRATCH else self.lead(place, SCRATCH)
        no_better = self._no_better(stats, place.target)
        return TableCell(
            stats,
            gain=gain,
            unusual_n=stats.n not in (0, self.usual_n),
            no_better=no_better,
            below_baseline=(
                stats.mean is not None and stats.mean < self.baseline.get(place.target, -1)
            ),
            best_of_column=stats.n > 0 and not no_better and self._leads_all(place),
        )

    def _no_better(self, stats: SeedStats, target: str) -> bool:
        """Return whether a cell may be as accurate as always predicting the largest class."""
        if stats.mean is None or stats.images is None:
            return False
        return bool(stats.mean - stats.images.below <= self.largest.get(target, -1))

    def _leads_all(self, place: Place) -> bool:
        """Return whether the runs show that a place is better than each other one of its column."""
        leads = [self.lead(place, other) for other in self.rows if other != place.row]
        return {lead.direction for lead in leads if lead} == {"up"}

    def lead(self, place: Place, other: Row) -> Estimate | None:
        """Return the lead of a place over another row, or None if one has no value."""
        stats = self._stats.get(place)
        other_stats = self._stats.get(place._replace(row=other))
        return difference(stats, other_stats) if stats and other_stats else None

    def mean(self, backbone: str, row: Row, target: str) -> float | None:
        """Return a cell's mean, or None without a value."""
        stats = self._stats.get(Place(backbone, row, target))
        return stats.mean if stats else None

    def rows_of(self, backbone: str) -> list[Row]:
        """Return the rows of a backbone. Weights belong to one backbone only."""
        used_rows = {place.row for place in self._stats if place.backbone == backbone}
        return [row for row in self.rows if row in used_rows]

    def cells_of(self, backbone: str, row: Row) -> list[TableCell | None]:
        """Return a cell for each target, or None if the grid has none there."""
        return [self.cells.get(Place(backbone, row, target)) for target in self.targets]

    @property
    def runs(self) -> list[Run]:
        """All runs, those from scratch first, then in the user's order."""
        runs: list[Run] = []
        for row, backbone, target in product(self.rows, self.backbones, self.targets):
            stats = self._stats.get(Place(backbone, row, target))
            if stats:
                runs += stats.runs
        return runs

    def name_of(self, backbone: str) -> str:
        """Return the name of a backbone with its arguments and size, without markup."""
        model = self._models[backbone]
        kwargs = model.get("kwargs", {}) if model.get("name") == backbone else {}
        return with_facts(backbone, kwargs, self.params.get(backbone))

    @property
    def progress(self) -> str:
        """The counts of runs, without markup."""
        text = f"{self.protocol}: {self.counts['ok']} of {self.counts.total()} cells done"
        for status in ("failed", "missing"):
            if self.counts[status]:
                text += f", {self.counts[status]} {status}"
        return text

    def caption(self) -> str:
        """Return sentences on the numbers, without markup."""
        numbers = "one run each"
        if self.usual_n > 1:
            numbers = f"mean ± standard deviation over n = {self.usual_n} runs"
        if any(cell.unusual_n for cell in self.cells.values()):
            numbers += ", another n if noted"
        caption = f"Top-1 accuracy by {self.label}, in percent, {numbers}."
        if self.test_sizes:
            sizes = ", ".join(f"{target} {size:,}" for target, size in self.test_sizes.items())
            caption += f" Test images: {sizes}."
        return caption

    def legend(self) -> str:
        """Return the meaning of its marks, a sentence each."""
        meanings = []
        for mark in MARKS:
            if any(map(mark.applies, self.cells.values())):
                meanings.append(mark.meaning)
        return " ".join(meanings)

    def intervals(self) -> str:
        """Return sentences on the intervals, without markup."""
        causes = "test images"
        if any(cell.stats.variance is not None for cell in self.cells.values()):
            causes += " and seeds (with the spread of all cells of a column together)"
        return (
            f"Intervals are 95 % intervals over {causes}. "
            "A difference whose interval contains 0 may be chance."
        )


def with_facts(name: str, arguments: dict[str, Any], params: int | None = None) -> str:
    """Return a model's name with what it does not show: ``vit_tiny_patch16_224 (embed_dim 64)``."""
    texts = [f"{key} {value}" for key, value in arguments.items()]
    if params is not None:
        texts.append(f"{params / 1e6:.3g} M parameters")
    if texts:
        return f"{name} ({', '.join(texts)})"
    return name


def run_label(run: Run) -> str:
    """Return a run's name in messages."""
    seeds = dict.fromkeys([run["pretrain_seed"], run["seed"]])
    seeds.pop(None, None)
    start = Row(run["source"], run["method"]).label
    return (
        f"{start}: {run['backbone']} on {run['target']}, "
        f"seed {'/'.join(map(str, seeds))}, {run['protocol']}"
    )


def _labels(grid: Grid, name: str) -> list[str]:
    """Return the labels of the runs (``name``: e.g. "source"), first those of the user's order."""
    used = dict.fromkeys(run[name] for run in grid["cells"])
    ordered = dict.fromkeys([*grid[f"{name}s"], *used])
    return [label for label in ordered if label in used]


def _known(runs: list[Run], label: str, name: str) -> dict[str, Any]:
    """Return a value of the runs by their target or backbone, if a run has it."""
    return {run[label]: run[name] for run in runs if run.get(name)}


def _baselines(runs: list[Run]) -> dict[str, float]:
    """Return the mean accuracy of the baseline on each target, if a run has it."""
    baselines = defaultdict(list)
    for run in runs:
        if run.get("baseline_top1") is not None:
            baselines[run["target"]].append(run["baseline_top1"])
    return {target: statistics.fmean(values) for target, values in baselines.items()}
