"""``report.html`` and its figures, from what ``idmm report`` collected of finished runs."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from idmm.config.parsing import flatten
from idmm.confusion import confusion_figure
from idmm.errors import listed
from idmm.files import write_bytes
from idmm.pictures import curves_figure, probe_figure, save
from idmm.progress import duration
from idmm.report import run_pictures as draw
from idmm.report.page import Picture, Section, TableOf, html
from idmm.report.sheets import Tile, caption_sheet, in_rows
from idmm.report.stats import BINS, Calibration, t_half

CHANCE = 0.05  # p of McNemar's test from which on a difference may be chance
WORST = 10  # classes that are listed
NO_SETTINGS = ("out", "resume", "environment.started", "environment.finished", "environment.starts")
KINDS = {
    "pretrain": "Pretraining", "finetune": "Fine-tuning", "detect": "Detection", "segment": "Segmentation",
    "probe": "Probe",
}  # fmt: skip


class Features(NamedTuple):
    """Features of test images, laid out in a plane so that neighbours stay neighbours (t-SNE)."""

    labels: np.ndarray  # int64 [M]
    classes: list[str]  # by number
    places: dict[str, np.ndarray]  # title -> float [M, 2]
    # title -> percent of the images whose nearest other image, by cosine, has their class
    nearest: dict[str, float]


@dataclass
class RunFacts:
    """A finished run. ``missing`` has a sentence for each part of the page that cannot be shown."""

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
    # ---- of runs that are shown in detail
    crops: list[tuple[str, list[Tile]]] | None = None  # rows of a sheet
    shown: str = ""  # which bands pictures of its images show
    predicted: Any = None  # idmm.evaluate.Predictions of the test images
    paths: list[str] = field(default_factory=list)  # names of these images
    classes: list[str] = field(default_factory=list)  # names of the classes, by number
    mistakes: list[Tile] = field(default_factory=list)
    calibration: Calibration | None = None
    features: Features | None = None
    pictures: dict[str, Path] = field(default_factory=dict)  # title -> PNG file that the run or idmm explore wrote
    missing: list[str] = field(default_factory=list)

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
    sections = [Section("Results", [*_outcome(runs, pairs), *_results(out, runs, pairs)])]
    sections.append(Section("Curves", list(_curves(out, runs))))
    sections += [_details(out, run, number) for number, run in enumerate(runs, start=1) if run.detailed]
    sections.append(Section("Settings", list(_settings(runs))))
    about = [f"{run.label}: {_about(run)} ({run.path})" for run in runs]
    page = out / "report.html"
    text = html(_title(runs), [*notes, *about], [section for section in sections if section.parts])
    write_bytes(page, text.encode("utf-8", "replace"))
    return page


def _about(run: RunFacts) -> str:
    before = {"start": "of " if run.kind == "probe" else "from ", "data": "on "}
    return ", ".join(before.get(name, "") + value for name, value in run.about.items() if value)


def _picture(figure: Figure, path: Path, alt: str, caption: str = "") -> Picture:
    save(figure, path)
    return Picture(path, alt, caption)


# ---------------------------------------------------------------------- results
def _top1(runs: list[RunFacts]) -> dict[str, list[float]]:
    """The accuracies of classifiers (percent), a list over seeds for each group."""
    groups: dict[str, list[float]] = {}
    for run in runs:
        if run.classifies:
            groups.setdefault(run.group, []).append(run.result["top1"])
    return groups


def _title(runs: list[RunFacts]) -> str:
    did, data = (listed(dict.fromkeys(run.about[name] for run in runs)) for name in ("did", "data"))
    return f"{did} on {data}: {listed(dict.fromkeys(run.group for run in runs), most=4)}"


def _outcome(runs: list[RunFacts], pairs: list[tuple]) -> Iterator[str]:
    """What groups of classifiers of the same images reached, and how far the first is from each other one."""
    runs = [run for run in runs if run.classifies]
    groups = _top1(runs)
    if len(runs) < 2:
        return
    if len({(run.about["data"], run.result["test_size"]) for run in runs}) > 1:
        yield "These classifiers were tested on different images: do not compare their accuracies."
        return
    spread = {group: f" ± {statistics.stdev(top1):.1f}" for group, top1 in groups.items() if len(top1) > 1}
    means = [f"{group} {statistics.mean(top1):.1f}{spread.get(group, '')} %" for group, top1 in groups.items()]
    counts = sorted({len(top1) for top1 in groups.values()})
    over = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + f" seed{'' if counts == [1] else 's'}"
    first, *others = groups
    chance = {frozenset(pair[:2]): pair[2]["p"] for pair in pairs}  # of single runs
    gaps = []
    for other in others:
        p = chance.get(frozenset((first, other)), 0.0)
        doubt = f", which may be chance (p {p:.2g})" if p >= CHANCE else ""
        gaps.append(f"{_gap(groups[first], groups[other])} over {other}{doubt}")
    line = f"{listed(means)} of the test images right, over {over}{' each' if others else ''}"
    line += f": {first} has {listed(gaps)}." if gaps else "."
    yield line + (" ± is one standard deviation over seeds." if spread else "")
    if others and counts[0] == 1:
        yield "A run with a single seed does not show how far another seed would move its number."


def _gap(one: list[float], other: list[float]) -> str:
    """The difference of two means, with its 95 % t-interval over seeds if both have some."""
    points, fewest = statistics.mean(one) - statistics.mean(other), min(len(one), len(other))
    interval = ""
    if fewest > 1:
        half = t_half(sum(statistics.variance(values) / len(values) for values in (one, other)), fewest - 1)
        interval = f" (95 % interval over seeds {points - half:+.1f} to {points + half:+.1f})"
    return f"{points:+.1f} points{interval}".replace("-", "−")


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
    "mean per class": _number("mean_per_class"), "kNN of pixels": _number("pixel_knn"),
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


def _results(out: Path, runs: list[RunFacts], pairs: list[tuple]) -> Iterator[str | TableOf | Picture]:
    classifiers = [run for run in runs if run.classifies]
    if classifiers:
        alt = "; ".join(f"{run.label}: {run.result['top1']:.1f} %" for run in classifiers)
        yield _picture(draw.scores_figure(classifiers), out / "accuracy.png", f"Top-1 accuracies. {alt}")
    yield from _table("Top-1 accuracy on the test images (percent)", CLASSIFIERS, classifiers)
    for kind, (caption, columns) in OTHERS.items():
        some = [run for run in runs if run.kind == kind and (kind != "probe" or "readouts" in run.result)]
        yield from _table(caption, columns, some)
    rows = [
        [group, str(len(top1)), f"{statistics.mean(top1):.1f}", f"{statistics.stdev(top1):.1f}",
         ", ".join(f"{value:.1f}" for value in top1)]
        for group, top1 in _top1(runs).items() if len(top1) > 1
    ]  # fmt: skip
    if rows:
        heads = ["runs", "seeds", "mean top-1 (%)", "standard deviation", "each"]
        yield TableOf(heads, rows, "Runs that are the same except for the seed")
    if pairs:
        caption = "Classifiers on the same test images: points of the first above the second, and McNemar's p, the "
        caption += "chance of a difference as large if both were equally good"
        if len(pairs) > 1:
            caption += f"; of {len(pairs)} comparisons, one in 20 comes out below 0.05 by chance alone"
        yield TableOf(["first", "second", "points", "p", "verdict"], [_compared(*pair) for pair in pairs], caption)
    if any("test_groups" in run.result for run in classifiers):
        yield "Test images come in groups of similar images, so their intervals are too narrow."


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


# ---------------------------------------------------------------------- curves
def _curves(out: Path, runs: list[RunFacts]) -> Iterator[str | Picture]:
    for kind, title in KINDS.items():
        groups: dict[str, list[list[dict]]] = {}
        for run in runs:
            if run.kind == kind and any(run.records):
                groups.setdefault(run.group, []).extend(records for records in run.records if records)
        if not groups:
            continue
        figure = curves_figure(groups, title + (f": {next(iter(groups))}" if len(groups) == 1 else ""))
        yield _picture(figure, out / f"curves-{kind}.png", f"{title}: what {listed(groups)} logged, over epochs")
    for number, run in enumerate(runs, start=1):
        probes = [result.get("readouts", {}) for result in run.result.get("folds", [run.result])]
        if run.kind == "probe" and all("accuracies" in one.get("probe", {}) for one in probes):
            alt = "Accuracy on held-out images over the strength of the linear probe, and top-1 on the test images"
            yield _picture(probe_figure(probes, f"Probe: {run.label}"), out / f"probe-{number}.png", alt)
    if any(len(run.records) > 1 for run in runs):
        yield "Of k-fold runs a thin line is a fold, and the thick one their mean."


# ---------------------------------------------------------------------- one run
def _details(out: Path, run: RunFacts, number: int) -> Section:
    parts: list = []
    if run.group != run.label:
        parts.append(f"Shown for all of {run.group}, which are the same except for the seed.")
    if run.crops:
        path, title = out / f"crops-{number}.png", "Training images and their crops"
        caption_sheet(run.crops, path, title, run.shown)
        parts.append(Picture(path, title, "What the network saw, a column for each image."))
    if run.features:
        parts += _features(out / f"features-{number}.png", run.features)
    if run.predicted is not None:
        parts += _per_class(out / f"confusion-{number}.png", run)
    if run.calibration:
        parts.append(_calibration(out / f"calibration-{number}.png", run.calibration))
    if run.mistakes:
        path, title = out / f"mistakes-{number}.png", "Most confident mistakes"
        caption_sheet(in_rows(run.mistakes), path, title, run.shown)
        caption = "Test images that the classifier was surest of and wrong. Look at them: some labels may be wrong."
        parts.append(Picture(path, title, caption))
    parts += [Picture(path, title, title) for title, path in run.pictures.items()]
    return Section(run.label, [*parts, *run.missing])


def _features(path: Path, features: Features) -> Iterator[str | Picture]:
    shares = "; ".join(f"{title} {share:.1f} %" for title, share in features.nearest.items())
    if shares:
        yield f"Test images whose nearest other image, by cosine of features, has the same class: {shares}."
    caption = f"t-SNE of the features of {len(features.labels):,} test images, before and after the run. Groups that "
    caption += "lie apart are told apart; how far apart, and how large a group is, means nothing."
    figure = draw.features_figure(features.places, features.labels, features.classes)
    yield _picture(figure, path, f"Features of test images in a plane. {shares}", caption)


def _per_class(path: Path, run: RunFacts) -> Iterator[TableOf | Picture]:
    (images, hits), instead = run.predicted.per_class(), run.predicted.confusions()
    caption = "Confusion matrix: a row for each true class, a column for each predicted one."
    alt = f"Confusion matrix of {len(run.classes)} classes"
    yield _picture(confusion_figure(run.predicted, run.classes), path, alt, caption)
    order = sorted((c for c in range(len(images)) if images[c]), key=lambda c: (hits[c] / images[c], -images[c]))
    rows = []
    for c in order[:WORST]:
        most, often = instead.get(c, (None, 0))
        taken = f"{run.classes[most]} ({often})" if often else ""
        rows.append([run.classes[c], str(images[c]), str(hits[c]), f"{100 * hits[c] / images[c]:.1f}", taken])
    heads = ["class", "test images", "right", "accuracy (%)", "most often taken for"]
    yield TableOf(heads, rows, "The worst classes" if len(order) > WORST else "All classes, the worst first")


def _calibration(path: Path, measured: Calibration) -> Picture:
    points = 100 * (measured.confidence - measured.accuracy)
    caption = f"Calibration: mean confidence {100 * measured.confidence:.1f} %, accuracy {100 * measured.accuracy:.1f} "
    caption += f"%: {abs(points):.1f} points {'too sure' if points > 0 else 'not sure enough'}. Expected calibration "
    caption += f"error {100 * measured.error:.1f} points: the mean distance from the dotted line over {BINS} bins, "
    caption += "weighted by images. With few images it is above zero by chance, too. Bars are 95 % intervals."
    return _picture(draw.calibration_figure(measured), path, "Accuracy over confidence", caption)


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
