"""``idmm probe``: how good the frozen features of a run are, in minutes instead of a fine-tuning."""

import json
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from timm.models import get_pretrained_cfg_value

from idmm.commands import Frozen, ProbeConfig
from idmm.config import Data, Model
from idmm.data.cache import ImageStore, load_split
from idmm.data.datasets import open_splits
from idmm.data.disk import cache_folder
from idmm.data.registry import spec_of
from idmm.data.split import Splits
from idmm.errors import SizeError, UserError
from idmm.features import Extractor, digest, pick_device
from idmm.files import write_text
from idmm.models.build import pair
from idmm.models.weights import read_checkpoint
from idmm.probing import measure
from idmm.stages.common import Backbone, describe_backbone

log = logging.getLogger("idmm")
UNTRAINED = "untrained"
INTERVAL = "95 %, over the test images: Wilson's for top1, combined over classes for mean_per_class"


def probe(given: ProbeConfig) -> dict:
    """Measures frozen features, prints the table and writes ``probe.json`` to ``given.out``.

    Returns:
        What ``probe.json`` holds: ``knn`` and ``probe``, each with ``top1`` and ``top1_interval`` (percent) and, where
        the dataset's literature reports it, ``mean_per_class`` and its interval; ``knn`` has ``k``, ``probe`` the
        ``strength`` (scikit-learn's C), ``chosen_by`` and held-out ``accuracies``; ``init``, ``model``, ``size``,
        ``crop_pct``, ``dataset``, image counts, ``seed``, ``seconds`` and what ``interval`` means.

    Raises:
        UserError: No such run, no labels, a size that the model cannot take, or ``out`` cannot be written.
        RunError: The features are not finite, or memory ran out.
    """
    out = folder(given.out)
    result = measured(describe(given.init, given), given)
    print("\n".join(table(result)))
    if out is not None:
        write_text(out / "probe.json", json.dumps(result, indent=2) + "\n")
        print(f"written: {out / 'probe.json'}")
    return result


def measured(subject: "Subject", given: Frozen) -> dict:
    """Measures frozen features; returns what ``probe.json`` holds, see :func:`probe`."""
    began = time.monotonic()
    images = Images(given)
    labels = {part: images.store(part, subject.extractor.bound).labels for part in images.parts}
    if len(np.unique(labels["train"])) < 2:
        raise UserError("data.subset: the training images are all of one class; a probe wants two or more")
    taken = {part: subject.features(images, part) for part in images.parts}
    val = (taken["val"], labels["val"]) if "val" in images.parts else None
    metric = spec_of(given.data.name).metric
    found = measure(
        taken["train"], labels["train"], taken["test"], labels["test"], seed=given.seed, val=val, metric=metric
    )
    return {
        **found,
        **subject.about,
        "crop_pct": given.crop_pct,
        "dataset": given.data.name,
        "num_classes": len(images.splits.train.classes),
        **{f"{part}_size": len(labels[part]) for part in images.parts},
        **({"size_mismatch": images.splits.size_mismatch} if images.splits.size_mismatch else {}),
        "seed": given.seed,
        "seconds": round(time.monotonic() - began, 1),
        "interval": INTERVAL,
    }


def table(result: dict) -> list[str]:
    """Returns ``probe.json`` as lines of text."""
    counts = f"{result['train_size']:,} training and {result['test_size']:,} test images"
    where = f"{result['init']} ({result['model']}, {result['size']} px) on {result['dataset']}"
    lines = [f"{where}: {counts}, {result['num_classes']} classes"]
    metrics = [name for name in ("top1", "mean_per_class") if name in result["probe"]]
    lines.append(" " * 16 + "".join(f"{name:<16}{'95 % interval':<16}" for name in metrics))
    remarks = {
        "knn": f"k = {result['knn']['k']}",
        "probe": f"C = {result['probe']['strength']:g}, chosen by {result['probe']['chosen_by']}",
    }
    for name, label in (("knn", "kNN"), ("probe", "linear probe")):
        cells = [(f"{result[name][m]:.1f}", result[name][f"{m}_interval"]) for m in metrics]
        shown = "".join(f"{value:<16}{f'{low:.1f} to {high:.1f}':<16}" for value, (low, high) in cells)
        lines.append(f"  {label:<14}{shown}{remarks[name]}")
    return lines


def folder(out: str | None) -> Path | None:
    """Makes the folder for a command's results, before the work; UserError where it cannot be made."""
    if out is None:
        return None
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out: cannot write to '{out}' ({error.strerror}); wanted a folder") from None
    return Path(out)


