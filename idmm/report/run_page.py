"""``report.html`` and its pictures, from what ``idmm report`` collected of finished runs."""

import statistics
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from idmm.errors import listed
from idmm.files import write_bytes
from idmm.pictures import curves_figure, measured_once, probe_figure
from idmm.progress import brief, duration, log
from idmm.report import run_pictures as draw
from idmm.report.facts import RunFacts
from idmm.report.parts import Picture, Section, TableOf, Tabs, Text
from idmm.report.render import ENVIRONMENTS, source
from idmm.report.run_details import details
from idmm.report.run_settings import KINDS, environments, settings
from idmm.report.stats import t_half

CHANCE = 0.05  # p of McNemar's test from which on a difference may be chance
SIZES = 1.2  # largest backbone over smallest from which accuracy is drawn over size
Columns = dict[str, Callable[[RunFacts], str]]
ABOUT: Columns = {name: lambda run, name=name: run.about.get(name, "") for name in ("did", "start", "model", "data")}


def write(out: Path, runs: list[RunFacts], pairs: list[tuple], notes: list[str]) -> Path:
    """Writes the page and its PNGs, each whole or not at all (RunError), the page last; returns its path.

    Args:
        out: The folder.
        runs: In the page's order.
        pairs: Two classifiers on the same test images, by their labels, with ``points`` of the first above the
            second and McNemar's ``p``.
        notes: On what was asked for and is not shown; at the top of the page.
    """
    sections = [_summary(runs, pairs), *_curves(runs), *_sizes(runs)]
    for run in runs:
        sections += details(run, alone=len(runs) == 1) if run.detailed else []
    sections += [settings(runs), environments(runs)]
    log.info("drawing the pictures")
    for part in (part for section in sections for part in section.parts):
        part.save(out)
    page, style = out / "report.html", source("base.css", "report.css")
    given = {"title": _title(runs), "runs": runs, "notes": notes, "sections": sections, "style": style}
    text = ENVIRONMENTS["html"].get_template("report.html.j2").render(given, version=version("idmm"))
    write_bytes(page, text.encode("utf-8", "replace"))
    return page


