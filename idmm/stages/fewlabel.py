"""``idmm fewlabel``: accuracy as a function of the labelled images a class, of frozen features or of fine-tuning."""

import itertools
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm.config import FinetuneConfig, Subset, parsing
from idmm.config.commands import FeatureConfig, FewLabelConfig
from idmm.config.stages import Backbone
from idmm.data.listing import draw_subset, list_images
from idmm.data.registry import resolve_name, spec_of
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed
from idmm.evaluation.evaluate import largest_class, readouts
from idmm.evaluation.features import FrozenBackbone
from idmm.figures import charts as pictures
from idmm.files import made_folder, write_json, write_text
from idmm.progress import drawing, log
from idmm.stages.folds import several
from idmm.stages.probe import frozen_backbone, labelled_images
from idmm.stages.run import run_stage

READOUTS = {"knn": "kNN", "probe": "linear probe", "finetune": "fine-tuned"}
METRICS = {"top1": "top-1", "mean_per_class": "mean over classes"}
USUAL = (1, 2, 5, 10, 20)
FILES = ("fewlabel.json", "fewlabel.md", "fewlabel.png")


def fewlabel(given: FewLabelConfig) -> dict:
    """Measures every backbone at every number of labels and every draw; writes the table, the curves and all figures.

    The draws are those of ``data.subset: {per_class: K, seed: S}``, the same images for every backbone and protocol,
    and a smaller one is part of a larger one. The probe's strength is chosen on the K images alone, never on a val
    split: that would be many more labels.

    Returns:
        What ``fewlabel.json`` holds: ``records``, one a backbone, readout, number and draw, with ``top1`` (percent;
        ``mean_per_class`` too where the literature reports it, and of fine-tuning); ``summary``, ``mean`` and ``std``
        of the ``metric`` over draws; ``runs``: what was measured under which name; and the dataset's figures.

    Raises:
        UserError: A mistake in the flags or in ``given.finetune``, no labels, or a class with fewer images than asked.
        RunError: A fine-tuning could not go on; the same command takes it up again.
    """
    data, notes = resolve_name(given.data)
    given = replace(given, data=data)
    tuning = _tuning(given)
    backbones = _backbones(given)
    for note in notes:
        log.info("%s", note)
    splits = list_images(given.data, labelled=True)
    numbers = _numbers(given.per_class, splits.train)
    metric = spec_of(given.data.name).metric
    asked = {
        "dataset": given.data.name,
        "root": given.data.root and os.path.realpath(os.path.expanduser(given.data.root)),
        "protocol": "finetune" if tuning else "probe",
        "metric": metric,
        "per_class": numbers,
        "seeds": given.seeds,
        "runs": {backbone.label: backbone.about for backbone in backbones},
    }
    _check_out(Path(given.out), asked)
    out = made_folder(given.out)
    draws = [Subset(per_class=number, seed=seed) for number in numbers for seed in range(given.seeds)]
    measured = _tuned(given, tuning, backbones, draws) if tuning else _probed(splits.train, metric, backbones, draws)
    records = [
        {"run": label, "readout": readout, "per_class": draw.per_class, "seed": draw.seed, "images": images}
        | {name: scores[name] for name in ("top1", "mean_per_class", "strength") if name in scores}
        for label, draw, images, found in measured
        for readout, scores in found.items()
    ]
    result = asked | {
        "num_classes": len(splits.train.classes),
        "test_size": len(splits.test),
        "largest_class": largest_class(splits.test.labels)[1],
        **splits.remarks,
        "summary": summary(records, metric),
        "records": records,
    }
    text = table(result)
    write_json(out / "fewlabel.json", result)
    write_text(out / "fewlabel.md", text + "\n")
    with drawing("fewlabel.png"):
        _draw(result, out / "fewlabel.png")
    print(f"{text}\n\nwritten: {', '.join(str(out / name) for name in FILES)}")
    return result


