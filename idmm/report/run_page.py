"""``report.html`` and its pictures, from what ``idmm report`` collected of finished runs."""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from idmm.confusion import confusion_figure
from idmm.errors import listed
from idmm.files import write_bytes
from idmm.pictures import curves_figure, save
from idmm.progress import duration
from idmm.report import run_pictures as draw
from idmm.report.calibration import BINS, calibration
from idmm.report.facts import Facts, RunFacts
from idmm.report.parts import Folded, Picture, Raster, Section, Sheets, TableOf, Tabs, Text, Thumbs
from idmm.report.pictures import image_sheet
from idmm.report.render import ENVIRONMENTS, source
from idmm.report.svg import data_uri, sheet, thumbnail, webp

WORST = 10  # classes that are listed
NAMES = {"pretrain": "Pretraining", "finetune": "Fine-tuning", "probe": "Probe"}
ENVIRONMENT = ("started", "finished", "command", "python", "platform", "cpu", "cores", "memory", "gpus", "processes")


def write(out: Path, facts: Facts) -> Path:
    """Writes the page and its PNGs, each whole or not at all, the page last.

    Args:
        out: The folder.
        facts: Of the runs.

    Returns:
        The page.

    Raises:
        RunError: The folder cannot be written to.
    """
    found = sections(facts)
    for part in (part for section in found for part in section.parts):
        for picture in [part] if isinstance(part, Picture) else [p for _, p in getattr(part, "pictures", ())]:
            save(picture.figure, out / picture.name)
        if isinstance(part, Sheets):
            image_sheet(part.blocks, out / part.name)
    page = out / "report.html"
    write_bytes(page, html(facts, found).encode("utf-8", "replace"))
    return page


def html(facts: Facts, found: list[Section]) -> str:
    """Returns the page; it asks for nothing beside it."""
    environment = ENVIRONMENTS["html"]
    runs = facts.runs
    title = runs[0].label if len(runs) == 1 else f"{runs[0].label} and {len(runs) - 1} more"
    given = {
        "title": title,
        "runs": runs,
        "sections": found,
        "style": source("base.css", "report.css"),
        "version": facts.version,
    }
    text = environment.get_template("report.html.j2").render(given)
    # names of files may hold bytes that are no UTF-8
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def sections(facts: Facts) -> list[Section]:
    """Returns the page's sections in their order."""
    runs = facts.runs
    found = [_summary(facts), _curves(runs), *_sizes(runs)]
    for number, run in enumerate([run for run in runs if run.detailed], start=1):
        found += _details(run, number, alone=len(runs) == 1)
    return [*found, _settings(runs), _environments(runs)]


# ---------------------------------------------------------------------- what came of it
def _summary(facts: Facts) -> Section:
    runs, section = facts.runs, Section("summary", "What came of it")
    classifiers = [run for run in runs if "top1_interval" in run.result]
    section.parts += [Text(line, "loud") for run in runs[:3] if (line := headline(run))] if len(runs) <= 3 else []
    if classifiers:
        alt = "; ".join(f"{run.label}: {run.result['top1']:.1f} %" for run in classifiers)
        section.parts.append(Picture("accuracy.png", draw.scores_figure(classifiers), f"Top-1 accuracies. {alt}"))
        section.parts.append(_accuracies(classifiers))
    section.parts += [table for kind in ("pretrain", "probe") if (table := _others(runs, kind))]
    section.parts += _over_seeds(classifiers)
    if facts.pairs:
        rows = [[p.first, p.second, f"{p.points:+.1f}", f"{p.p:.2g}", _verdict(p)] for p in facts.pairs]
        caption = "Classifiers on the same test images: points of the first above the second, and McNemar's p, the "
        caption += "chance of a difference as large were both as good"
        if len(rows) > 1:
            caption += f"; of {len(rows)} comparisons, one in 20 comes out below 0.05 by chance alone"
        section.parts.append(TableOf(["first", "second", "points", "p", ""], rows, caption))
    if any("test_groups" in run.result for run in classifiers):
        section.parts.append(
            Text("Test images come in groups of alike images, so their intervals are too narrow.", "quiet")
        )
    section.parts += [Text(note, "quiet") for note in facts.notes]
    return section