# ---------------------------------------------------------------------- what came of it
def _top1(runs: list[RunFacts]) -> dict[str, list[float]]:
    """The accuracies of classifiers (percent), a list over seeds for each group."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.classifies:
            found.setdefault(run.group, []).append(run.result["top1"])
    return found


def _title(runs: list[RunFacts]) -> str:
    """What was run on what, and what came of it where a line has room for that."""
    told = {name: listed(dict.fromkeys(run.about[name] for run in runs)) for name in ("did", "data")}
    groups = _top1(runs)
    if 0 < len(groups) <= 3:
        scores = " and ".join(f"{group} {statistics.mean(top1):.1f} %" for group, top1 in groups.items())
        return f"{told['data']}: {scores} of test images right"
    return f"{told['did']} on {told['data']}: {listed(dict.fromkeys(run.group for run in runs), most=4)}"


def _outcome(runs: list[RunFacts], pairs: list[tuple]) -> Iterator[Text]:
    """What groups of classifiers of the same images reached, and how far the first is from each other one."""
    groups = _top1(runs)
    if len(runs) < 2:
        return
    if len({(run.about["data"], run.result["test_size"]) for run in runs}) > 1:
        yield Text("These classifiers were tested on different images: do not compare their accuracies.", "loud")
        return
    spread = {group: f" ± {statistics.stdev(top1):.1f}" for group, top1 in groups.items() if len(top1) > 1}
    said = [f"{group} {statistics.mean(top1):.1f}{spread.get(group, '')} %" for group, top1 in groups.items()]
    counts = sorted({len(top1) for top1 in groups.values()})
    over = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) + f" seed{'' if counts == [1] else 's'}"
    first, *others = groups
    chance = {frozenset(pair[:2]): pair[2]["p"] for pair in pairs}  # of single runs
    gaps = []
    for other in others:
        p = chance.get(frozenset((first, other)), 0.0)
        doubt = f", which may be chance (p {p:.2g})" if p >= CHANCE else ""
        gaps.append(f"{_signed(*_gap(groups[first], groups[other]))} over {other}{doubt}")
    line = f"{listed(said)} of the test images right, over {over}{' each' if others else ''}"
    line += f": {first} has {listed(gaps)}." if gaps else "."
    yield Text(line + (" ± is one standard deviation over seeds." if counts[-1] > 1 else ""), "loud")
    if others and counts[0] == 1:
        yield Text("How far another seed would move what has a single one, these runs cannot say.", "quiet")


def _gap(one: list[float], other: list[float]) -> tuple[float, float | None]:
    """The difference of two means, and half of its 95 % t-interval over seeds, if there are some."""
    value, fewest = statistics.mean(one) - statistics.mean(other), min(len(one), len(other))
    if fewest < 2:
        return value, None
    return value, t_half(sum(statistics.variance(values) / len(values) for values in (one, other)), fewest - 1)


def _signed(points: float, half: float | None = None) -> str:
    reach = "" if half is None else f" (95 % interval over seeds {points - half:+.1f} to {points + half:+.1f})"
    return f"{points:+.1f} points{reach}".replace("-", "−")


def _summary(runs: list[RunFacts], pairs: list[tuple]) -> Section:
    section = Section("summary", "What came of it")
    classifiers = [run for run in runs if run.classifies]
    section.parts += _outcome(classifiers, pairs)
    section.parts += [Text(line, "loud") for run in runs[:3] if (line := headline(run))] if len(runs) <= 3 else []
    if classifiers:
        alt = "; ".join(f"{run.label}: {run.result['top1']:.1f} %" for run in classifiers)
        made = {"figure": draw.scores_figure(classifiers), "narrow": draw.scores_figure(classifiers, width=4.2)}
        section.parts.append(Picture("accuracy.png", alt=f"Top-1 accuracies. {alt}", **made))
    caption = "Top-1 accuracy on the test images (percent), beside what it must not be read without"
    section.parts += _table(caption, CLASSIFIERS, classifiers)
    section.parts += _table("What pretraining came to", PRETRAININGS, [run for run in runs if run.kind == "pretrain"])
    for kind, columns in DENSE.items():
        caption = f"{KINDS[kind]}: scores on the test images (percent)"
        section.parts += _table(caption, columns, [run for run in runs if run.kind == kind])
    probes = [run for run in runs if run.kind == "probe" and "readouts" in run.result]
    section.parts += _table("What frozen features are worth", PROBES, probes)
    section.parts += _over_seeds(classifiers)
    if pairs:
        rows = [_compared(*pair) for pair in pairs]
        caption = "Classifiers on the same test images: points of the first above the second, and McNemar's p, the "
        caption += "chance of a difference as large were both as good"
        if len(rows) > 1:
            caption += f"; of {len(rows)} comparisons, one in 20 comes out below 0.05 by chance alone"
        section.parts.append(TableOf(["first", "second", "points", "p", ""], rows, caption))
    if any("test_groups" in run.result for run in classifiers):
        line = "Test images come in groups of alike images, so their intervals are too narrow."
        section.parts.append(Text(line, "quiet"))
    return section


def _compared(first: str, second: str, found: dict[str, float]) -> list[str]:
    points, p = found["points"], found["p"]
    better = f"{first if points > 0 else second} is better"
    verdict = better if p < CHANCE else "too small a difference to tell from chance"
    return [first, second, f"{points:+.1f}".replace("-", "−"), f"{p:.2g}", verdict]


def headline(run: RunFacts) -> str:
    """Returns what came of a run, in a sentence beside what it has to be read with."""
    result, seconds = run.result, duration(run.result.get("seconds", 0.0))
    if run.classifies:
        low, high = result["top1_interval"]
        said = f"{result['top1']:.1f} % of {result['test_size']:,} test images right"
        floors = {"pixel_knn": "comparing raw pixels reaches", "largest_class": "naming the largest class every time"}
        beside = [f"{label} {result[name]:.1f} %" for name, label in floors.items() if result.get(name) is not None]
        parts = [f"{said} (95 % interval {low:.1f} to {high:.1f})", *beside, seconds]
        return f"{run.label}: {'; '.join(parts)}."
    if run.kind == "pretrain":
        knn = f", kNN accuracy {result['knn']:.1f} %" if "knn" in result else ""
        count = f"{result['train_size']:,} images, {result.get('epochs', '?')} epochs"
        return f"{run.label}: pretrained on {count}: loss {result['loss']:.3f}{knn}; {seconds}."
    if run.kind in DENSE:
        first, value = next((name, column(run)) for name, column in DENSE[run.kind].items())
        return f"{run.label}: {first} {value} % on {result['test_size']:,} test images; {seconds}."
    return ""


def _number(*names: str, form: str = ".1f") -> Callable[[RunFacts], str]:
    """Returns a column of a value of the results: the first of these that there is."""

    def column(run: RunFacts) -> str:
        return next((format(run.result[name], form) for name in names if run.result.get(name) is not None), "")

    return column


def _interval(found: dict) -> str:
    return "{:.1f} to {:.1f}".format(*found["top1_interval"])


def _parameters(run: RunFacts) -> str:
    return "" if run.parameters is None else f"{run.parameters / 1e6:.3g} M"


CLASSIFIERS: Columns = {
    "accuracy": _number("top1"),
    "95 % interval": lambda run: _interval(run.result),
    "training images": _number("labelled_size", "train_size", form=","),
    "test images": _number("test_size", form=","),
    "mean per class": _number("mean_per_class"),
    "kNN of pixels": _number("pixel_knn"),
    "largest class": _number("largest_class"),
    "before the first step": _number("start_top1"),
    "parameters": _parameters,
}
PRETRAININGS: Columns = {
    "loss": _number("loss", form=".4g"),
    "kNN (%)": _number("knn"),
    "kNN before the first step": _number("start_knn"),
    "images": _number("train_size", form=","),
    "epochs": _number("epochs", form=","),
    "parameters": _parameters,
}
SIZE: Columns = {
    "training images": _number("train_size", form=","),
    "test images": _number("test_size", form=","),
    "parameters": _parameters,
}
DENSE: dict[str, Columns] = {
    "detect": {
        "AP": _number("ap"),
        "AP50": _number("ap50"),
        "AP75": _number("ap75"),
        "mask AP": _number("mask_ap"),
        **SIZE,
    },
    "segment": {
        "mIoU": _number("miou"),
        "accuracy of classes": _number("macc"),
        "accuracy of pixels": _number("pixel_accuracy"),
        **SIZE,
    },
}
PROBES: Columns = {
    "kNN (%)": lambda run: f"{run.result['readouts']['knn']['top1']:.1f}",
    "kNN: 95 % interval": lambda run: _interval(run.result["readouts"]["knn"]),
    "linear probe (%)": lambda run: f"{run.result['readouts']['probe']['top1']:.1f}",
    "linear probe: 95 % interval": lambda run: _interval(run.result["readouts"]["probe"]),
    "largest class": _number("largest_class"),
}


def _table(caption: str, columns: Columns, runs: list[RunFacts]) -> Iterator[TableOf]:
    """A row for each run; columns that no run has anything for are left out, what is the same for all is said above."""
    if not runs:
        return
    first = dict(list(columns.items())[:2])  # what came of it, so that narrow windows show it
    columns = {"run": lambda run: run.label, **first, **ABOUT, **columns}
    columns["time"] = lambda run: duration(run.result["seconds"]) if "seconds" in run.result else ""
    rows = [[column(run) for column in columns.values()] for run in runs]
    same = [name for n, name in enumerate(columns) if name in ABOUT and len({row[n] for row in rows}) == 1]
    kept = [n for n, name in enumerate(columns) if any(row[n] for row in rows) and name not in same]
    if shared := runs[0].told(*same):
        caption += f"; {'all ' if len(runs) > 1 else ''}{shared}"
    heads = list(columns)
    yield TableOf([heads[n] for n in kept], [[row[n] for n in kept] for row in rows], caption)


def _over_seeds(runs: list[RunFacts]) -> Iterator[TableOf]:
    """The means of classifiers that are the same but for the seed."""
    rows = []
    for group, top1 in _top1(runs).items():
        if len(top1) > 1:
            each = ", ".join(f"{value:.1f}" for value in top1)
            rows.append([group, str(len(top1)), f"{statistics.mean(top1):.1f}", f"{statistics.stdev(top1):.1f}", each])
    if rows:
        heads = ["runs", "seeds", "mean top-1 (%)", "standard deviation", "each"]
        yield TableOf(heads, rows, "Runs that are the same but for the seed")


# ---------------------------------------------------------------------- curves, size
def _curves(runs: list[RunFacts]) -> Iterator[Section]:
    section = Section("curves", "Curves")
    for kind in KINDS:
        groups: dict[str, list[list[dict]]] = {}
        for run in runs:
            if run.kind == kind and any(run.records):
                groups.setdefault(run.group, []).extend(records for records in run.records if records)
        if not groups:
            continue
        pictures = []
        for over, label in (("epoch", "over epochs"), ("seconds", "over seconds")):
            title = KINDS[kind] + (f": {next(iter(groups))}" if len(groups) == 1 else "")
            figure = curves_figure(groups, title, over, columns=(3,))
            narrow = curves_figure(groups, title, over, columns=(1,))
            alt = f"{KINDS[kind]}, {label}: loss, learning rate and what else was logged, of {listed(groups)}"
            pictures.append((label, Picture(f"curves-{kind}-{label.split()[-1]}.png", figure, alt, narrow=narrow)))
        section.parts.append(Tabs(f"curves-{kind}", pictures))
        once = [f"{name} ({_once(groups, key)})" for name, key in measured_once(groups).items()]
        if once:
            section.parts.append(Text(f"Measured once, so no curve: {listed(once)}.", "quiet"))
    section.parts += [picture for run in runs if (picture := _probed(run))]
    if any(len(run.records) > 1 for run in runs):
        section.parts.append(Text("Of k-fold runs a thin line is a fold, and the thick one their mean.", "quiet"))
    if section.parts:  # not where no run has metrics.jsonl
        yield section


def _once(groups: dict[str, list[list[dict]]], key: str) -> str:
    """A value that each run logged once at most, as a mean over the runs of each group."""
    found = {
        name: [record[key] for records in seeds for record in records if key in record]
        for name, seeds in groups.items()
    }  # fmt: skip
    return ", ".join(f"{name} {statistics.mean(values):.4g}" for name, values in found.items() if values)


def _probed(run: RunFacts) -> Picture | None:
    """How a probe chose its strength, and what came of it."""
    several = [result.get("readouts", {}) for result in run.result.get("folds", [run.result])]
    if run.kind != "probe" or not all("accuracies" in found.get("probe", {}) for found in several):
        return None
    alt = "Accuracy on held-out images over the strength of the linear probe; top-1 of kNN and probe on the test images"
    return Picture(f"probe-{run.number}.png", probe_figure(several, f"Probe: {run.label}"), alt)


def _sizes(runs: list[RunFacts]) -> Iterator[Section]:
    some = [run for run in runs if run.parameters and run.classifies]
    sizes = [run.parameters for run in some]
    if sizes and max(sizes) >= SIZES * min(sizes):
        alt = "; ".join(f"{run.label}: {brief(run.parameters / 1e6)} M, {run.result['top1']:.1f} %" for run in some)
        caption = "Top-1 with its 95 % interval over the parameters of the backbone."
        picture = Picture("size.png", draw.sizes_figure(some), alt, caption, draw.sizes_figure(some, width=4.2))
        yield Section("size", "Accuracy over size", parts=[picture])
