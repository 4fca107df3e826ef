"""What the cells of a grid say together: mean and spread over seeds, gain over scratch, the best of each column."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from scipy.special import stdtrit

DIGITS = 1  # after the point, as the paper prints; numbers that print alike are equally good
READOUTS = {("finetune", "top1"): "fine-tuned", ("probe", "top1"): "linear probe", ("probe", "knn"): "kNN"}
MISSING, FAILED, SOME_FAILED = "—", "failed", "†"
NOTHING, RANDOM = "N/A", "random init."  # how the paper's Table 5 calls the row from scratch


class Row(NamedTuple):
    """Where backbones start from."""

    source: str
    method: str


SCRATCH = Row("scratch", "none")


@dataclass(frozen=True)
class Entry:
    """What is known of one place of a table: the runs of all its seeds.

    Attributes:
        cells: All of its cells.
        values: Of those that are done.
        mean: None where none is done.
        std: Sample standard deviation over runs; None for less than two.
        half: Half the 95 % t-interval of the mean. Runs that share a pretraining are no independent draws: where there
            are several pretrainings, it is their means that count.
        units: How many draws that interval rests on.
        variance: Of the mean; None where ``half`` is.
    """

    cells: tuple[dict, ...]
    values: tuple[float, ...]
    mean: float | None
    std: float | None
    half: float | None
    units: int
    variance: float | None

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def failed(self) -> int:
        return sum(cell["status"] == "failed" for cell in self.cells)

    @property
    def status(self) -> str:
        return "ok" if self.values else "failed" if self.failed else "missing"


def entry(cells: Iterable[dict], metric: str) -> Entry:
    """Puts the cells of one place together."""
    cells = tuple(cells)
    done = [(cell, value) for cell in cells if (value := number(cell, metric)) is not None]
    values = tuple(value for _, value in done)
    if not values:
        return Entry(cells, (), None, None, None, 0, None)
    groups: dict[tuple, list[float]] = {}
    for cell, value in done:
        groups.setdefault((cell["source"], cell["pretrain_seed"]), []).append(value)
    units = [statistics.fmean(group) for group in groups.values()] if len(groups) > 1 else values
    variance = statistics.variance(units) / len(units) if len(units) > 1 else None
    return Entry(
        cells,
        values,
        statistics.fmean(values),
        statistics.stdev(values) if len(values) > 1 else None,
        None if variance is None else t_half(variance, len(units) - 1),
        len(units),
        variance,
    )


def number(cell: dict, metric: str) -> float | None:
    """A cell's accuracy in percent, None where there is none."""
    value = cell.get(metric) if cell["status"] == "ok" else None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def t_half(variance: float, freedom: float) -> float:
    """Half of a 95 % t-interval."""
    return float(stdtrit(freedom, 0.975)) * math.sqrt(variance)


class Gain(NamedTuple):
    """Difference of two means in points, with half its 95 % interval (Welch's) where both have several draws."""

    mean: float
    half: float | None


def difference(one: Entry, other: Entry) -> Gain | None:
    """``one`` less ``other``, None where one of them has no value."""
    if one.mean is None or other.mean is None:
        return None
    mean = one.mean - other.mean
    if one.variance is None or other.variance is None:
        return Gain(mean, None)
    total = one.variance + other.variance
    if total == 0:
        return Gain(mean, 0.0)
    freedom = total**2 / (one.variance**2 / (one.units - 1) + other.variance**2 / (other.units - 1))
    return Gain(mean, t_half(total, freedom))


class Shown(NamedTuple):
    """How an entry is printed: texts without any markup, and which marks it bears."""

    mean: str
    std: str
    n: str
    best_of_column: bool
    best_of_cell: bool
    some_failed: bool