def _backbones(given: FewLabelConfig) -> list[FrozenBackbone]:
    """The backbones, and with ``untrained`` each kind once more with fresh weights."""
    trained = [frozen_backbone(replace(given, model=Backbone()).probe(init)) for init in given.init]
    kinds = {}
    for backbone in trained if given.untrained else ():
        size = None if given.finetune else backbone.size  # fine-tuning's sizes are in FILE
        kinds.setdefault(json.dumps([backbone.spec.name, backbone.spec.kwargs, size], default=str), backbone)
    word = "from scratch" if given.finetune else "untrained"
    fresh = [b.untrained(f"{word}, as {b.label}" if len(kinds) > 1 else word) for b in kinds.values()]
    return trained + fresh + ([frozen_backbone(given.probe(None))] if given.model.name else [])


def _numbers(given: list[int] | None, train: Split) -> list[int]:
    """The labels a class, in order: as given, which every class must have, else the usual ones that it has."""
    counts = np.bincount(train.labels, minlength=len(train.classes))
    ordered = np.argsort(counts, kind="stable")
    fewest = max(1, int(counts.min()))
    numbers = sorted(given or {min(number, fewest) for number in USUAL})
    if few := [f"'{train.classes[c]}' ({counts[c]})" for c in ordered if counts[c] < numbers[-1]]:
        wanted = f"wanted up to {counts.min()}"
        raise UserError(f"per_class: {numbers[-1]} is more than the training images of {listed(few)}; {wanted}")
    return numbers


def _check_out(out: Path, asked: dict) -> None:
    """Refuses a folder whose results this call would lose: other images, another protocol, more runs or draws."""
    try:
        before = json.loads((out / "fewlabel.json").read_text())
    except FileNotFoundError:
        return
    other = any(before[name] != asked[name] for name in ("dataset", "root", "protocol"))
    more = {*before["runs"]} - {*asked["runs"]} or {*before["per_class"]} - {*asked["per_class"]}
    if other or more or before["seeds"] > asked["seeds"]:
        raise UserError(f"out: '{out}' has results that this call would not measure again; name another folder")


# ---------------------------------------------------------------------- measuring
def _probed(split: Split, metric: str, backbones: list[FrozenBackbone], draws: list[Subset]) -> Iterator[tuple]:
    """Yields label, draw, count of images, and each readout's scores of features that are taken once a backbone."""
    for backbone in backbones:
        stores = labelled_images(backbone, None, ("train", "test")).parts
        train, test = stores["train"], stores["test"]
        seen, held = backbone.features(train, "train"), backbone.features(test, "test")
        rows = {name: row for row, name in enumerate(train.names)}
        for draw in draws:
            # data.on_error skip leaves files out
            some = [rows[name] for name in draw_subset(split, draw).names if name in rows]
            found = readouts(seen[some], train.labels[some], held, test.labels, seed=draw.seed, metric=metric)
            yield backbone.label, draw, len(some), found


def _tuned(
    given: FewLabelConfig, tuning: FinetuneConfig, backbones: list[FrozenBackbone], draws: list[Subset]
) -> Iterator[tuple]:
    """Yields the same of fine-tunings; a finished one is read, one that was stopped is taken up again."""
    cells = list(itertools.product(backbones, draws))
    for count, (backbone, draw) in enumerate(cells, start=1):
        at = f"{count} of {len(cells)}"
        labels = counted(draw.per_class, "label")
        log.info("fine-tuning %s: %s, %s a class, seed %d", at, backbone.label, labels, draw.seed)
        data, model, spec = replace(given.data, subset=draw), tuning.model, backbone.spec
        if backbone.init is None:  # the same network, seeing the same values
            names = ("mean", "std", "in_chans", "range", "bands")
            data = replace(data, **{name: getattr(spec, name) for name in names})
            model = replace(model, name=spec.name, kwargs=spec.kwargs)
        # where the weights came from, and a few digits of theirs, as runs are made again
        source = os.path.normpath(backbone.label)
        name = "".join(c if c.isalnum() else "-" for c in source).strip("-")[-40:]
        run = Path(given.out, "runs", f"{name}-{backbone.weights[:8]}-{draw.per_class}-{draw.seed}")
        init = backbone.init and backbone.label  # as it was given: a run keeps the commit of public weights itself
        config = replace(tuning, out=str(run), init=init, seed=draw.seed, data=data, model=model)
        result = run_stage(config)
        yield backbone.label, draw, result["train_size"], {"finetune": result}