def _verdict(pair) -> str:
    if pair.p >= 0.05:
        return "no difference that could not be chance"
    return f"{pair.first if pair.points > 0 else pair.second} is better"


def headline(run: RunFacts) -> str:
    """Returns what came of a run, in a sentence beside what it has to be read with."""
    result, seconds = run.result, duration(run.result.get("seconds", 0.0))
    if "top1_interval" in result:
        low, high = result["top1_interval"]
        floors = [
            f"{label} {result[name]:.1f} %"
            for name, label in (("pixel_knn", "comparing raw pixels reaches"), ("largest_class", "naming the largest class"))
            if result.get(name) is not None
        ]  # fmt: skip
        beside = f"; {', '.join(floors)}" if floors else ""
        images = f"{result['test_size']:,} test images"
        return f"{run.label}: {result['top1']:.1f} % of {images} right (95 % interval {low:.1f} to {high:.1f}){beside}; {seconds}."
    if run.kind == "pretrain":
        knn = f", kNN accuracy {result['knn']:.1f} %" if "knn" in result else ""
        count = f"{result['train_size']:,} images, {result.get('epochs', '?')} epochs"
        return f"{run.label}: pretrained on {count}: loss {result['loss']:.3f}{knn}; {seconds}."
    return ""


def _number(value, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def _count(value) -> str:
    return "" if value is None else f"{value:,}"


def _parameters(run: RunFacts) -> str:
    return "" if run.parameters is None else f"{run.parameters / 1e6:.3g} M"


def _accuracies(runs: list[RunFacts]) -> TableOf:
    columns: dict[str, Callable[[RunFacts], str]] = {
        "run": lambda run: run.label,
        "what": lambda run: run.what,
        "training images": lambda run: _count(run.result.get("labelled_size", run.result.get("train_size"))),
        "test images": lambda run: _count(run.result.get("test_size")),
        "top-1 (%)": lambda run: _number(run.result["top1"]),
        "95 % interval": lambda run: "{:.1f} to {:.1f}".format(*run.result["top1_interval"]),
        "mean per class": lambda run: _number(run.result.get("mean_per_class")),
        "kNN of pixels": lambda run: _number(run.result.get("pixel_knn")),
        "largest class": lambda run: _number(run.result.get("largest_class")),
        "before the first step": lambda run: _number(run.result.get("start_top1")),
        "parameters": _parameters,
        "time": lambda run: duration(run.result["seconds"]) if "seconds" in run.result else "",
    }
    caption = "Accuracy on the test images, beside what it must not be read without (percent)"
    return _table(columns, runs, caption)


def _others(runs: list[RunFacts], kind: str) -> TableOf | None:
    """The table of pretraining, or of probes."""
    some = [run for run in runs if run.kind == kind and (kind == "pretrain" or "readouts" in run.result)]
    if not some:
        return None
    columns: dict[str, Callable[[RunFacts], str]] = {"run": lambda run: run.label, "what": lambda run: run.what}
    if kind == "pretrain":
        columns |= {
            "images": lambda run: _count(run.result.get("train_size")),
            "epochs": lambda run: _count(run.result.get("epochs")),
            "loss": lambda run: _number(run.result.get("loss"), ".4g"),
            "kNN (%)": lambda run: _number(run.result.get("knn")),
            "parameters": _parameters,
        }
    else:
        for name, label in (("knn", "kNN (%)"), ("probe", "linear probe (%)")):
            columns[label] = lambda run, name=name: _number(run.result["readouts"][name].get("top1"))
            columns[f"{label[:-4]}: 95 % interval"] = lambda run, name=name: "{:.1f} to {:.1f}".format(
                *run.result["readouts"][name]["top1_interval"]
            )
        columns["largest class"] = lambda run: _number(run.result.get("largest_class"))
    columns["time"] = lambda run: duration(run.result["seconds"]) if "seconds" in run.result else ""
    return _table(columns, some, {"pretrain": "Pretraining", "probe": "Frozen features"}[kind])


def _table(columns: dict[str, Callable[[RunFacts], str]], runs: list[RunFacts], caption: str) -> TableOf:
    """A row for each run; columns that no run has anything for are left out."""
    rows = [[column(run) for column in columns.values()] for run in runs]
    kept = [n for n, _ in enumerate(columns) if any(row[n] for row in rows)]
    heads = list(columns)
    return TableOf([heads[n] for n in kept], [[row[n] for n in kept] for row in rows], caption)


def _over_seeds(runs: list[RunFacts]) -> Iterator[TableOf]:
    """The means of classifiers that are the same but for the seed."""
    rows = []
    for group in dict.fromkeys(run.group for run in runs):
        top1 = [run.result["top1"] for run in runs if run.group == group]
        if len(top1) > 1:
            each = ", ".join(f"{value:.1f}" for value in top1)
            rows.append([group, str(len(top1)), f"{statistics.mean(top1):.1f}", f"{statistics.stdev(top1):.1f}", each])
    if rows:
        heads = ["runs", "seeds", "mean top-1 (%)", "standard deviation", "each"]
        yield TableOf(heads, rows, "Runs that are the same but for the seed")


# ---------------------------------------------------------------------- curves, size
def _curves(runs: list[RunFacts]) -> Section:
    section = Section("curves", "Curves")
    for kind in ("pretrain", "finetune"):
        groups: dict[str, list[list[dict]]] = {}
        for run in runs:
            if run.kind == kind and any(run.records):
                groups.setdefault(run.group, []).extend(records for records in run.records if records)
        if not groups:
            continue
        pictures = []
        for over, label in (("epoch", "over epochs"), ("seconds", "over seconds")):
            title = NAMES[kind] + (f": {next(iter(groups))}" if len(groups) == 1 else "")
            figure = curves_figure(groups, title, over)
            alt = f"{NAMES[kind]}, {label}: loss, learning rate and what else was logged, of {listed(groups)}"
            pictures.append(
                (label, Picture(f"curves-{kind}-{over}s.png".replace("sss", "s").replace("ss.", "s."), figure, alt))
            )
        section.parts.append(Tabs(f"curves-{kind}", pictures))
    if not section.parts:
        section.parts.append(Text("No run has metrics.jsonl: there is nothing to draw.", "quiet"))
    elif any(len(run.records) > 1 for run in runs):
        section.parts.append(Text("Of k-fold runs a thin line is a fold, and the thick one their mean.", "quiet"))
    return section


def _sizes(runs: list[RunFacts]) -> Iterator[Section]:
    some = [run for run in runs if run.parameters and "top1_interval" in run.result]
    if len(some) < 2:
        return
    section = Section("size", "Accuracy over size")
    if len({run.parameters for run in some}) > 1:
        alt = "; ".join(f"{run.label}: {run.parameters / 1e6:.2g} M, {run.result['top1']:.1f} %" for run in some)
        caption = "Top-1 with its 95 % interval over the parameters of the backbone."
        section.parts.append(Picture("size.png", draw.sizes_figure(some), alt, caption))
    else:
        line = f"All classifiers have backbones of {some[0].parameters / 1e6:.3g} million parameters: no picture."
        section.parts.append(Text(line, "quiet"))
    yield section


# ---------------------------------------------------------------------- a run in detail
def _details(run: RunFacts, number: int, alone: bool) -> Iterator[Section]:
    """What is shown of a run alone; where there are several, under its name."""
    level = 2 if alone else 3
    if not alone:
        head = Section(f"run-{number}", run.label, 2, [Text(f"{run.what}: {run.path}", "quiet")])
        if (others := run.group) != run.label:
            head.parts.append(Text(f"Shown for all of {others}, which are the same but for the seed.", "quiet"))
        yield head
    makers = {
        "crops": _crops,
        "cloud": _cloud,
        "predicted": _confusions,
        "mistakes": _mistakes,
        "calibration": _calibrated,
    }
    titles = {
        "crops": "What the network saw", "cloud": "Features before and after", "predicted": "What is taken for what",
        "mistakes": "Most confident mistakes", "calibration": "Is it right as often as it says?",
        "explored": "Which training images are alike",
    }  # fmt: skip
    makers["explored"] = _explored
    for name, make in makers.items():
        parts = list(make(run, f"-{number}" if not alone else ""))
        if not parts and name in run.missing:
            parts = [Text(run.missing[name], "quiet")]
        if parts:
            yield Section(f"{name}-{number}", titles[name], level, parts)


def _crops(run: RunFacts, mark: str) -> Iterator:
    if run.crops is None:
        return
    sheets = []
    for title, rows in run.crops:
        made = sheet(rows)
        sheets.append((title.replace("\n", " "), webp(made), made.shape[1], made.shape[0]))
    yield Sheets(f"crops{mark}.png", run.crops, sheets, "Drawn as for the run's first epoch, with its own seed.")


def _cloud(run: RunFacts, mark: str) -> Iterator:
    if (cloud := run.cloud) is None:
        return
    said = "; ".join(f"{title} {share:.1f} %" for title, share in cloud.nearest.items())
    yield Text(f"Test images whose nearest other one, by cosine, is of their class: {said}.")
    classes = len(set(cloud.labels.tolist()))
    alt = f"{len(cloud.labels)} test images of {classes} classes in a plane; nearest of the same class: {said}"
    caption = (
        f"t-SNE of the pooled features of {len(cloud.labels):,} test images of {classes} classes. Groups that lie "
    )
    caption += "apart are told apart; how far apart, and how large a group is, says nothing."
    yield Picture(f"features{mark}.png", draw.cloud_figure(cloud), alt, caption)


def _confusions(run: RunFacts, mark: str) -> Iterator:
    if (found := run.predicted) is None:
        return
    (images, hits), instead = found.per_class(), found.confusions()
    alt = f"Confusion matrix of {len(run.classes)} classes; the table below has the worst"
    caption = "A row for each true class, a column for each predicted one; blue is right, orange wrong."
    yield Picture(f"confusion{mark}.png", confusion_figure(found, run.classes), alt, caption)
    order = sorted((c for c in range(len(images)) if images[c]), key=lambda c: (hits[c] / images[c], -images[c]))
    rows = []
    for c in order[:WORST]:
        most, often = instead.get(c, (None, 0))
        taken = f"{run.classes[most]} ({often})" if often else ""
        rows.append([run.classes[c], str(images[c]), str(hits[c]), f"{100 * hits[c] / images[c]:.1f}", taken])
    heads = ["class", "test images", "right", "accuracy (%)", "most often taken for"]
    yield TableOf(heads, rows, "The worst classes" if len(order) > WORST else "All classes, the worst first")


def _mistakes(run: RunFacts, mark: str) -> Iterator:
    if run.mistakes is None:
        return
    if not run.mistakes:
        yield Text("There is none: every test image was named right.")
        return
    items = []
    for one in run.mistakes:
        source = "" if one.image is None else webp(thumbnail(one.image))
        items.append((source, [f"{one.predicted} {100 * one.probability:.0f} %", f"is {one.truth}", one.path]))
    yield Text("What the classifier was surest of and wrong; a look at them often finds wrong labels.", "quiet")
    yield Thumbs(items)
    if "mistakes" in run.missing:
        yield Text(run.missing["mistakes"], "quiet")


def _calibrated(run: RunFacts, mark: str) -> Iterator:
    found = run.predicted
    if found is None or found.probability is None:
        return
    made = calibration(found.probability, found.predicted == found.truth)
    points = 100 * (made.confidence - made.accuracy)
    tone = "too sure" if points > 0 else "not sure enough"
    said = f"On average it is {100 * made.confidence:.1f} % sure and {100 * made.accuracy:.1f} % right: {abs(points):.1f} points {tone}. "
    yield Text(f"{said}Expected calibration error: {100 * made.error:.1f} points.")
    caption = (
        f"{BINS} bins of equal width; bars are 95 % intervals of the accuracy. The error is the mean distance from "
    )
    caption += "the dotted line, weighted by images; with few images it is above zero by chance, too."
    yield Picture(f"calibration{mark}.png", draw.reliability_figure(made), f"Reliability diagram. {said}", caption)


def _explored(run: RunFacts, mark: str) -> Iterator:
    if (found := run.explored) is None:
        return
    yield from (Text(line) for line in found.get("lines", ()))
    for section in found.get("sections", ()):
        yield Text(f"{section['title']}: {section['count']:,}", "head")
        yield from (Text(line, "quiet") for line in section.get("lines", ()))
        if table := section.get("table"):
            rows = [["" if cell is None else str(cell) for cell in row] for row in table["rows"]]
            yield TableOf(table["columns"], rows)
        for name, content in section.get("pictures", ()):
            yield Raster(data_uri("image/png", content), f"{section['title']}: {name}")
        if section.get("csv"):
            yield Text(f"All of them: {section['csv']}", "quiet")
    yield from (Text(note, "quiet") for note in found.get("notes", ()))


# ---------------------------------------------------------------------- how it was made
def _settings(runs: list[RunFacts]) -> Section:
    section = Section("settings", "Settings")
    if len(runs) > 1:
        section.parts += _own_settings(runs)
    for run in runs if len(runs) == 1 else [run for run in runs if run.detailed]:
        if run.recipe is not None:
            differ = run.recipe.differences
            caption = f"{run.label}: the shipped recipe that it is nearest to is {run.recipe.name}"
            caption += "; it differs in" if differ else ", of which it changes nothing"
            heads = ["key", "recipe", "run"]
            section.parts.append(TableOf(heads, [[key, _value(old), _value(new)] for key, old, new in differ], caption))
        pairs = [(key, _value(value)) for key, value in run.config.items()]
        if pairs:
            section.parts.append(Folded(f"The whole config of {run.label}", pairs))
    if any(run.recipe for run in runs):
        line = (
            "config.yaml does not name its recipe: the nearest is the one with the fewest differences, images, model, "
        )
        line += "seed and folders left out, as is what a recipe leaves open."
        section.parts.append(Text(line, "quiet"))
    return section


def _own_settings(runs: list[RunFacts]) -> Iterator[TableOf]:
    """Where runs of one kind differ."""
    for kind, name in NAMES.items():
        some = [run for run in runs if run.kind == kind and run.detailed and run.config]
        keys = list(dict.fromkeys(key for run in some for key in run.config if key not in ("out", "resume")))
        rows = [[key, *(_value(run.config.get(key)) for run in some)] for key in keys]
        rows = [row for row in rows if len(set(row[1:])) > 1]
        if len(some) > 1 and rows:
            yield TableOf(["key", *(run.label for run in some)], rows, f"{name}: where the runs' configs differ")


def _value(value) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _environments(runs: list[RunFacts]) -> Section:
    section = Section("environment", "Environment and seeds")
    seeds = [
        [run.label, _value(run.config.get("seed", run.result.get("seed"))), run.result.get("precision", "")]
        for run in runs
    ]
    section.parts.append(TableOf(["run", "seed", "precision"], seeds, "Seeds"))
    known = [run for run in runs if run.environment]
    if known:
        rows = [[key, *(_told(key, run.environment) for run in known)] for key in _environment_keys(known)]
        rows = [row for row in rows if any(row[1:])]
        if len(known) > 1 and len({tuple(row[1:]) for row in rows}) and all(len(set(r[1:])) == 1 for r in rows):
            rows = [row[:2] for row in rows]
            section.parts.append(TableOf(["", "all runs"], rows, "What they ran on"))
        else:
            section.parts.append(TableOf(["", *(run.label for run in known)], rows, "What they ran on"))
    without = [run.label for run in runs if not run.environment]
    if without:
        line = f"No environment.json, which older versions did not write: {listed(without)}."
        section.parts.append(Text(line, "quiet"))
    return section


def _environment_keys(runs: list[RunFacts]) -> list[str]:
    keys = dict.fromkeys(ENVIRONMENT)
    versions = {f"versions.{name}": None for run in runs for name in run.environment.get("versions", {})}
    return [*keys, *versions]


def _told(key: str, environment: dict) -> str:
    section, _, name = key.partition(".")
    value = environment.get(section)
    value = value.get(name) if name and isinstance(value, dict) else value
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if key == "memory" and isinstance(value, int | float):
        return f"{value / 2**30:.1f} GiB"
    return re.sub(r"\s+", " ", str(value))
