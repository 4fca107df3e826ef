"""``idmm fewlabel``: accuracy of frozen features over the number of labelled images per class."""

import itertools
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from idmm.config import RESUME_IGNORED, Data, Subset, parsing
from idmm.config.commands import FewLabelConfig, ProbeConfig
from idmm.config.stages import Backbone
from idmm.data.listing import draw_subset, list_images
from idmm.data.registry import spec_of
from idmm.data.split import Listing, Split
from idmm.errors import UserError
from idmm.evaluation.baseline import largest_class
from idmm.evaluation.evaluate import readouts
from idmm.files import made_folder, read_json, write_json, write_text
from idmm.models.hog import Hog
from idmm.progress import drawing, log
from idmm.report import charts
from idmm.runs.probe import READOUTS, backbone_entries, build_network
from idmm.runs.resolve import resolve_probe
from idmm.text import listed
from idmm.training.run import Run

Backbones = dict[str, Run[ProbeConfig]]  # by name
METRICS = {"top1": "top-1", "mean_per_class": "mean over classes"}
PER_CLASS = (1, 2, 5, 10, 20)  # numbers of labels by default
FILES = ("fewlabel.json", "fewlabel.md", "fewlabel.png")


def fewlabel(config: FewLabelConfig) -> dict[str, Any]:
    """Measure every backbone with every number of labels and every draw.

    Writes the table, the curves and the JSON. The draws are those of ``data.subset: {per_class: K,
    seed: S}``, the same images for every backbone. A smaller draw is part of a larger one. The
    probe's strength is chosen on the K images only, never on a val split, which would be many more
    labels.

    Returns:
        The content of ``fewlabel.json``: ``records`` (percent, for each run, readout, number and
        draw), ``summary`` (``mean`` and ``std`` of the ``metric`` over draws), ``runs`` (the
        backbone under each name) and the numbers of the dataset.

    Raises:
        UserError: A mistake in the flags, no labels, or a class with too few images.
    """
    if config.data.folds is not None and config.data.fold is None:
        raise UserError.of(
            "data.folds",
            "this command measures on one test split",
            "Add --data.fold to name a fold",
        )
    backbones = resolve_backbones(config)
    data = next(iter(backbones.values())).config.data
    splits = replace(list_images(data, labelled=True), val=None)
    test = splits.test
    assert test is not None  # it was asked for
    header = describe(config, data, splits, backbones)
    out = made_folder(config.out)
    file = out / "fewlabel.json"
    check_same(out, file, header)
    notes = [note for run in backbones.values() for note in run.notes]
    for note in dict.fromkeys(notes):
        log.info(note)
    records = []
    for label, run in backbones.items():
        records += probed(splits, header, label, run)
    result = header | {
        "num_classes": len(splits.train.class_names),
        "test_size": len(test),
        "largest_class": largest_class(test.known_labels),
        **splits.remarks,
        "summary": summary(records, header["metric"]),
        "records": records,
    }
    text = table(result)
    write_json(file, result)
    write_text(out / "fewlabel.md", text + "\n")
    with drawing("fewlabel.png"):
        _draw(result, out / "fewlabel.png")
    files = ", ".join(str(out / name) for name in FILES)
    print(f"{text}\n\nwritten: {files}")
    return result


def describe(
    config: FewLabelConfig, data: Data, splits: Listing, backbones: Backbones
) -> dict[str, Any]:
    """Return the entries of ``fewlabel.json`` that another measurement must share."""
    compared = {}
    for key, value in parsing.to_dict(data).items():
        if f"data.{key}" not in RESUME_IGNORED:
            compared[key] = value
    return {
        "dataset": data.name,
        "data": compared,
        "metric": spec_of(data.name).metric,
        "per_class": _numbers(config.per_class, splits.train),
        "seeds": config.seeds,
        "seed": config.seed,
        "crop_pct": config.crop_pct,
        "crop_mode": config.crop_mode,
        "runs": {label: backbone_entries(run) for label, run in backbones.items()},
    }


def check_same(out: Path, file: Path, header: dict[str, Any]) -> None:
    """Raise UserError if the folder has the results of other measurements."""
    if not file.exists():
        return
    saved = read_json(file, "Delete it to measure again")
    as_saved = json.loads(json.dumps(header))
    if not as_saved.items() <= saved.items():
        raise UserError.of(
            "out", f"'{out}' has the results of other measurements", "Name a new folder"
        )


