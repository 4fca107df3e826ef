"""``idmm fewlabel``: accuracy of frozen features over the number of labelled images per class."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm.config import RESUME_IGNORED, Subset, parsing
from idmm.config.commands import FewLabelConfig
from idmm.config.stages import Backbone
from idmm.data.listing import draw_subset, list_images
from idmm.data.registry import spec_of
from idmm.data.split import Listing, Split
from idmm.errors import UserError
from idmm.evaluation.evaluate import readouts
from idmm.files import made_folder, read_json, write_json, write_text
from idmm.progress import drawing, log
from idmm.report import charts
from idmm.runs import common
from idmm.runs.outputs import largest_class
from idmm.runs.probe import READOUTS, about, build_network
from idmm.runs.resolve import resolve
from idmm.text import listed
from idmm.training.stage import RunSetup

METRICS = {"top1": "top-1", "mean_per_class": "mean over classes"}
PER_CLASS = (1, 2, 5, 10, 20)  # numbers of labels by default
FILES = ("fewlabel.json", "fewlabel.md", "fewlabel.png")


def fewlabel(config: FewLabelConfig) -> dict:
    """Measure every backbone with every number of labels and every draw, and write the table, the
    curves and the JSON.

    The draws are those of ``data.subset: {per_class: K, seed: S}``, the same images for every
    backbone. A smaller draw is part of a larger one. The probe's strength is chosen on the K images
    only, never on a val split, which would be many more labels.

    Returns:
        The content of ``fewlabel.json``: ``records`` (percent, for each run, readout, number and
        draw), ``summary`` (``mean`` and ``std`` of the ``metric`` over draws), ``runs`` (the
        backbone under each name) and the numbers of the dataset.

    Raises:
        UserError: A mistake in the flags, no labels, or a class with too few images.
    """
    if config.data.folds is not None and config.data.fold is None:
        raise UserError(
            "data.folds: this command measures on one test split. Add --data.fold to name a fold"
        )
    backbones = _backbones(config)
    data = next(iter(backbones.values())).config.data
    splits = replace(list_images(data, labelled=True), val=None)
    numbers = _numbers(config.per_class, splits.train)
    metric = spec_of(data.name).metric
    chosen = {
        key: value
        for key, value in parsing.to_dict(data).items()
        if f"data.{key}" not in RESUME_IGNORED
    }
    header = {
        "dataset": data.name,
        "data": chosen,
        "metric": metric,
        "per_class": numbers,
        "seeds": config.seeds,
        "seed": config.seed,
        "crop_pct": config.crop_pct,
        "runs": {label: about(setup) for label, setup in backbones.items()},
    }
    out = made_folder(config.out)
    file = out / "fewlabel.json"
    as_saved = json.loads(json.dumps(header))
    if (
        file.exists()
        and not as_saved.items() <= read_json(file, "Delete it to measure again").items()
    ):
        raise UserError(f"out: '{out}' has the results of other measurements. Name a new folder")
    for note in dict.fromkeys(note for setup in backbones.values() for note in setup.notes):
        log.info("%s", note)
    draws = [
        Subset(per_class=number, seed=seed) for number in numbers for seed in range(config.seeds)
    ]
    records = list(_probed(splits, metric, backbones, draws))
    result = header | {
        "num_classes": len(splits.train.classes),
        "test_size": len(splits.test),
        "largest_class": largest_class(splits.test.labels),
        **splits.remarks,
        "summary": summary(records, metric),
        "records": records,
    }
    text = table(result)
    write_json(file, result)
    write_text(out / "fewlabel.md", text + "\n")
    with drawing("fewlabel.png"):
        _draw(result, out / "fewlabel.png")
    print(f"{text}\n\nwritten: {', '.join(str(out / name) for name in FILES)}")
    return result


def _backbones(config: FewLabelConfig) -> dict[str, RunSetup]:
    """Return a probe for each backbone by its name, with ``untrained`` also for each architecture's
    fresh weights."""
    backbones = {
        init: resolve(replace(config, model=Backbone()).probe(init)) for init in config.init
    }
    if config.untrained:
        untrained = {}  # by the first of equal backbones
        for label, setup in backbones.items():
            probe = replace(setup.config, init=None)
            if probe not in untrained.values():
                untrained[label] = probe
        for label, probe in untrained.items():
            backbones[f"untrained, as {label}" if len(untrained) > 1 else "untrained"] = resolve(
                probe
            )
    if config.model.name:
        backbones[config.model.name] = resolve(config.probe(None))
    return backbones


def _numbers(per_class: list[int] | None, train: Split) -> list[int]:
    """Return the numbers of labels per class in order: as given, or the default ones that every
    class has."""
    counts = np.bincount(train.labels, minlength=len(train.classes))
    fewest = max(1, int(counts.min()))
    numbers = sorted({*(per_class or ())} or {min(number, fewest) for number in PER_CLASS})
    by_size = np.argsort(counts, kind="stable")
    if small := [f"'{train.classes[c]}' ({counts[c]})" for c in by_size if counts[c] < numbers[-1]]:
        expected = f"expected at most {counts.min()}"
        raise UserError(
            f"per_class: {numbers[-1]} is more than the training images of {listed(small)}, {expected}"
        )
    return numbers


def _probed(
    splits: Listing, metric: str, backbones: dict[str, RunSetup], draws: list[Subset]
) -> Iterator[dict]:
    """Measure features, which are taken once per backbone, by both readouts."""
    for label, setup in backbones.items():
        setup, images = common.store_run_images(setup, splits)
        network = build_network(setup, label)
        train = images.train
        test = images.test
        workers = setup.config.data.workers
        features, test_features = (
            network.split_features(s, workers, part) for part, s in images.parts.items()
        )
        rows = {name: row for row, name in enumerate(splits.train.names)}
        for draw in draws:
            chosen = [rows[name] for name in draw_subset(splits.train, draw).names]
            labelled = features[chosen], train.labels[chosen]
            groups = None if train.groups is None else train.groups[chosen]
            measured = readouts(
                *labelled, test_features, test.labels, seed=draw.seed, metric=metric, groups=groups
            )
            for name, readout in measured.items():
                scores = {
                    key: readout[key]
                    for key in ("top1", "mean_per_class", "strength")
                    if key in readout
                }
                record = {
                    "run": label,
                    "readout": name,
                    "per_class": draw.per_class,
                    "seed": draw.seed,
                }
                yield {**record, "images": len(chosen), **scores}


def summary(records: list[dict], metric: str) -> list[dict]:
    """Return mean and standard deviation over draws (None for a single one) of each run, readout
    and number."""
    groups = defaultdict(list)
    for record in records:
        groups[record["run"], record["readout"], record["per_class"]].append(record[metric])
    rows = []
    for (run, readout, number), values in groups.items():
        row = {"run": run, "readout": readout, "per_class": number, "mean": statistics.mean(values)}
        rows.append(row | {"std": statistics.stdev(values) if len(values) > 1 else None})
    return rows


def table(result: dict) -> str:
    """Return the summary as Markdown, a row for each readout of each run."""
    cells = defaultdict(list)
    for row in result["summary"]:
        spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
        cells[row["run"], row["readout"]].append(f"{row['mean']:.1f}{spread}")
    if result["seeds"] > 1:
        draws = f"mean ± standard deviation over {result['seeds']} draws"
    else:
        draws = "one draw"
    images = f"the {result['test_size']:,} test images of {result['dataset']}"
    lines = [
        f"{METRICS[result['metric']]} on {images} in percent, {draws}:",
        "",
        f"| labelled images per class | {' | '.join(map(str, result['per_class']))} |",
        "|---" * (len(result["per_class"]) + 1) + "|",
    ]
    return "\n".join(
        lines
        + [f"| {run}, {READOUTS[kind]} | {' | '.join(row)} |" for (run, kind), row in cells.items()]
    )


def _draw(result: dict, path: Path) -> None:
    panels = defaultdict(lambda: defaultdict(list))
    for row in result["summary"]:
        panels[READOUTS[row["readout"]]][row["run"]].append(
            (row["per_class"], row["mean"], row["std"] or 0.0)
        )
    ylabel = f"{METRICS[result['metric']]} on the test images of {result['dataset']} (%)"
    ticks = {count: str(count) for count in result["per_class"]}
    if result["seeds"] > 1:
        note = f"mean, bars: ± 1 standard\ndeviation over {result['seeds']} draws"
    else:
        note = None
    labels = "labelled images per class", ylabel
    charts.accuracy_curves(panels, path, labels, ticks, result["largest_class"], note)
