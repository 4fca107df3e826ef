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
from idmm.config.commands import FeatureConfig, FewLabelConfig, probe_config
from idmm.data.cache import ImageStore
from idmm.data.datasets import draw_subset, open_splits
from idmm.data.registry import resolve_name, spec_of
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed
from idmm.evaluate import largest_class, of_few, readouts
from idmm.features import FrozenBackbone
from idmm.files import made_folder, write_csv, write_json, write_text
from idmm.progress import log
from idmm.stages import STAGES
from idmm.stages.folds import place, several
from idmm.stages.probe import frozen_backbone, labelled_images, labels_needed

READOUTS = {"knn": "kNN", "probe": "linear probe", "finetune": "fine-tuned"}
METRICS = {"top1": "top-1", "mean_per_class": "mean over classes"}
USUAL = (1, 2, 5, 10, 20)
FILES = ("fewlabel.json", "fewlabel.csv", "fewlabel.md", "fewlabel.png")


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
    with labels_needed(given.data):
        splits = open_splits(given.data, labelled=True)
    numbers = _numbers(given.per_class, splits.train)
    _not_another(given, numbers, backbones)
    out = made_folder(given.out)
    runs = {backbone.label: _about(given, backbone) for backbone in backbones}
    metric = spec_of(given.data.name).metric
    draws = [Subset(per_class=number, seed=seed) for number in numbers for seed in range(given.seeds)]
    measured = _tuned(given, tuning, backbones, draws) if tuning else _probed(splits.train, metric, backbones, draws)
    records = [
        {"run": label, "readout": readout, "per_class": draw.per_class, "seed": draw.seed, "images": images}
        | {name: scores[name] for name in ("top1", "mean_per_class", "strength") if name in scores}
        for label, draw, images, found in measured
        for readout, scores in found.items()
    ]
    result = {
        "dataset": given.data.name,
        "root": place(given.data.root),
        "protocol": given.protocol,
        "metric": metric,
        "per_class": numbers,
        "seeds": given.seeds,
        "num_classes": len(splits.train.classes),
        "test_size": len(splits.test),
        "largest_class": largest_class(splits.test.labels)[1],
        **splits.remarks,
        "runs": runs,
        "summary": summary(records, metric),
        "records": records,
    }
    text = table(result)
    for line in of_few(max(record["top1"] for record in records), len(splits.test)):
        log.warning("%s", line)
    write_json(out / "fewlabel.json", result)
    columns = list(dict.fromkeys(name for record in records for name in record))
    write_csv(out / "fewlabel.csv", [columns, *([record.get(name) for name in columns] for record in records)])
    write_text(out / "fewlabel.md", text + "\n")
    _draw(result, out / "fewlabel.png")
    print(f"{text}\n\nwritten: {', '.join(str(out / name) for name in FILES)}")
    return result


def _backbones(given: FewLabelConfig) -> list[FrozenBackbone]:
    """The backbones, and with ``untrained`` each kind once more with fresh weights."""
    trained = [frozen_backbone(probe_config(given, init)) for init in given.init]
    if not given.untrained:
        return trained
    kinds = {}
    for backbone in trained:
        size = backbone.size if given.protocol == "probe" else None  # fine-tuning's sizes are in FILE
        kinds.setdefault(json.dumps([backbone.spec.name, backbone.spec.kwargs, size], default=str), backbone)
    word = "untrained" if given.protocol == "probe" else "from scratch"
    labels = [f"{word}, as {backbone.label}" if len(kinds) > 1 else word for backbone in kinds.values()]
    return trained + [b.untrained(label) for b, label in zip(kinds.values(), labels, strict=True)]


def _about(given: FewLabelConfig, backbone: FrozenBackbone) -> dict:
    """What results say of a backbone."""
    about = dict(backbone.about)
    if given.protocol == "finetune":  # its sizes are in FILE
        about.pop("size")
    return about


def _numbers(given: list[int] | None, train: Split) -> list[int]:
    """The labels a class, in order: as given, which every class must have, else the usual ones that it has."""
    counts = np.bincount(train.labels, minlength=len(train.classes))
    ordered = np.argsort(counts, kind="stable")
    fewest = max(1, int(counts.min()))
    numbers = sorted(given or {min(number, fewest) for number in USUAL})
    if few := [f"'{train.classes[c]}' ({counts[c]})" for c in ordered if counts[c] < numbers[-1]]:
        wanted = f"wanted up to {counts.min()}"
        raise UserError(f"per_class: {numbers[-1]} is more than the training images of {listed(few)}; {wanted}")
    if given is None and fewest < USUAL[-1]:
        shown, smallest = ", ".join(map(str, numbers)), train.classes[ordered[0]]
        log.info("per_class: %s, as '%s' has %s", shown, smallest, counted(fewest, "training image"))
    return numbers