def resolve_backbones(config: FewLabelConfig) -> Backbones:
    """Return a probe for each backbone by its name, and ``untrained`` ones if they are asked for.

    They are one for each architecture.
    """
    backbones = {}
    for init in config.init:
        probe = replace(config, model=Backbone()).probe(init)
        backbones[init] = resolve_probe(probe)
    if config.untrained:
        untrained: dict[str, ProbeConfig] = {}  # by the first of equal backbones
        for label, run in backbones.items():
            probe = replace(run.config, init=None)
            if probe not in untrained.values():
                untrained[label] = probe
        for label, probe in untrained.items():
            name = f"untrained, as {label}" if len(untrained) > 1 else "untrained"
            backbones[name] = resolve_probe(probe)
    if config.model.name:
        backbones[config.model.name] = resolve_probe(config.probe(None))
    return backbones


def _numbers(per_class: list[int] | None, train: Split) -> list[int]:
    """Return the numbers of labels per class in order.

    They are as given, or the default ones that every class has.
    """
    counts = np.bincount(train.known_labels, minlength=len(train.class_names))
    fewest = max(1, int(counts.min()))
    numbers = sorted({*(per_class or ())} or {min(number, fewest) for number in PER_CLASS})
    small = []
    for c in np.argsort(counts, kind="stable"):
        if counts[c] < numbers[-1]:
            small.append(f"'{train.class_names[c]}' ({counts[c]})")
    if small:
        raise UserError.of(
            "per_class",
            f"{numbers[-1]} is more than the training images of {listed(small)}, "
            f"expected at most {counts.min()}",
        )
    return numbers


def probed(
    splits: Listing, header: dict[str, Any], label: str, run: Run[ProbeConfig]
) -> list[dict[str, Any]]:
    """Measure a backbone's features, which are taken once, by both readouts for each draw."""
    images = run.store(splits, None)
    network = build_network(run, label)
    train = images.train
    test = images.tested
    workers = run.config.data.workers
    features = network.split_features(train, workers, "train")
    test_features = network.split_features(test, workers, "test")
    rows = {name: row for row, name in enumerate(splits.train.names)}
    metric = header["metric"]
    records = []
    for number, seed in itertools.product(header["per_class"], range(header["seeds"])):
        drawn = draw_subset(splits.train, Subset(per_class=number, seed=seed))
        chosen = [rows[name] for name in drawn.names]
        measured = readouts(
            features[chosen],
            train.known_labels[chosen],
            test_features,
            test.known_labels,
            seed=seed,
            metric=metric,
            groups=None if train.groups is None else train.groups[chosen],
            one_scale=type(network.model) is Hog,
        )
        for name, readout in measured.items():
            record = {"run": label, "readout": name, "per_class": number, "seed": seed}
            record["images"] = len(chosen)
            for key in ("top1", "mean_per_class", "strength"):
                if key in readout:
                    record[key] = readout[key]
            records.append(record)
    return records


def summary(records: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return mean and standard deviation over draws of each run, readout and number.

    The standard deviation of a single draw is None.
    """
    groups = defaultdict(list)
    for record in records:
        groups[record["run"], record["readout"], record["per_class"]].append(record[metric])
    rows = []
    for (run, readout, number), values in groups.items():
        std = statistics.stdev(values) if len(values) > 1 else None
        mean = statistics.mean(values)
        rows.append({"run": run, "readout": readout, "per_class": number, "mean": mean, "std": std})
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the summary as Markdown, a row for each readout of each run."""
    cells = defaultdict(list)
    for row in result["summary"]:
        spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
        cells[row["run"], row["readout"]].append(f"{row['mean']:.1f}{spread}")
    draws = "one draw"
    if result["seeds"] > 1:
        draws = f"mean ± standard deviation over {result['seeds']} draws"
    images = f"the {result['test_size']:,} test images of {result['dataset']}"
    lines = [
        f"{METRICS[result['metric']]} on {images} in percent, {draws}:",
        "",
        f"| labelled images per class | {' | '.join(map(str, result['per_class']))} |",
        "|---" * (len(result["per_class"]) + 1) + "|",
    ]
    for (run, readout), row in cells.items():
        lines.append(f"| {run}, {READOUTS[readout]} | {' | '.join(row)} |")
    return "\n".join(lines)


def _draw(result: dict[str, Any], path: Path) -> None:
    panels: Any = defaultdict(lambda: defaultdict(list))
    for row in result["summary"]:
        point = (row["per_class"], row["mean"], row["std"] or 0.0)
        panels[READOUTS[row["readout"]]][row["run"]].append(point)
    ticks = {count: str(count) for count in result["per_class"]}
    note = None
    if result["seeds"] > 1:
        note = f"mean, bars: ± 1 standard\ndeviation over {result['seeds']} draws"
    labels = (
        "labelled images per class",
        f"{METRICS[result['metric']]} on the test images of {result['dataset']} (%)",
    )
    charts.accuracy_curves(panels, path, labels, ticks, result["largest_class"], note)
