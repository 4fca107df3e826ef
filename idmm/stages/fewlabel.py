"""``idmm fewlabel``: accuracy over the number of labelled images per class, of frozen features or of fine-tuning."""

import hashlib
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from idmm import charts
from idmm.config import FinetuneConfig, Subset, parsing
from idmm.config.commands import FeatureConfig, FewLabelConfig
from idmm.config.stages import Backbone
from idmm.data.listing import draw_subset, list_images
from idmm.data.registry import resolve_name, spec_of
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed
from idmm.evaluation.evaluate import largest_class, readouts
from idmm.evaluation.features import FrozenBackbone
from idmm.files import made_folder, write_json, write_text
from idmm.progress import drawing, log
from idmm.stages.folds import several
from idmm.stages.probe import frozen_backbone, labelled_images
from idmm.stages.run import run_stage

READOUTS = {"knn": "kNN", "probe": "linear probe", "finetune": "fine-tuned"}
METRICS = {"top1": "top-1", "mean_per_class": "mean over classes"}
PER_CLASS = (1, 2, 5, 10, 20)  # numbers of labels by default
FILES = ("fewlabel.json", "fewlabel.md", "fewlabel.png")


@dataclass(frozen=True)
class Record:
    """The accuracy of a backbone with one readout, number of labels and draw, in percent."""

    run: str
    readout: str
    per_class: int
    seed: int
    images: int
    top1: float
    mean_per_class: float | None  # if the dataset's literature reports it, and of fine-tuning
    strength: float | None  # of the linear probe


def fewlabel(config: FewLabelConfig) -> dict:
    """Measure every backbone with every number of labels and every draw, and write the table, the curves and the JSON.

    The draws are those of ``data.subset: {per_class: K, seed: S}``, the same images for every backbone and protocol. A
    smaller draw is part of a larger one. The probe's strength is chosen on the K images only, never on a val split,
    which would be many more labels.

    Returns:
        The content of ``fewlabel.json``: ``records`` (see :class:`Record`), ``summary`` (``mean`` and ``std`` of the
        ``metric`` over draws), ``runs`` (the backbone under each name) and the numbers of the dataset.

    Raises:
        UserError: A mistake in the flags or in ``config.finetune``, no labels, or a class with too few images.
        RunError: A fine-tuning could not continue. The same command resumes it.
    """
    data, notes = resolve_name(config.data)
    config = replace(config, data=data)
    tuning = _finetune_config(config)
    backbones = _backbones(config)
    for note in notes:
        log.info("%s", note)
    splits = list_images(config.data, labelled=True)
    numbers = _numbers(config.per_class, splits.train)
    metric = spec_of(config.data.name).metric
    header = {
        "dataset": config.data.name,
        "root": config.data.root and os.path.realpath(os.path.expanduser(config.data.root)),
        "protocol": "finetune" if tuning else "probe",
        "metric": metric,
        "per_class": numbers,
        "seeds": config.seeds,
        "runs": {backbone.label: backbone.about for backbone in backbones},
    }
    _check_out(Path(config.out), header)
    out = made_folder(config.out)
    draws = [Subset(per_class=number, seed=seed) for number in numbers for seed in range(config.seeds)]
    if tuning:
        records = list(_finetuned(config, tuning, backbones, draws))
    else:
        records = list(_probed(splits.train, metric, backbones, draws))
    result = header | {
        "num_classes": len(splits.train.classes),
        "test_size": len(splits.test),
        "largest_class": largest_class(splits.test.labels)[1],
        **splits.remarks,
        "summary": summary(records, metric),
        "records": [{name: value for name, value in asdict(r).items() if value is not None} for r in records],
    }
    text = table(result)
    write_json(out / "fewlabel.json", result)
    write_text(out / "fewlabel.md", text + "\n")
    with drawing("fewlabel.png"):
        _draw(result, out / "fewlabel.png")
    print(f"{text}\n\nwritten: {', '.join(str(out / name) for name in FILES)}")
    return result


