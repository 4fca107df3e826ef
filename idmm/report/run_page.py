"""``report.html`` and its figures, from what ``idmm report`` collected of finished runs."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from idmm.config.parsing import flatten
from idmm.errors import listed
from idmm.figures.style import curves_figure, save
from idmm.files import write_bytes
from idmm.progress import duration
from idmm.report.page import Picture, Section, TableOf, html
from idmm.report.stats import Estimate, t_half

CHANCE = 0.05  # p of McNemar's test from which on a difference may be chance
NO_SETTINGS = ("out", "resume", "environment.started", "environment.finished", "environment.starts")
KINDS = {
    "pretrain": "Pretraining", "finetune": "Fine-tuning", "detect": "Detection", "segment": "Segmentation",
    "probe": "Probe",
}  # fmt: skip


@dataclass
class RunFacts:
    """A finished run."""

    path: Path
    kind: str  # of KINDS
    about: dict[str, str]  # what it "did", its "start", "model" and "data"
    config: dict[str, Any]  # dotted keys
    result: dict[str, Any]
    records: list[list[dict]]  # of metrics.jsonl, of each fold
    environment: dict[str, Any] = field(default_factory=dict)
    group: str = ""  # label of the runs that are the same except for the seed
    label: str = ""  # short, no two alike
    detailed: bool = True  # whether the page has a section on it
    pictures: dict[str, Path] = field(default_factory=dict)  # title -> PNG file that the run or idmm explore wrote

    @property
    def classifies(self) -> bool:
        """Whether it made a classifier, which was tested."""
        return self.kind != "probe" and "top1_interval" in self.result


def write(out: Path, runs: list[RunFacts], pairs: list[tuple], notes: list[str]) -> Path:
    """Writes the figures and then the page, each whole or not at all (RunError); returns its path.

    Args:
        out: The folder.
        runs: In the page's order.
        pairs: Two classifiers on the same test images, by their labels, with ``points`` of the first above the
            second and McNemar's ``p``.
        notes: On runs that are left out; at the top of the page.
    """
    sections = [Section("Results", list(_results(runs, pairs))), Section("Curves", list(_curves(out, runs)))]
    sections += [_details(out, run, number) for number, run in enumerate(runs, start=1) if run.detailed]
    sections.append(Section("Settings", list(_settings(runs))))
    about = [f"{run.label}: {_about(run)} ({run.path})" for run in runs]
    page = out / "report.html"
    did, data = (listed(dict.fromkeys(run.about[name] for run in runs)) for name in ("did", "data"))
    text = html(f"{did} on {data}", [*notes, *about], [section for section in sections if section.parts])
    write_bytes(page, text.encode("utf-8", "replace"))
    return page


def _about(run: RunFacts) -> str:
    before = {"start": "of " if run.kind == "probe" else "from ", "data": "on "}
    return ", ".join(before.get(name, "") + value for name, value in run.about.items() if value)


def _picture(figure: Figure, path: Path, alt: str, caption: str = "") -> Picture:
    save(figure, path)
    return Picture(path, alt, caption)


# ---------------------------------------------------------------------- results
def _number(name: str, form: str = ".1f") -> Callable[[RunFacts], str]:
    """Returns a column of a value of the results."""
    return lambda run: "" if run.result.get(name) is None else format(run.result[name], form)


def _readout(name: str) -> Callable[[RunFacts], str]:
    def column(run: RunFacts) -> str:
        measured = run.result["readouts"][name]
        return "{:.1f} ({:.1f} to {:.1f})".format(measured["top1"], *measured["top1_interval"])

    return column


Columns = dict[str, Callable[[RunFacts], str]]
SIZES: Columns = {"training images": _number("train_size", ","), "test images": _number("test_size", ",")}
CLASSIFIERS: Columns = {
    "top-1": _number("top1"),
    "95 % interval": lambda run: "{:.1f} to {:.1f}".format(*run.result["top1_interval"]),
    "mean per class": _number("mean_per_class"), "baseline": _number("baseline_top1"),
    "largest class": _number("largest_class"), "before the first step": _number("start_top1"), **SIZES,
}  # fmt: skip
OTHERS: dict[str, tuple[str, Columns]] = {  # by kind
    "pretrain": ("Pretraining", {
        "loss": _number("loss", ".4g"), "kNN (%)": _number("knn"), "kNN before the first step": _number("start_knn"),
        "images": _number("train_size", ","), "epochs": _number("epochs", ","),
    }),
    "detect": ("Detection: scores on the test images (percent)", {
        "AP": _number("ap"), "AP50": _number("ap50"), "AP75": _number("ap75"), "mask AP": _number("mask_ap"), **SIZES,
    }),
    "segment": ("Segmentation: scores on the test images (percent)", {
        "mIoU": _number("miou"), "accuracy of classes": _number("macc"),
        "accuracy of pixels": _number("pixel_accuracy"), **SIZES,
    }),
    "probe": ("Probes of frozen features: top-1 on the test images (percent) with its 95 % interval", {
        "kNN": _readout("knn"), "linear probe": _readout("probe"), "largest class": _number("largest_class"),
    }),
}  # fmt: skip


def _results(runs: list[RunFacts], pairs: list[tuple]) -> Iterator[str | TableOf]:
    classifiers = [run for run in runs if run.classifies]
    yield from _table("Top-1 accuracy on the test images (percent)", CLASSIFIERS, classifiers)
    for kind, (caption, columns) in OTHERS.items():
        some = [run for run in runs if run.kind == kind and (kind != "probe" or "readouts" in run.result)]
        yield from _table(caption, columns, some)
    yield from _over_seeds(classifiers)
    if pairs:
        caption = "Classifiers on the same test images: points of the first above the second, and p, the chance of a "
        caption += (
            "difference as large if both were equally good (McNemar's test; with groups a sign-flip test of these)"
        )
        yield TableOf(["first", "second", "points", "p", "verdict"], [_compared(*pair) for pair in pairs], caption)
    if any("test_groups" in run.result for run in classifiers):
        yield "Test images come in groups of similar images, so their intervals are too narrow."


def _over_seeds(runs: list[RunFacts]) -> Iterator[str | TableOf]:
    """A row for each group of classifiers, and how far it is above the first one, where both have some seeds."""
    groups: dict[str, list[float]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run.result["top1"])
    same = len({(run.about["data"], run.result["test_size"]) for run in runs}) < 2
    if not same:
        yield "These classifiers were tested on different images: do not compare their accuracies."
    if len(groups) < len(runs):
        first, rows = next(iter(groups.values())), []
        for group, top1 in groups.items():
            std = f"{statistics.stdev(top1):.1f}" if len(top1) > 1 else ""
            above = "" if top1 is first or not same else str(_above(top1, first))
            each = ", ".join(f"{value:.1f}" for value in top1)
            rows.append([group, str(len(top1)), f"{statistics.mean(top1):.1f}", std, each, above])
        heads = ["runs", "seeds", "mean top-1 (%)", "standard deviation", "each", "above the first (95 % t-interval)"]
        yield TableOf(heads, rows, "Runs that are the same except for the seed")


def _above(one: list[float], other: list[float]) -> Estimate:
    """The difference of two means, with its 95 % t-interval over seeds if both have some."""
    points, fewest = statistics.mean(one) - statistics.mean(other), min(len(one), len(other))
    if fewest < 2:
        return Estimate(points)
    half = t_half(sum(statistics.variance(values) / len(values) for values in (one, other)), fewest - 1)
    return Estimate(points, (points - half, points + half))


def _compared(first: str, second: str, test: dict[str, float]) -> list[str]:
    better = f"{first if test['points'] > 0 else second} is better"
    verdict = better if test["p"] < CHANCE else "the difference may be chance"
    return [first, second, f"{test['points']:+.1f}".replace("-", "−"), f"{test['p']:.2g}", verdict]


def _table(caption: str, columns: Columns, runs: list[RunFacts]) -> Iterator[TableOf]:
    """A row for each run; columns that no run has anything for are left out."""
    if not runs:
        return
    columns = {"run": lambda run: run.label, **columns, "start": lambda run: run.about["start"],
               "time": lambda run: duration(run.result["seconds"]) if "seconds" in run.result else ""}  # fmt: skip
    rows = [[column(run) for column in columns.values()] for run in runs]
    used = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    heads = list(columns)
    yield TableOf([heads[n] for n in used], [[row[n] for n in used] for row in rows], caption)


# ---------------------------------------------------------------------- curves, one run
def _curves(out: Path, runs: list[RunFacts]) -> Iterator[str | Picture]:
    for kind, title in KINDS.items():
        groups: dict[str, list[list[dict]]] = {}
        for run in runs:
            if run.kind == kind and any(run.records):
                groups.setdefault(run.group, []).extend(records for records in run.records if records)
        if groups:
            figure = curves_figure(groups, title + (f": {next(iter(groups))}" if len(groups) == 1 else ""))
            yield _picture(figure, out / f"curves-{kind}.png", f"{title}: what {listed(groups)} logged, over epochs")
    if any(len(run.records) > 1 for run in runs):
        yield "Of k-fold runs a thin line is a fold, and the thick one their mean."


def _details(out: Path, run: RunFacts, number: int) -> Section:
    parts: list = []
    if run.group != run.label:
        parts.append(f"Shown for all of {run.group}, which are the same except for the seed.")
    return Section(run.label, [*parts, *(Picture(path, title, title) for title, path in run.pictures.items())])


# ---------------------------------------------------------------------- settings
def _settings(runs: list[RunFacts]) -> Iterator[str | TableOf]:
    """Where the configs and environments of the runs of a kind differ; of one run all of them."""
    for kind, title in KINDS.items():
        some = [run for run in runs if run.kind == kind and (run.config or run.environment)]
        values = [{**run.config, **flatten(run.environment, "environment.")} for run in some]
        keys = dict.fromkeys(key for one in values for key in one if key not in NO_SETTINGS)
        rows = [[key, *("" if one.get(key) is None else str(one[key]) for one in values)] for key in keys]
        rows = [row for row in rows if (len(set(row[1:])) > 1 if len(some) > 1 else row[1])]
        if rows:
            caption = f"{title}: settings that differ" if len(some) > 1 else f"{title}: all settings"
            yield TableOf(["key", *(run.label for run in some)], rows, caption)
