"""A grid's cells as tables, with the texts and marks that every format prints."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

from idmm.config import METHODS
from idmm.report.stats import Estimate, SeedStats, difference, format_number, pooled, seed_stats

MISSING = "—"
FAILED = "failed"
SOME_FAILED = "†"
NO_BETTER = "‡"
BELOW_BASELINE = "§"


LABELS = {"finetune": "fine-tuning", "probe": "linear probe"}  # by protocol


class Row(NamedTuple):
    """The start of backbones."""

    source: str
    method: str

    @property
    def is_scratch(self) -> bool:
        return self == SCRATCH

    @property
    def label(self) -> str:
        if self.is_scratch:
            return "from scratch"
        return f"{self.source}, {self.method}"

    @property
    def heads(self) -> tuple[str, str]:
        """The texts in the first two columns of a table."""
        if self.is_scratch:
            return (self.label, "no pretraining")
        return (self.source, self.method)

    @property
    def printed_method(self) -> str:
        """The method as papers write it."""
        if self.method in METHODS:
            return METHODS[self.method].__name__
        return self.heads[1]


SCRATCH = Row("scratch", "none")


@dataclass(frozen=True)
class TableCell:
    """A place of a table. Its texts have no markup."""

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
        if self.stats.mean is None:
            if self.stats.failed:
                return FAILED
            return MISSING
        return format_number(self.stats.mean)

    @property
    def std(self) -> str:
        if self.stats.std is None:
            return ""
        return format_number(self.stats.std)

    @property
    def some_failed(self) -> bool:
        return self.stats.n > 0 and self.stats.failed > 0

    @property
    def spread(self) -> list[str]:
        """The standard deviation, and the number of runs if it is not the usual one."""
        texts = [f"± {self.std}"] if self.std else []
        if self.unusual_n:
            return [*texts, f"(n = {self.stats.n})"]
        return texts

    @property
    def notes(self) -> list[str]:
        """The texts after the mean."""
        if self.signs:
            return [*self.spread, self.signs]
        return self.spread

    @property
    def signs(self) -> str:
        """The signs that the legend explains."""
        signs = {
            SOME_FAILED: self.some_failed,
            NO_BETTER: self.no_better,
            BELOW_BASELINE: self.below_baseline,
        }
        return "".join(sign for sign, applies in signs.items() if applies)


class Table:
    """The top-1 accuracies of a grid (grid.json), in the user's order, scratch first.

    Attributes:
        counts: Runs by their status.
        cells: ``(backbone, row, target)`` -> TableCell.
        largest: Share of a target's largest class among its test images (percent), if a run has it.
        baseline: Accuracy of the baseline on a target (percent), if a run has it.
        params: Parameters of a backbone without its classifier, if a run has it.
        usual_n: The most frequent number of several runs per cell, the larger of equals. 1: no cell
            has several.
        baseline_sizes: Number of images that a target's baseline was fitted to, if a run has it.
        test_sizes: Number of a target's test images, if a run has it.
    """

    def __init__(self, grid: dict):
        self.protocol = grid["protocol"]
        self.label = LABELS[grid["protocol"]]
        runs = grid["cells"]
        self.backbones, self.targets, sources, methods = (
            _ordered(grid[f"{name}s"], (run[name] for run in runs))
            for name in ("backbone", "target", "source", "method")
        )
        groups = defaultdict(list)
        for run in runs:
            groups[run["backbone"], Row(run["source"], run["method"]), run["target"]].append(run)
        present = {row for _, row, _ in groups}
        rows = [row for row in starmap(Row, product(sources, methods)) if row in present]
        self.rows = sorted(rows, key=lambda row: not row.is_scratch)
        self.counts = Counter(run["status"] for run in runs)
        self.largest = _known(runs, "target", "largest_class")
        baselines = defaultdict(list)
        for run in runs:
            if run.get("baseline_top1") is not None:
                baselines[run["target"]].append(run["baseline_top1"])
        self.baseline = {target: statistics.fmean(values) for target, values in baselines.items()}
        self.test_sizes = _known(runs, "target", "test_size")
        self.baseline_sizes = _known(runs, "target", "baseline_train_size")
        self._models = {run["backbone"]: run["config"].get("model", {}) for run in runs}
        self.params = _known(runs, "backbone", "backbone_params")
        self._stats = {place: seed_stats(group) for place, group in groups.items()}
        for column in product(self.backbones, self.targets):
            cells = {
                place: stats
                for place, stats in self._stats.items()
                if (place[0], place[2]) == column
            }
            # a run that predicts one class does not depend on the seed, unlike the others
            moved = [stats for stats in cells.values() if not self._no_better(stats, column[1])]
            self._stats |= pooled(cells, moved or cells.values())
        counts = Counter(stats.n for stats in self._stats.values() if stats.n)
        self.usual_n = max(counts, key=lambda n: (n > 1, counts[n], n), default=0)
        self.cells = {place: self._cell(*place) for place in self._stats}

    def name_of(self, backbone: str) -> str:
        """Return the name of a backbone with its arguments and number of parameters, without
        markup."""
        model = self._models[backbone]
        if model.get("name") == backbone:
            kwargs = model.get("kwargs", {})
        else:
            kwargs = {}
        if backbone in self.params:
            size = [f"{self.params[backbone] / 1e6:.3g} M parameters"]
        else:
            size = []
        return with_facts(backbone, kwargs, *size)

    @property
    def progress(self) -> str:
        """The counts of runs, without markup."""
        rest = "".join(
            f", {self.counts[status]} {status}"
            for status in ("failed", "missing")
            if self.counts[status]
        )
        return f"{self.protocol}: {self.counts['ok']} of {self.counts.total()} cells done{rest}"

    def _cell(self, backbone: str, row: Row, target: str) -> TableCell:
        stats = self._stats[backbone, row, target]
        if row.is_scratch:
            gain = None
        else:
            gain = self.lead(backbone, target, row, SCRATCH)
        no_better = self._no_better(stats, target)
        others = [
            other
            for other in self.rows
            if other != row and self.mean(backbone, other, target) is not None
        ]
        ahead = [self.ahead(backbone, target, row, other) for other in others]
        best_of_column = stats.n > 0 and not no_better and bool(others) and all(ahead)
        below_baseline = stats.mean is not None and stats.mean < self.baseline.get(target, -1)
        unusual_n = stats.n not in (0, self.usual_n)
        return TableCell(stats, gain, unusual_n, no_better, below_baseline, best_of_column)

    def _no_better(self, stats: SeedStats, target: str) -> bool:
        return stats.images is not None and stats.mean - stats.images[0] <= self.largest.get(
            target, -1
        )

    def lead(self, backbone: str, target: str, row: Row, other: Row) -> Estimate | None:
        """Return the lead of a row over another, or None if one has no value."""
        stats, others = (self._stats.get((backbone, each, target)) for each in (row, other))
        if stats and others:
            return difference(stats, others)
        return None

    def ahead(self, backbone: str, target: str, row: Row, other: Row) -> bool:
        """Return whether the runs show that a row is better than another."""
        lead = self.lead(backbone, target, row, other)
        return lead is not None and lead.excludes_zero and lead.value > 0

    def rows_of(self, backbone: str) -> list[Row]:
        """Return the rows of a backbone. Weights belong to one backbone only."""
        return [
            row
            for row in self.rows
            if any((backbone, row, target) in self._stats for target in self.targets)
        ]

    def cells_of(self, backbone: str, row: Row) -> list[TableCell | None]:
        """Return a cell for each target, or None if the grid has none there."""
        return [self.cells.get((backbone, row, target)) for target in self.targets]

    def mean(self, backbone: str, row: Row, target: str) -> float | None:
        """Return a cell's mean, or None without a value."""
        stats = self._stats.get((backbone, row, target))
        if stats:
            return stats.mean
        return None

    @property
    def runs(self) -> list[dict]:
        """All runs, those from scratch first, then in the user's order."""
        places = [
            (backbone, row, target)
            for row, backbone, target in product(self.rows, self.backbones, self.targets)
        ]
        return [run for place in places if place in self._stats for run in self._stats[place].runs]

    def caption(self) -> str:
        """Return sentences on the numbers, without markup."""
        over = "one run each"
        if self.usual_n > 1:
            over = f"mean ± standard deviation over n = {self.usual_n} runs"
        if any(cell.unusual_n for cell in self.cells.values()):
            exceptions = ", another n if noted"
        else:
            exceptions = ""
        text = f"Top-1 accuracy by {self.label}, in percent, {over}{exceptions}."
        if self.test_sizes:
            sizes = ", ".join(f"{target} {size:,}" for target, size in self.test_sizes.items())
            text += f" Test images: {sizes}."
        return text

    def legend(self) -> str:
        """Return the meaning of its marks, a sentence each."""
        cells = self.cells.values()
        baseline = "logistic regression on hand-made features"
        marks = {
            "Bold: better than each other row of its column.": [
                cell.best_of_column for cell in cells
            ],
            f"{MISSING}: not run yet.": [cell.mean == MISSING for cell in cells],
            f"{SOME_FAILED}: some runs failed and do not count.": [
                cell.some_failed for cell in cells
            ],
            f"{NO_BETTER}: no better than always predicting the largest class.": [
                cell.no_better for cell in cells
            ],
            f"{BELOW_BASELINE}: below the baseline, {baseline}.": [
                cell.below_baseline for cell in cells
            ],
        }
        return " ".join(text for text, applies in marks.items() if any(applies))

    def intervals(self) -> str:
        """Return sentences on the intervals, without markup."""
        over = "test images"
        if any(cell.stats.variance is not None for cell in self.cells.values()):
            over += " and seeds (with the spread of all cells of a column together)"
        return f"Intervals are 95 % intervals over {over}. A difference whose interval contains 0 may be chance."


def with_facts(name: str, arguments: dict, *facts: str) -> str:
    """Return the name of a model with what it does not show, e.g. ``vit_tiny_patch16_224 (embed_dim
    64)``."""
    texts = [*(f"{key} {value}" for key, value in arguments.items()), *facts]
    if texts:
        return f"{name} ({', '.join(texts)})"
    return name


def run_label(run: dict) -> str:
    """Return a run's name in messages."""
    seeds = dict.fromkeys(
        str(run[name]) for name in ("pretrain_seed", "seed") if run[name] is not None
    )
    start = Row(run["source"], run["method"]).label
    return (
        f"{start}: {run['backbone']} on {run['target']}, seed {'/'.join(seeds)}, {run['protocol']}"
    )


def _known(runs: list[dict], label: str, name: str) -> dict[str, float]:
    """Return a value of the runs by their target or backbone, if a run has it."""
    return {run[label]: run[name] for run in runs if run.get(name)}


def _ordered(labels: Iterable[str], used: Iterable[str]) -> list[str]:
    """Return the used labels, first those in ``labels``, in their order."""
    used = dict.fromkeys(used)
    return [label for label in dict.fromkeys([*labels, *used]) if label in used]