# ---------------------------------------------------------------------- before the measurements
def _finetune_config(config: FewLabelConfig) -> FinetuneConfig | None:
    """Return the config that every fine-tuning starts from, or None to measure frozen features."""
    faults, tuning = [], None
    if config.data.subset is not None:
        faults.append("data.subset: leave it out, per_class and seeds draw the labelled images")
    if several(config.data):
        faults.append("data.folds: this command measures on one test split. Add --data.fold to name a fold")
    if config.finetune is not None:
        defaults = FeatureConfig()
        for name in ("seed", "size", "crop_pct", "batch_size", "device"):
            if getattr(config, name) != getattr(defaults, name):
                faults.append(f"{name}: is for frozen features. Fine-tuning has its own in --finetune FILE")
        try:
            tuning = parsing.build(FinetuneConfig, config.finetune)
        except UserError as error:
            faults += [f"finetune: {line.removeprefix('--config: ')}" for line in error.faults]
        else:
            names = [name for name in ("out", "init", "seed", "resume") if name in parsing.changed(tuning)]
            for name in parsing.changed(tuning.data):
                if name != "subset" and getattr(tuning.data, name) != getattr(config.data, name):
                    names.append(f"data.{name}")
            faults += [f"finetune: '{config.finetune}' has {name}, which this command sets" for name in names]
    if faults:
        raise UserError(*faults)
    return tuning


def _backbones(config: FewLabelConfig) -> list[FrozenBackbone]:
    """Return the backbones, with ``untrained`` also each architecture with fresh weights."""
    backbones = [frozen_backbone(replace(config, model=Backbone()).probe(init)) for init in config.init]
    if config.untrained:
        architectures = {}
        for backbone in backbones:
            size = None if config.finetune else backbone.size  # FILE has the sizes of fine-tuning
            key = json.dumps([backbone.spec.name, backbone.spec.kwargs, size], default=str)
            architectures.setdefault(key, backbone)
        label = "from scratch" if config.finetune else "untrained"
        for backbone in architectures.values():
            backbones.append(backbone.untrained(f"{label}, as {backbone.label}" if len(architectures) > 1 else label))
    if config.model.name:
        backbones.append(frozen_backbone(config.probe(None)))
    return backbones


def _numbers(per_class: list[int] | None, train: Split) -> list[int]:
    """Return the numbers of labels per class in order: as given, or the default ones that every class has."""
    counts = np.bincount(train.labels, minlength=len(train.classes))
    fewest = max(1, int(counts.min()))
    numbers = sorted(per_class or {min(number, fewest) for number in PER_CLASS})
    by_size = np.argsort(counts, kind="stable")
    if small := [f"'{train.classes[c]}' ({counts[c]})" for c in by_size if counts[c] < numbers[-1]]:
        expected = f"expected at most {counts.min()}"
        raise UserError(f"per_class: {numbers[-1]} is more than the training images of {listed(small)}, {expected}")
    return numbers


def _check_out(out: Path, header: dict[str, Any]) -> None:
    """Refuse a folder whose results this call would lose: other images, another protocol, more runs or draws."""
    try:
        before = json.loads((out / "fewlabel.json").read_text())
    except FileNotFoundError:
        return
    differs = any(before[name] != header[name] for name in ("dataset", "root", "protocol"))
    has_more = {*before["runs"]} - {*header["runs"]} or {*before["per_class"]} - {*header["per_class"]}
    if differs or has_more or before["seeds"] > header["seeds"]:
        raise UserError(f"out: '{out}' has results that this call would not measure again. Name another folder")


# ---------------------------------------------------------------------- measurements
def _probed(split: Split, metric: str, backbones: list[FrozenBackbone], draws: list[Subset]) -> Iterator[Record]:
    """Measure features, which are taken once per backbone, by both readouts."""
    for backbone in backbones:
        stores = labelled_images(backbone, None, ("train", "test")).parts
        train, test = stores["train"], stores["test"]
        features, test_features = backbone.features(train, "train"), backbone.features(test, "test")
        rows = {name: row for row, name in enumerate(train.names)}
        for draw in draws:
            # data.on_error skip leaves files out
            chosen = [rows[name] for name in draw_subset(split, draw).names if name in rows]
            known = features[chosen], train.labels[chosen]
            measured = readouts(*known, test_features, test.labels, seed=draw.seed, metric=metric)
            for name, readout in measured._asdict().items():
                scores = (readout.top1, readout.mean_per_class, readout.strength)
                yield Record(backbone.label, name, draw.per_class, draw.seed, len(chosen), *scores)


