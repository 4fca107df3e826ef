"""``idmm fewlabel``: accuracy as a function of the labelled images a class, of frozen features or of fine-tuning."""

import csv
import io
import json
import logging
import os
import statistics
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from idmm import options
from idmm.analysis.probe import Images, Subject, describe, folder, untrained
from idmm.commands import FewLabelConfig, Frozen
from idmm.config import Data, FinetuneConfig, Subset
from idmm.data.datasets import draw_subset
from idmm.data.registry import spec_of
from idmm.errors import UserError, listed
from idmm.files import write_text
from idmm.probing import measure

log = logging.getLogger("idmm")
READOUTS = {"knn": "kNN", "probe": "linear probe", "finetune": "fine-tuned"}
METRICS = {"top1": "top-1", "mean_per_class": "mean over classes"}
FILES = ("fewlabel.json", "fewlabel.csv", "fewlabel.md", "fewlabel.png")


def fewlabel(given: FewLabelConfig) -> dict:
    """Measures every backbone at every number of labels and every draw; writes the table, the curves and all figures.

    The draws are those of ``data.subset: {per_class: K, seed: S}``, the same images for every backbone and protocol,
    and a smaller one is part of a larger one. The probe's strength is chosen on the K images alone, never on a val
    split: that would be many more labels.

    Returns:
        What ``fewlabel.json`` holds: ``records``, one a backbone, readout, number and draw, with ``top1`` (percent;
        ``mean_per_class`` too where the literature reports it); ``summary``, ``mean`` and ``std`` of the ``metric``
        over draws; ``runs``: what was measured under which name; and the dataset's figures.

    Raises:
        UserError: A mistake in the flags or in ``given.finetune``, no labels, or a class with fewer images than asked.
        RunError: A fine-tuning could not go on; the same command takes it up again.
    """
    tuning = _tuning(given)
    out = folder(given.out)
    subjects = _subjects(given)
    images = Images(given)
    numbers = sorted(given.per_class)
    _enough(images, numbers)
    _not_another(given, out / "fewlabel.json", subjects)
    records = list(_probed(given, subjects, images) if tuning is None else _tuned(given, subjects, tuning, out))
    metric = spec_of(given.data.name).metric
    result = {
        "dataset": given.data.name,
        "root": _place(given.data.root),
        "protocol": given.protocol,
        "metric": metric,
        "per_class": numbers,
        "seeds": given.seeds,
        "num_classes": len(images.splits.train.classes),
        "test_size": len(images.splits.test),
        **({"size_mismatch": images.splits.size_mismatch} if images.splits.size_mismatch else {}),
        "runs": {subject.label: subject.about if tuning is None else _origin(subject) for subject in subjects},
        "summary": summary(records, metric),
        "records": records,
    }
    text = table(result)
    write_text(out / "fewlabel.json", json.dumps(result, indent=2) + "\n")
    write_text(out / "fewlabel.csv", _csv(records))
    write_text(out / "fewlabel.md", text + "\n")
    _draw(result, out / "fewlabel.png")
    print(f"{text}\n\nwritten: {', '.join(str(out / name) for name in FILES)}")
    return result


def _subjects(given: FewLabelConfig) -> list[Subject]:
    """The backbones, and with ``untrained`` each kind once more with fresh weights."""
    trained = [describe(init, given) for init in given.init]
    if not given.untrained:
        return trained
    kinds = {}
    for subject in trained:
        size = subject.extractor.size if given.protocol == "probe" else None  # fine-tuning's sizes are in FILE
        kinds.setdefault(json.dumps([subject.described.name, subject.described.kwargs, size], default=str), subject)
    word = "untrained" if given.protocol == "probe" else "from scratch"
    labels = [f"{word}, as {subject.label}" if len(kinds) > 1 else word for subject in kinds.values()]
    return trained + [untrained(s, given, label) for s, label in zip(kinds.values(), labels, strict=True)]


def _enough(images: Images, numbers: list[int]) -> None:
    """Refuses numbers that some class cannot give, as ``data.subset`` does: the curve would not be of what it says."""
    train = images.splits.train
    counts = np.bincount(train.labels, minlength=len(train.classes))
    if numbers[-1] > counts.min():
        few = [
            f"'{train.classes[c]}' ({counts[c]})" for c in np.argsort(counts, kind="stable") if counts[c] < numbers[-1]
        ]
        raise UserError(
            f"per_class: {numbers[-1]} is more than the training images of {listed(few)}; wanted up to {counts.min()}"
        )


def _not_another(given: FewLabelConfig, path: Path, subjects: list[Subject]) -> None:
    """Refuses a folder whose results this call would lose: of another dataset or protocol, or with more in them."""
    try:
        before = json.loads(path.read_text())
        names = ("dataset", "root", "protocol", "seeds", "per_class")
        old, inits = {name: before[name] for name in names}, {about["init"] for about in before["runs"].values()}
    except (OSError, ValueError, KeyError):
        return
    asked = {"dataset": given.data.name, "root": _place(given.data.root), "protocol": given.protocol}
    lost = [f"{name} {old[name]}, not {now}" for name, now in asked.items() if old[name] != now]
    kept = {subject.init and _place(subject.init) for subject in subjects}
    more = {"per_class": [n for n in old["per_class"] if n not in given.per_class]}
    more["runs"] = [init or "untrained" for init in inits if (init and _place(init)) not in kept]
    lost += [f"{name} {listed(map(str, left))} as well" for name, left in more.items() if left]
    lost += [f"{old['seeds']} seeds, not {given.seeds}"] if old["seeds"] > given.seeds else []
    if lost:
        raise UserError(f"out: '{path.parent}' holds a comparison of {', '.join(lost)}; name another folder")