class Table:
    """The entries of one readout of a grid, in the user's order, scratch first.

    Args:
        grid: What grid.json holds.
        protocol: ``finetune`` or ``probe``.
        metric: ``top1``, or ``knn`` for the protocol probe.
    """

    def __init__(self, grid: dict, protocol: str, metric: str = "top1"):
        self.protocol, self.metric, self.label = protocol, metric, READOUTS[protocol, metric]
        cells = [cell for cell in grid["cells"] if cell["protocol"] == protocol]
        self.backbones = _ordered(grid["backbones"], (cell["backbone"] for cell in cells))
        self.targets = _ordered(grid["targets"], (cell["target"] for cell in cells))
        found = {Row(cell["source"], cell["method"]) for cell in cells}
        sources = _ordered(grid["sources"], (cell["source"] for cell in cells))
        methods = _ordered(grid["methods"], (cell["method"] for cell in cells))
        rows = [Row(source, method) for source in sources for method in methods]
        self.rows = sorted((row for row in rows if row in found), key=lambda row: row != SCRATCH)
        groups: dict[tuple, list[dict]] = {}
        for cell in cells:
            place = cell["backbone"], Row(cell["source"], cell["method"]), cell["target"]
            groups.setdefault(place, []).append(cell)
        self.entries = {place: entry(group, metric) for place, group in groups.items()}

    def __bool__(self) -> bool:
        return bool(self.entries)

    def rows_of(self, backbone: str) -> list[Row]:
        """Rows that the backbone has; a file of weights is of one backbone only."""
        return [row for row in self.rows if any((backbone, row, target) in self.entries for target in self.targets)]

    def mean(self, backbone: str, row: Row, target: str) -> float | None:
        """None where there is no value."""
        found = self.entries.get((backbone, row, target))
        return found.mean if found else None

    def gain(self, backbone: str, row: Row, target: str) -> Gain | None:
        """Over the same backbone from scratch on the same target; None where either is missing, and for scratch."""
        one, other = (self.entries.get((backbone, place, target)) for place in (row, SCRATCH))
        return difference(one, other) if one and other and row != SCRATCH else None

    def best_of_column(self, backbone: str, target: str) -> list[Row]:
        """The best rows of a column, several where they print alike; none where nothing competes."""
        return self._best(backbone, self.rows, target)

    def best_of_cell(self, backbone: str, source: str, target: str) -> list[Row]:
        """Likewise of a source's methods."""
        return self._best(backbone, [row for row in self.rows if row.source == source], target)

    def _best(self, backbone: str, rows: list[Row], target: str) -> list[Row]:
        means = {row: self.mean(backbone, row, target) for row in rows}
        known = {row: float(fixed(mean)) for row, mean in means.items() if mean is not None}
        return [row for row, mean in known.items() if mean == max(known.values())] if len(known) > 1 else []

    @cached_property
    def usual_n(self) -> int:
        """Runs of most entries that have a value; of equals the larger number, 0 where there is no value."""
        counts = Counter(found.n for found in self.entries.values() if found.n)
        return max(counts, key=lambda n: (counts[n], n), default=0)

    def shown(self, backbone: str, row: Row, target: str) -> Shown | None:
        """How an entry is printed, None where the grid has no such place."""
        found = self.entries.get((backbone, row, target))
        if found is None:
            return None
        if found.mean is None:
            return Shown(FAILED if found.status == "failed" else MISSING, "", "", False, False, False)
        return Shown(
            fixed(found.mean),
            "" if found.std is None else fixed(found.std),
            f"n = {found.n}" if found.n != self.usual_n else "",
            row in self.best_of_column(backbone, target),
            row in self.best_of_cell(backbone, row.source, target),
            found.failed > 0,
        )

    def caption(self, spread: str = "standard deviation") -> str:
        """What the numbers are, as a sentence without markup."""
        several = f", mean ± {spread} over n = {self.usual_n} runs" if self.usual_n > 1 else ", one run each"
        differs = any(found.n not in (0, self.usual_n) for found in self.entries.values())
        how = {"fine-tuned": "after fine-tuning", "kNN": "of kNN"}.get(self.label, f"of a {self.label}")
        return f"Top-1 accuracy {how}, in percent{several}{', another n where noted' if differs else ''}."

    def legend(self) -> str:
        """What the marks mean, those that occur."""
        shown = [self.shown(*place) for place in self.entries]
        marks = (
            ("bold: the best of a column", any(cell.best_of_column for cell in shown)),
            ("underlined: the best of a source's methods", any(cell.best_of_cell for cell in shown)),
            (f"{MISSING}: not run yet", any(cell.mean == MISSING for cell in shown)),
            (f"{SOME_FAILED}: some runs failed and are left out", any(cell.some_failed for cell in shown)),
        )
        said = "; ".join(text for text, occurs in marks if occurs)
        return said and f"{said[0].upper()}{said[1:]}."


def tables(grid: dict) -> list[Table]:
    """A table for each readout that the grid has cells of, those of its own protocol first."""
    order = sorted(READOUTS, key=lambda readout: readout[0] != grid["protocol"])
    found = [Table(grid, *readout) for readout in order]
    return [t for t in found if t and (t.metric == "top1" or any(e.n for e in t.entries.values()))]


def own_cells(grid: dict) -> list[dict]:
    """Cells of the grid's own protocol in the order of its tables: scratch first, then as the user named them."""
    table = Table(grid, grid["protocol"])
    places = [(row, b, target) for row in table.rows for b in table.backbones for target in table.targets]
    found = [table.entries[b, row, target].cells for row, b, target in places if (b, row, target) in table.entries]
    return [cell for cells in found for cell in cells]


def several(cells: list[dict], status: str) -> list[dict]:
    """The cells of a status."""
    return [cell for cell in cells if cell["status"] == status]


def place(cell: dict) -> str:
    """Names a cell for people."""
    start = "from scratch" if is_scratch(cell) else f"{cell['source']}, {cell['method']}"
    seeds = dict.fromkeys(str(cell[name]) for name in ("pretrain_seed", "seed") if cell[name] is not None)
    return f"{start}: {cell['backbone']} on {cell['target']}, seed {'/'.join(seeds)}, {cell['protocol']}"


def names(row: Row) -> Row:
    """What stands in the first two columns of a table."""
    return Row(NOTHING, RANDOM) if row == SCRATCH else row


def called(source: str) -> str:
    """A source where it stands alone."""
    return RANDOM if source == SCRATCH.source else source


def is_scratch(cell: dict) -> bool:
    """Whether nothing was pretrained."""
    return (cell["source"], cell["method"]) == SCRATCH


def fixed(value: float, sign: bool = False) -> str:
    """Prints a number as all tables do; zero has no sign."""
    text = f"{value:{'+' if sign else ''}.{DIGITS}f}"
    return f"{0:.{DIGITS}f}" if float(text) == 0 else text.replace("-", "−") if sign else text


def over_scratch(gain: "Gain | None") -> str:
    """A gain in words where it is none; nothing where it is not known."""
    if gain is None:
        return ""
    return fixed(gain.mean, sign=True) + (" (scratch is better)" if round(gain.mean, DIGITS) < 0 else "")


def _ordered(named: Iterable[str], seen: Iterable[str]) -> list[str]:
    """The labels that occur, first those that are named, in that order."""
    seen = dict.fromkeys(seen)
    return [label for label in dict.fromkeys([*named, *seen]) if label in seen]