def _not_another(given: FewLabelConfig, numbers: list[int], backbones: list[FrozenBackbone]) -> None:
    """Refuses a folder whose results this call would lose: of another dataset or protocol, or with more in them."""
    try:
        before = json.loads(Path(given.out, "fewlabel.json").read_text())
        names = ("dataset", "root", "protocol", "seeds", "per_class")
        old, inits = {name: before[name] for name in names}, {about["init"] for about in before["runs"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    asked = {"dataset": given.data.name, "root": place(given.data.root), "protocol": given.protocol}
    lost = [f"{name} {old[name]}, not {now}" for name, now in asked.items() if old[name] != now]
    kept = {backbone.init and place(backbone.init) for backbone in backbones}
    more = {"per_class": [n for n in old["per_class"] if n not in numbers]}
    more["runs"] = [init or "untrained" for init in inits if (init and place(init)) not in kept]
    lost += [f"{name} {listed(map(str, left))} as well" for name, left in more.items() if left]
    lost += [f"{old['seeds']} seeds, not {given.seeds}"] if old["seeds"] > given.seeds else []
    if lost:
        raise UserError(f"out: '{Path(given.out)}' holds a comparison of {', '.join(lost)}; name another folder")


# ---------------------------------------------------------------------- measuring
def _probed(split: Split, metric: str, backbones: list[FrozenBackbone], draws: list[Subset]) -> Iterator[tuple]:
    """Yields label, draw, count of images, and each readout's scores of features that are taken once a backbone."""
    loaded: dict[tuple, dict[str, ImageStore]] = {}
    for backbone in backbones:
        spec = backbone.spec
        look = (backbone.size, str(spec.range), spec.in_chans, str(spec.bands))
        if look not in loaded or spec.mean is None or spec.std is None:
            loaded[look] = labelled_images(backbone, None, ("train", "test")).stores
        train, test = (loaded[look][part] for part in ("train", "test"))
        seen, held = backbone.features(train, "train"), backbone.features(test, "test")
        rows = {name: row for row, name in enumerate(train.names)}
        for draw in draws:
            if draw.seed == 0:
                log.info("%s: %s a class", backbone.label, counted(draw.per_class, "label"))
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
        result = STAGES["finetune"].run(config)
        yield backbone.label, draw, result["train_size"], {"finetune": result}


def _tuning(given: FewLabelConfig) -> FinetuneConfig | None:
    """The config that every fine-tuning starts from; None for the protocol probe."""
    faults = []
    if given.data.subset is not None:
        faults.append("data.subset: leave it out; per_class and seeds draw the labelled images")
    if several(given.data):
        faults.append("data.folds: this command measures on one test split; name a fold with --data.fold, too")
    if given.protocol == "probe":
        if given.finetune is not None:
            wanted = "is for --protocol finetune; leave it out, or name the protocol"
            faults.append(f"finetune: '{given.finetune}' {wanted}")
        if faults:
            raise UserError(*faults)
        return None
    frozen, usual = ("seed", "size", "crop_pct", "batch_size", "device"), FeatureConfig()
    named = [name for name in frozen if getattr(given, name) != getattr(usual, name)]
    faults += [f"{name}: is for --protocol probe; fine-tuning has its own in --finetune FILE" for name in named]
    if given.finetune is None:
        raise UserError(*faults, "finetune: missing; --protocol finetune wants a YAML file of fine-tuning's keys")
    try:
        tuning = STAGES["finetune"].build(given.finetune)
    except UserError as error:
        raise UserError(*faults, *(f"finetune: {line.removeprefix('--config: ')}" for line in error.faults)) from None
    named = [name for name in ("out", "init", "seed", "resume") if name in parsing.changed(tuning)]
    faults += [f"finetune: '{given.finetune}' has {name}, which this command names; leave it out" for name in named]
    faults += [
        f"finetune: '{given.finetune}' has data.{name}; give --data.{name} to this command instead"
        for name in parsing.changed(tuning.data)
        if name != "subset" and getattr(tuning.data, name) != getattr(given.data, name)
    ]
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
    cells = {(row["run"], row["readout"], row["per_class"]): row for row in result["summary"]}
    numbers = result["per_class"]
    draws = f"mean ± standard deviation over {result['seeds']} draws" if result["seeds"] > 1 else "one draw"
    where = f"the {result['test_size']:,} test images of {result['dataset']}"
    lines = [
        f"{METRICS[result['metric']]} on {where} in percent, {draws}:",
        "",
        f"| labelled images a class | {' | '.join(map(str, numbers))} |",
        "|---" * (len(numbers) + 1) + "|",
    ]
    for run, readout in dict.fromkeys(key[:2] for key in cells):
        shown = [_cell(cells[run, readout, number]) for number in numbers]
        lines.append(f"| {run}, {READOUTS[readout]} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _cell(row: dict) -> str:
    return f"{row['mean']:.1f}" + ("" if row["std"] is None else f" ± {row['std']:.1f}")


def _draw(result: dict, path: Path) -> None:
    from idmm.report import pictures

    panels: dict[str, dict[str, list[tuple]]] = {}
    for row in result["summary"]:
        panel = panels.setdefault(READOUTS[row["readout"]], {})
        panel.setdefault(row["run"], []).append((row["per_class"], row["mean"], row["std"] or 0.0))
    metric = METRICS[result["metric"]]
    untaught = [name for name, about in result["runs"].items() if about["init"] is None]
    pictures.label_curves(
        panels, path, ylabel=f"{metric} on the test images of {result['dataset']} (%)",
        one_class=result["largest_class"], seeds=result["seeds"], untaught=untaught,
    )  # fmt: skip