def _place(path: str | None) -> str | None:
    return None if path is None else os.path.realpath(os.path.expanduser(path))


# ---------------------------------------------------------------------- frozen features
def _probed(given: FewLabelConfig, subjects: list[Subject], images: Images) -> Iterator[dict]:
    """Yields the records of both readouts."""
    metric, train = spec_of(given.data.name).metric, images.splits.train
    for subject in subjects:
        bound = subject.extractor.bound
        stores = {part: images.store(part, bound) for part in ("train", "test")}
        features = {part: subject.features(images, part) for part in stores}
        rows = {name: row for row, name in enumerate(stores["train"].names)}
        for number in sorted(given.per_class):
            log.info("%s: %d labels a class", subject.label, number)
            for seed in range(given.seeds):
                drawn = draw_subset(train, Subset(per_class=number, seed=seed))
                some = [rows[name] for name in drawn.names if name in rows]  # data.on_error skip leaves files out
                found = measure(
                    features["train"][some], stores["train"].labels[some], features["test"], stores["test"].labels,
                    seed=seed, metric=metric,
                )  # fmt: skip
                for readout, scores in found.items():
                    kept = {k: scores[k] for k in ("top1", "mean_per_class", "strength") if k in scores}
                    yield _record(subject, readout, number, seed, len(some), kept)


def _record(subject: Subject, readout: str, number: int, seed: int, count: int, scores: dict) -> dict:
    place = {"run": subject.label, "readout": readout, "per_class": number, "seed": seed, "images": count}
    return {**place, **scores}


# ---------------------------------------------------------------------- fine-tuning
def _tuning(given: FewLabelConfig) -> FinetuneConfig | None:
    """The config that every fine-tuning starts from; None for the protocol probe."""
    faults = []
    if given.data.subset is not None:
        faults.append("data.subset: leave it out; per_class and seeds draw the labelled images")
    if given.protocol == "probe":
        if given.finetune is not None:
            faults.append(
                f"finetune: '{given.finetune}' is for --protocol finetune; leave it out, or name the protocol"
            )
        if faults:
            raise UserError(*faults)
        return None
    frozen = [name for name in ("seed", "size", "crop_pct", "batch_size", "device") if _differs(given, Frozen(), name)]
    faults += [f"{name}: is for --protocol probe; fine-tuning has its own in --finetune FILE" for name in frozen]
    if given.finetune is None:
        raise UserError(*faults, "finetune: missing; --protocol finetune wants a YAML file of fine-tuning's keys")
    try:
        tuning = options.build(FinetuneConfig, Path(given.finetune))
    except UserError as error:
        raise UserError(*faults, *(f"finetune: {line.removeprefix('--config: ')}" for line in error.faults)) from None
    usual = FinetuneConfig()
    named = [name for name in ("out", "init", "seed", "resume") if _differs(tuning, usual, name)]
    faults += [f"finetune: '{given.finetune}' has {name}, which this command names; leave it out" for name in named]
    faults += [
        f"finetune: '{given.finetune}' has data.{item.name}; give --data.{item.name} to this command instead"
        for item in fields(Data)
        if item.name != "subset" and _differs(tuning.data, usual.data, item.name)
        and _differs(tuning.data, given.data, item.name)
    ]  # fmt: skip
    if faults:
        raise UserError(*faults)
    return tuning


def _differs(one, other, name: str) -> bool:
    return getattr(one, name) != getattr(other, name)


def _origin(subject: Subject) -> dict:
    return {"init": subject.init, "model": subject.described.name}


def _tuned(given: FewLabelConfig, subjects: list[Subject], tuning: FinetuneConfig, out: Path) -> Iterator[dict]:
    """Yields a record for each fine-tuning; finished ones are read, one that was stopped is taken up again."""
    from idmm.stages.finetune import finetune

    cells = [(s, k, seed) for s in subjects for k in sorted(given.per_class) for seed in range(given.seeds)]
    for count, (subject, number, seed) in enumerate(cells, start=1):
        known = subject.described
        log.info("fine-tuning %d of %d: %s, %d labels a class, seed %d", count, len(cells), subject.label, number, seed)
        data = replace(given.data, subset=Subset(per_class=number, seed=seed))
        model = tuning.model
        if subject.init is None:  # the same network, seeing the same values
            data = replace(data, mean=known.mean, std=known.std, in_chans=known.in_chans)
            model = replace(model, name=known.name, kwargs=known.kwargs)
        place = out / "runs" / f"{_slug(subject)}-{number}-{seed}"
        config = replace(tuning, out=str(place), init=subject.init, seed=seed, data=data, model=model)
        result = finetune(config)
        scores = {name: result[name] for name in ("top1", "mean_per_class") if name in result}
        yield _record(subject, "finetune", number, seed, result["train_size"], scores)


def _slug(subject: Subject) -> str:
    """A folder's name: where the weights came from, and a few digits of theirs, as runs are made again."""
    source = subject.label if subject.init is None else os.path.normpath(subject.init)
    name = "".join(c if c.isalnum() else "-" for c in source).strip("-")[-40:]
    return f"{name}-{subject.extractor.weights[:8]}"


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


def _csv(records: list[dict]) -> str:
    columns = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


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
        chance=100 / result["num_classes"], seeds=result["seeds"], untaught=untaught,
    )  # fmt: skip
