"""``report.html`` and its figures, from the facts that ``idmm report`` reads of finished runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from idmm.files import REWRITE, reading, write_bytes
from idmm.progress import duration
from idmm.report.page import Picture, Section, TableOf, html
from idmm.text import listed

NO_SETTINGS = ("out", "resume")
KINDS = {
    "pretrain": "Pretraining",
    "finetune": "Fine-tuning",
    "detect": "Detection",
    "segment": "Segmentation",
    "probe": "Probe",
}


@dataclass
class RunFacts:
    """A finished run."""

    path: Path
    kind: str  # key of KINDS
    task: str  # e.g. "fine-tuning"
    start: str  # its weights: a run, a file, "scratch", or empty
    data: str
    model: str = ""
    config: dict = field(default_factory=dict)  # dotted keys
    result: dict = field(default_factory=dict)
    label: str = ""  # short and unique
    method: str = ""  # of pretraining, or what else it started from
    # epoch, top-1 (percent) and 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    per_class: list[dict[str, str]] = field(default_factory=list)  # rows of the table
    # title -> PNG of the run or of idmm explore
    pictures: dict[str, Path] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Task, start, model and data in words."""
        if self.start:
            start = f"{'of' if self.kind == 'probe' else 'from'} {self.start}"
        else:
            start = ""
        return ", ".join(filter(None, [self.task, start, self.model, f"on {self.data}"]))


def write(
    out: Path,
    runs: list[RunFacts],
    comparisons: list[list[str]],
    notes: list[str],
    pictures: list[Picture],
) -> Path:
    """Write the page atomically and return its path.

    Args:
        out: The folder.
        runs: In the page's order.
        comparisons: Rows of the table of :data:`COMPARISON`.
        notes: On skipped runs. They are at the top of the page.
        pictures: Of all runs.

    Raises:
        RunError: A file cannot be written.
    """
    sections = [Section("Results", [*_results(runs, comparisons), *pictures])]
    for run in runs:
        own_pictures = [Picture(path, title) for title, path in run.pictures.items()]
        sections.append(Section(run.label, [*_per_class(run), *own_pictures]))
    sections.append(Section("Settings", list(_settings(runs))))
    lines = [*notes, *(f"{run.label}: {run.summary} ({run.path})" for run in runs)]
    tasks = listed(dict.fromkeys(run.task for run in runs))
    data = listed(dict.fromkeys(run.data for run in runs))
    text = html(f"{tasks} on {data}", lines, [section for section in sections if section.parts])
    page = out / "report.html"
    write_bytes(page, text.encode("utf-8", "replace"))
    return page


def _number(name: str, form: str = ".1f") -> Callable[[RunFacts], str]:
    """Return a column with a value of the results."""
    return lambda run: "" if run.result.get(name) is None else format(run.result[name], form)


def _readout(name: str) -> Callable[[RunFacts], str]:
    def column(run: RunFacts) -> str:
        if "readouts" in run.result:
            readout = run.result["readouts"][name]
            return "{:.1f} ({:.1f} to {:.1f})".format(readout["top1"], *readout["top1_interval"])
        return f"{run.result['knn' if name == 'knn' else 'top1']:.1f}"  # pooled over folds

    return column


Columns = dict[str, Callable[[RunFacts], str]]
SIZES: Columns = {
    "training images": _number("train_size", ","),
    "test images": _number("test_size", ","),
}
CLASSIFIERS: Columns = {
    "top-1": _number("top1"),
    "95 % interval": lambda run: "{:.1f} to {:.1f}".format(*run.result["top1_interval"]),
    "mean per class": _number("mean_per_class"),
    "parameters": _number("params", ","),
    "baseline": _number("baseline_top1"),
    "baseline fitted to": _number("baseline_train_size", ","),
    "largest class": _number("largest_class"),
    "before the first step": _number("start_top1"),
    **SIZES,
}
OTHERS: dict[str, tuple[str, Columns]] = {  # by kind: caption and columns
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
COMPARISON = (
    "Classifiers on the test images that both have, with the same label in both: points of the first above the second, "
    "and p, the probability of such a difference if both were equally good (McNemar's test, with groups of images a "
    "sign-flip test of the groups). With several comparisons p is adjusted by Holm's method, so a false 'is better' on "
    "the page has a risk of 5 %"
)


def _results(runs: list[RunFacts], comparisons: list[list[str]]) -> Iterator[str | TableOf]:
    classifiers = [run for run in runs if run.kind != "probe" and "top1_interval" in run.result]
    yield from _table("Top-1 accuracy on the test images (percent)", CLASSIFIERS, classifiers)
    for kind, (caption, columns) in OTHERS.items():
        yield from _table(caption, columns, [run for run in runs if run.kind == kind])
    if len({(run.data, run.result.get("test_size")) for run in classifiers}) > 1:
        yield "These classifiers were tested on different images: do not compare their accuracies."
    if comparisons:
        yield TableOf(
            ["first", "second", "images", "points", "p", "verdict"], comparisons, COMPARISON
        )
    if any("test_groups" in run.result for run in classifiers):
        yield "Intervals of test images in groups are over the groups, as images of one group are alike."


def _table(caption: str, columns: Columns, runs: list[RunFacts]) -> Iterator[TableOf]:
    """Yield a table with a row for each run, without empty columns, if there are runs."""
    if not runs:
        return
    columns = {
        "run": lambda run: run.label,
        **columns,
        "start": lambda run: run.start,
        "time": lambda run: duration(run.result["seconds"]) if "seconds" in run.result else "",
    }
    cells = {name: [] for name in columns}
    for run in runs:
        with reading(run.path / "result.json", REWRITE):
            for name, column in columns.items():
                cells[name].append(column(run))
    cells = {name: column for name, column in cells.items() if any(column)}
    yield TableOf(list(cells), [list(row) for row in zip(*cells.values(), strict=True)], caption)


def _per_class(run: RunFacts) -> Iterator[TableOf]:
    if run.per_class:
        heads = [name.replace("_", " ") for name in run.per_class[0]]
        rows = [list(row.values()) for row in run.per_class]
        yield TableOf(heads, rows, "Results per class")


def _settings(runs: list[RunFacts]) -> Iterator[TableOf]:
    """Yield, for each kind, the settings in which its runs differ, or all settings of a single
    run."""
    for kind, title in KINDS.items():
        of_kind = [run for run in runs if run.kind == kind]
        settings = [run.config for run in of_kind]
        rows = []
        for key in dict.fromkeys(
            key for values in settings for key in values if key not in NO_SETTINGS
        ):
            values = ["" if run.get(key) is None else str(run[key]) for run in settings]
            if len(set(values)) > 1 if len(of_kind) > 1 else values[0]:
                rows.append([key, *values])
        if rows:
            if len(of_kind) > 1:
                caption = f"{title}: settings that differ"
            else:
                caption = f"{title}: all settings"
            yield TableOf(["key", *(run.label for run in of_kind)], rows, caption)
