"""``report.html`` from the facts that ``idmm report`` reads of finished runs."""

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from idmm.files import REWRITE, Json, reading, write_bytes
from idmm.progress import duration
from idmm.report.charts import Network, Point, accuracy_curves, over_parameters
from idmm.report.page import Picture, Section, TableOf, html
from idmm.report.stats import format_number
from idmm.text import listed

CHANCE = 0.05  # a difference with this p or more may be chance
NO_SETTINGS = ("out", "resume")
KINDS = {
    "pretrain": "Pretraining",
    "finetune": "Fine-tuning",
    "detect": "Detection",
    "segment": "Segmentation",
    "probe": "Probe",
}


@dataclass(frozen=True)
class RunFacts:
    """A finished run."""

    path: Path
    label: str  # short and unique
    kind: str  # key of KINDS
    task: str  # e.g. "fine-tuning"
    start: str  # its weights: a run, a file, "scratch", or empty
    data: str
    model: str
    method: str  # of pretraining, or what else it started from
    config: Json  # dotted keys
    result: Json
    curve: list[Point]  # top-1 over epochs
    per_class: list[dict[str, str]]  # rows of the table
    pictures: list[Picture]  # of the run and of idmm explore

    @property
    def summary(self) -> str:
        """Task, start, model and data in words."""
        start = ""
        if self.start and self.kind == "probe":
            start = f"of {self.start}"
        elif self.start:
            start = f"from {self.start}"
        return ", ".join(filter(None, [self.task, start, self.model, f"on {self.data}"]))


@dataclass(frozen=True)
class RunComparison:
    """Two classifiers on the test images that both have."""

    first: str  # label of a run
    second: str
    images: int
    points: float  # by which the first accuracy is above the second
    p: float  # adjusted for the number of comparisons

    @property
    def cells(self) -> list[str]:
        """The row of the page's table."""
        verdict = "the difference may be chance"
        if self.p < CHANCE and self.points > 0:
            verdict = f"{self.first} is better"
        elif self.p < CHANCE:
            verdict = f"{self.second} is better"
        points = format_number(self.points, sign=True)
        return [self.first, self.second, f"{self.images:,}", points, f"{self.p:.2g}", verdict]


def write(
    out: Path,
    runs: list[RunFacts],
    comparisons: list[RunComparison],
    notes: list[str],
    pictures: list[Picture],
) -> Path:
    """Write the page atomically and return its path.

    Args:
        out: The folder.
        runs: In the page's order.
        comparisons: Of classifiers.
        notes: On skipped runs. They are at the top of the page.
        pictures: Of all runs.

    Raises:
        RunError: A file cannot be written.
    """
    intro = [*notes]
    sections = [Section("Results", [*_results(runs, comparisons), *pictures])]
    for run in runs:
        intro.append(f"{run.label}: {run.summary} ({run.path})")
        sections.append(Section(run.label, [*_per_class(run), *run.pictures]))
    sections.append(Section("Settings", _settings(runs)))
    tasks = listed(dict.fromkeys(run.task for run in runs))
    data = listed(dict.fromkeys(run.data for run in runs))
    text = html(f"{tasks} on {data}", intro, [section for section in sections if section.parts])
    page = out / "report.html"
    write_bytes(page, text.encode("utf-8", "replace"))
    return page


# head -> format of the values in result.json. A column is empty without its first value
Columns = dict[str, str]
SIZES = {"training images": "{train_size:,}", "test images": "{test_size:,}"}
CLASSIFIERS = {
    "top-1": "{top1:.1f}",
    "95 % interval": "{top1_interval[0]:.1f} to {top1_interval[1]:.1f}",
    "mean per class": "{mean_per_class:.1f}",
    "parameters": "{params:,}",
    "baseline": "{baseline_top1:.1f}",
    "baseline fitted to": "{baseline_train_size:,}",
    "largest class": "{largest_class:.1f}",
    "before the first step": "{start_top1:.1f}",
    **SIZES,
}
READOUT = (
    "{readouts[NAME][top1]:.1f} "
    "({readouts[NAME][top1_interval][0]:.1f} to {readouts[NAME][top1_interval][1]:.1f})"
)
POOLED = {"kNN": "{knn:.1f}", "linear probe": "{top1:.1f}"}  # of probes over folds
OTHERS: dict[str, tuple[str, Columns]] = {  # by kind: caption and columns
    "pretrain": (
        "Pretraining",
        {
            "loss": "{loss:.4g}",
            "kNN (%)": "{knn:.1f}",
            "kNN before the first step": "{start_knn:.1f}",
            "images": "{train_size:,}",
            "epochs": "{epochs:,}",
        },
    ),
    "detect": (
        "Detection: scores on the test images (percent)",
        {
            "AP": "{ap:.1f}",
            "AP50": "{ap50:.1f}",
            "AP75": "{ap75:.1f}",
            "mask AP": "{mask_ap:.1f}",
            **SIZES,
        },
    ),
    "segment": (
        "Segmentation: scores on the test images (percent)",
        {
            "mIoU": "{miou:.1f}",
            "accuracy of classes": "{macc:.1f}",
            "accuracy of pixels": "{pixel_accuracy:.1f}",
            **SIZES,
        },
    ),
    "probe": (
        "Probes of frozen features: top-1 on the test images (percent) with its 95 % interval",
        {
            "kNN": READOUT.replace("NAME", "knn"),
            "linear probe": READOUT.replace("NAME", "probe"),
            "largest class": "{largest_class:.1f}",
        },
    ),
}
COMPARISON = (
    "Classifiers on the test images that both have, with the same label in both: points of the "
    "first above the second, and p, the probability of such a difference if both were equally good "
    "(McNemar's test, with groups of images a sign-flip test of the groups). With several "
    "comparisons p is adjusted by Holm's method, so a false 'is better' on the page has a risk of "
    "5 %"
)