def _tuning(given: FewLabelConfig) -> FinetuneConfig | None:
    """The config that every fine-tuning starts from; None: features are measured as they are."""
    faults, tuning = [], None
    if given.data.subset is not None:
        faults.append("data.subset: leave it out; per_class and seeds draw the labelled images")
    if several(given.data):
        faults.append("data.folds: this command measures on one test split; name a fold with --data.fold, too")
    if given.finetune is not None:
        frozen, usual = ("seed", "size", "crop_pct", "batch_size", "device"), FeatureConfig()
        named = [name for name in frozen if getattr(given, name) != getattr(usual, name)]
        faults += [f"{name}: is for frozen features; fine-tuning has its own in --finetune FILE" for name in named]
        try:
            tuning = parsing.build(FinetuneConfig, given.finetune)
        except UserError as error:
            faults += [f"finetune: {line.removeprefix('--config: ')}" for line in error.faults]
        else:
            named = [name for name in ("out", "init", "seed", "resume") if name in parsing.changed(tuning)]
            own = [name for name in parsing.changed(tuning.data) if name != "subset"]
            named += [f"data.{name}" for name in own if getattr(tuning.data, name) != getattr(given.data, name)]
            faults += [f"finetune: '{given.finetune}' has {name}, which this command sets" for name in named]
    if faults:
        raise UserError(*faults)
    return tuning


# ---------------------------------------------------------------------- results
def summary(records: list[dict], metric: str) -> list[dict]:
    """Returns mean and standard deviation over draws (None for a single one) of each run, readout and number."""
    groups: dict[tuple, list[float]] = {}
    for record in records:
        groups.setdefault((record["run"], record["readout"], record["per_class"]), []).append(record[metric])
    return [
        {
            **dict(zip(("run", "readout", "per_class"), key, strict=True)),
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
        }
        for key, values in groups.items()
    ]


def table(result: dict) -> str:
    """Returns the summary as Markdown: a row for each readout of each run."""
    cells: dict[tuple, list[str]] = {}
    for row in result["summary"]:
        spread = "" if row["std"] is None else f" ± {row['std']:.1f}"
        cells.setdefault((row["run"], row["readout"]), []).append(f"{row['mean']:.1f}{spread}")
    draws = f"mean ± standard deviation over {result['seeds']} draws" if result["seeds"] > 1 else "one draw"
    where = f"the {result['test_size']:,} test images of {result['dataset']}"
    lines = [
        f"{METRICS[result['metric']]} on {where} in percent, {draws}:",
        "",
        f"| labelled images a class | {' | '.join(map(str, result['per_class']))} |",
        "|---" * (len(result["per_class"]) + 1) + "|",
    ]
    return "\n".join(lines + [f"| {run}, {READOUTS[kind]} | {' | '.join(row)} |" for (run, kind), row in cells.items()])


def _draw(result: dict, path: Path) -> None:
    panels: dict[str, dict[str, list[tuple]]] = {}
    for row in result["summary"]:
        panel = panels.setdefault(READOUTS[row["readout"]], {})
        panel.setdefault(row["run"], []).append((row["per_class"], row["mean"], row["std"] or 0.0))
    pictures.label_curves(
        panels, path, ylabel=f"{METRICS[result['metric']]} on the test images of {result['dataset']} (%)",
        one_class=result["largest_class"], seeds=result["seeds"],
        untaught=[name for name, about in result["runs"].items() if about["init"] is None],
    )  # fmt: skip