# ---------------------------------------------------------------------- images
class Images:
    """The labelled images of a command, each split decoded when it is first asked for.

    Attributes:
        data: The config's section.
        splits: What it means.
        parts: The splits that there are, train first.
    """

    def __init__(self, given: Frozen):
        self.data = given.data
        self.splits = _labelled(given.data)
        self.parts = [part for part in ("train", "val", "test") if getattr(self.splits, part) is not None]
        self._stores: dict[tuple[str, int], ImageStore] = {}

    def store(self, part: str, bound: int) -> ImageStore:
        """The images of a split with short sides up to ``bound`` (pixels)."""
        if (part, bound) not in self._stores:
            split = getattr(self.splits, part)
            self._stores[part, bound] = load_split(split, bound=bound, data=self.data, part=part, progress=True)
        return self._stores[part, bound]


def _labelled(data: Data) -> Splits:
    """Opens a dataset with its labels; where there are none, that is what is said."""
    try:
        return open_splits(data, labelled=True)
    except UserError:
        if not _unlabelled(data):
            raise
    where = f"data.root: '{data.root}'" if data.root else f"data.name: '{data.name}'"
    wanted = f"; wanted {data.root}/train/CLASS/* and {data.root}/test/CLASS/*" if data.name == "folder" else ""
    raise UserError(f"{where} has no labels; kNN and a linear probe need them{wanted}")


def _unlabelled(data: Data) -> bool:
    try:
        return open_splits(replace(data, subset=None), labelled=False).train.labels is None
    except UserError:
        return False


# ---------------------------------------------------------------------- backbones
@dataclass(frozen=True)
class Subject:
    """A backbone to measure.

    Attributes:
        label: For people.
        init: Where it comes from, as the user said; None: from nowhere, its weights are fresh.
        described: What is known of it.
        extractor: Takes its features.
    """

    label: str
    init: str | None
    described: Backbone
    extractor: Extractor

    @property
    def about(self) -> dict:
        """What results say of it."""
        return {"init": self.init, "model": self.described.name, "size": self.extractor.size}

    def features(self, images: Images, part: str) -> np.ndarray:
        """Features of a split, float32 [N, d]."""
        return self.extractor.features(images.store(part, self.extractor.bound), part, images.data.name)


def describe(init: str | None, given: Frozen, model: Model | None = None) -> Subject:
    """Reads a checkpoint and settles at which size it is measured; nothing is built yet.

    Args:
        init: The checkpoint; None: fresh weights, at ``given.size``.
        given: What the command takes.
        model: What it is; needed for fresh weights, and where the checkpoint does not say.

    Raises:
        UserError: No such checkpoint, one whose model is not known, or a size that is not one side.
    """
    described = _described(init, given.data, model or Model(drop_path=0.0))
    return _subject(init or UNTRAINED, init, described, given, given.size or _usual_size(described))


def untrained(subject: Subject, given: Frozen, label: str = UNTRAINED) -> Subject:
    """Returns the same backbone with fresh weights, drawn from ``given.seed`` as a stage draws them."""
    return _subject(label, None, replace(subject.described, init=None), given, subject.extractor.size)


def _described(init: str | None, data: Data, model: Model) -> Backbone:
    try:
        return describe_backbone(SimpleNamespace(init=init, model=model, data=data))
    except UserError:
        if init is None or model.name is not None:
            raise
        saved = read_checkpoint(init, "init")
        if saved.name is not None:
            raise
    beside = Path(saved.source).with_suffix(".json").name  # these commands have no --model.name
    raise UserError(
        f"init: '{saved.source}' does not say which model it is; wanted is {beside} beside it (name, kwargs)"
    )


def _usual_size(described: Backbone) -> int:
    """The size that it was built at; timm's for its name where any size would do, or the JSON does not say."""
    built = described.init.img_size
    if built is None:
        size = (get_pretrained_cfg_value(described.name, "input_size") or (3, 224, 224))[-1]
        log.info("size: %d px, timm's for %s; --size takes another", size, described.name)
        return size
    height, width = pair(built)
    if height != width:
        raise UserError(
            f"size: '{described.init.source}' was built at {height}x{width} pixels; wanted is --size, one side"
        )
    return height


def _subject(label: str, init: str | None, described: Backbone, given: Frozen, size: int) -> Subject:
    data, saved = given.data, described.init
    about = {"name": described.name, "kwargs": described.kwargs} | ({} if saved else {"seed": given.seed})
    extractor = Extractor(
        build=partial(_build, described, size, given.seed),
        weights=digest(about, saved.state if saved else None),
        source=label,
        size=size,
        crop_pct=given.crop_pct,
        mean=described.mean,
        std=described.std,
        batch_size=given.batch_size,
        workers=data.workers,
        device=pick_device(given.device),
        folder=cache_folder(data.cache_dir) if data.cache in ("auto", "disk") else None,
    )
    return Subject(label, init, described, extractor)


def _build(described: Backbone, size: int, seed: int):
    try:
        model = described.build(size, seed)
    except SizeError as error:
        raise UserError(f"size: {error}") from None
    if described.init is not None:
        log.info("%s", described.init.load_into(model))
    return model.eval()