def _results(runs: list[RunFacts], comparisons: list[RunComparison]) -> list[str | TableOf]:
    parts: list[str | TableOf] = []
    classifiers = [run for run in runs if run.kind != "probe" and "top1_interval" in run.result]
    if classifiers:
        caption = "Top-1 accuracy on the test images (percent)"
        parts.append(_table(caption, CLASSIFIERS, classifiers))
    for kind, (caption, columns) in OTHERS.items():
        of_kind = [run for run in runs if run.kind == kind]
        if of_kind:
            parts.append(_table(caption, columns, of_kind))
    if len({(run.data, run.result.get("test_size")) for run in classifiers}) > 1:
        parts.append(
            "These classifiers were tested on different images: do not compare their accuracies."
        )
    if comparisons:
        heads = ["first", "second", "images", "points", "p", "verdict"]
        parts.append(TableOf(heads, [one.cells for one in comparisons], COMPARISON))
    if any("test_groups" in run.result for run in classifiers):
        parts.append(
            "Intervals of test images in groups are over the groups, "
            "as images of one group are alike."
        )
    return parts


def _table(caption: str, columns: Columns, runs: list[RunFacts]) -> TableOf:
    """Return a table with a row for each run, without empty columns."""
    rows = [["run", *columns, "start", "time"]]
    for run in runs:
        with reading(run.path / "result.json", REWRITE):
            cells = [_cell(run.result, head, form) for head, form in columns.items()]
            time = duration(run.result["seconds"]) if "seconds" in run.result else ""
            rows.append([run.label, *cells, run.start, time])
    filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
    heads, *filled_rows = zip(*filled, strict=True)
    return TableOf(heads, filled_rows, caption)


def _cell(result: Json, head: str, form: str) -> str:
    """Return the text of a column."""
    if head in POOLED and "readouts" not in result:
        form = POOLED[head]
    key = re.findall(r"\w+", form)[0]
    if result.get(key) is None:
        return ""
    return form.format_map(result)


def _per_class(run: RunFacts) -> list[TableOf]:
    if not run.per_class:
        return []
    heads = [name.replace("_", " ") for name in run.per_class[0]]
    rows = [list(row.values()) for row in run.per_class]
    return [TableOf(heads, rows, "Results per class")]


def _settings(runs: list[RunFacts]) -> list[TableOf]:
    """Return, for each kind, the settings in which its runs differ, or all of a single run."""
    tables = []
    for kind, title in KINDS.items():
        of_kind = [run for run in runs if run.kind == kind]
        caption = f"{title}: all settings"
        if len(of_kind) > 1:
            caption = f"{title}: settings that differ"
        rows = []
        for key in dict.fromkeys(chain(*(run.config for run in of_kind))):
            settings = [run.config.get(key) for run in of_kind]
            values = ["" if setting is None else str(setting) for setting in settings]
            is_shown = len(set(values)) > 1 or (len(of_kind) == 1 and values != [""])
            if is_shown and key not in NO_SETTINGS:
                rows.append([key, *values])
        if rows:
            tables.append(TableOf(["key", *(run.label for run in of_kind)], rows, caption))
    return tables


# ---------------------------------------------------------------------- pictures of several runs
def compare(runs: list[RunFacts], out: Path) -> list[Picture]:
    """Draw the pictures for which enough runs have the same data into ``out``, and return them."""
    networks = []
    pictures = []
    curves: defaultdict[str, dict[str, list[Point]]] = defaultdict(dict)
    for run in runs:
        if run.curve:
            curves[run.data][run.label] = run.curve
        size = run.result.get("backbone_params")
        top1 = run.result.get("top1")
        if size is not None and top1 is not None:
            networks.append(Network(run.data, run.method, run.model, size, top1))
    panels = {data: of_data for data, of_data in curves.items() if len(of_data) > 1}
    if panels:
        pictures.append(Picture(out / "curves.png", "Accuracy over epochs"))
        accuracy_curves(panels, out / "curves.png", ("epoch", "top-1 accuracy (%)"))
    if over_parameters(networks, out / "params.png"):
        pictures.append(Picture(out / "params.png", "Accuracy over parameters"))
    return pictures