def _finetuned(
    config: FewLabelConfig, tuning: FinetuneConfig, backbones: list[FrozenBackbone], draws: list[Subset]
) -> Iterator[Record]:
    """Fine-tune every backbone on every draw. A finished run is read, a stopped one is resumed."""
    cells = list(itertools.product(backbones, draws))
    for number, (backbone, draw) in enumerate(cells, start=1):
        labels = counted(draw.per_class, "label")
        line = "fine-tuning %d of %d: %s, %s per class, seed %d"
        log.info(line, number, len(cells), backbone.label, labels, draw.seed)
        data, model, spec = replace(config.data, subset=draw), tuning.model, backbone.spec
        if backbone.config.init is None:  # the same network on the same values
            names = ("mean", "std", "in_chans", "range", "bands")
            data = replace(data, **{name: getattr(spec, name) for name in names})
            model = replace(model, name=spec.name, kwargs=spec.kwargs)
        run = Path(config.out, "runs", f"{_run_name(backbone)}-{draw.per_class}-{draw.seed}")
        init = backbone.config.init and backbone.label  # as given: a run pins the commit of public weights itself
        run_config = replace(tuning, out=str(run), init=init, seed=draw.seed, data=data, model=model)
        result = run_stage(run_config)
        scores = (result["top1"], result.get("mean_per_class"), None)
        yield Record(backbone.label, "finetune", draw.per_class, draw.seed, result["train_size"], *scores)


def _run_name(backbone: FrozenBackbone) -> str:
    """Return a name from the source of the weights and a hash of them, as a run of the same name may change."""
    spec = backbone.spec
    facts = [spec.name, spec.kwargs] + ([] if spec.init else [backbone.config.seed])
    state = {name: tensor.contiguous() for name, tensor in spec.init.state.items()} if spec.init else {}
    digest = hashlib.blake2b(json.dumps(facts, default=str).encode() + save(state), digest_size=4).hexdigest()
    source = "".join(c if c.isalnum() else "-" for c in os.path.normpath(backbone.label))
    return f"{source.strip('-')[-40:]}-{digest}"


# ---------------------------------------------------------------------- results
def summary(records: list[Record], metric: str) -> list[dict[str, Any]]:
    """Return mean and standard deviation over draws (None for a single one) of each run, readout and number."""
    groups: dict[tuple, list[float]] = {}
    for record in records:
        groups.setdefault((record.run, record.readout, record.per_class), []).append(getattr(record, metric))
    rows = []
    for (run, readout, number), values in groups.items():
        row = {"run": run, "readout": readout, "per_class": number, "mean": statistics.mean(values)}
        rows.append(row | {"std": statistics.stdev(values) if len(values) > 1 else None})
    return rows


def table(result: dict) -> str:
    """Return the summary as Markdown, a row for each readout of each run."""
    cells: dict[tuple, list[str]] = {}
    for row in result["summary"]:
        spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
        cells.setdefault((row["run"], row["readout"]), []).append(f"{row['mean']:.1f}{spread}")
    draws = f"mean ± standard deviation over {result['seeds']} draws" if result["seeds"] > 1 else "one draw"
    images = f"the {result['test_size']:,} test images of {result['dataset']}"
    lines = [
        f"{METRICS[result['metric']]} on {images} in percent, {draws}:",
        "",
        f"| labelled images per class | {' | '.join(map(str, result['per_class']))} |",
        "|---" * (len(result["per_class"]) + 1) + "|",
    ]
    return "\n".join(lines + [f"| {run}, {READOUTS[kind]} | {' | '.join(row)} |" for (run, kind), row in cells.items()])


def _draw(result: dict, path: Path) -> None:
    panels: dict[str, dict[str, list[tuple]]] = {}
    for row in result["summary"]:
        panel = panels.setdefault(READOUTS[row["readout"]], {})
        panel.setdefault(row["run"], []).append((row["per_class"], row["mean"], row["std"] or 0.0))
    ylabel = f"{METRICS[result['metric']]} on the test images of {result['dataset']} (%)"
    fresh = [name for name, about in result["runs"].items() if about["init"] is None]
    charts.label_curves(panels, path, ylabel, result["largest_class"], result["seeds"], fresh)
