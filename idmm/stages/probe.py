"""A backbone measured as it is, in minutes: kNN and a linear probe of its frozen features."""

import logging
import time
from dataclasses import replace

import numpy as np
from timm.models import get_pretrained_cfg_value

from idmm.config import parsing
from idmm.config.commands import ProbeConfig
from idmm.data.registry import resolve_name, spec_of
from idmm.errors import UserError
from idmm.evaluation.evaluate import largest_class, readouts, remarks
from idmm.evaluation.features import FrozenBackbone
from idmm.intervals import too_narrow
from idmm.models.build import pair
from idmm.models.hub import pinned
from idmm.models.spec import ModelSpec, model_spec
from idmm.progress import logging_to
from idmm.stages import prepare
from idmm.stages.assemble import LoadedSplits, assemble, load_splits
from idmm.stages.folds import by_folds
from idmm.training.checkpoint import RunFolder

log = logging.getLogger("idmm")
INTERVAL = "95 %, over the test images: Wilson's for top1, combined over classes for mean_per_class"


@by_folds
def probe(config: ProbeConfig | dict | str) -> dict:
    """Measures a frozen backbone and writes ``result.json`` to ``config.out``, a folder like any other run's.

    Args:
        config: A ProbeConfig, a mapping of its keys ('idmm probe --help'), or the name of a YAML file or recipe.

    Returns:
        What ``result.json`` holds; ``top1`` (the linear probe's) and ``knn`` in percent, ``top5`` None,
        ``mean_per_class`` (the probe's) where the dataset's literature reports that, ``largest_class``, image counts,
        ``seed``, ``seconds``, and both ``readouts`` with intervals.

    Raises:
        UserError: No such run, no labels, or a size that the model cannot take.
        RunError: The features are not finite, or memory ran out.
    """
    config, _ = prepare(parsing.build(ProbeConfig, config))
    config = replace(config, init=pinned(config.init))
    with RunFolder(config.out, config, "auto") as folder:
        if folder.finished:
            log.info("%s: finished already, nothing to do", config.out)
            return folder.result()
        with logging_to(folder.path):
            found = measure(config, folder)
        linear, knn = found.pop("probe"), found.pop("knn")
        result = {
            "top1": linear["top1"],
            "top5": None,
            "knn": knn["top1"],
            **{name: linear[name] for name in ("mean_per_class", "per_class") if name in linear},
            **found,
            "readouts": {"probe": linear, "knn": knn},
        }
        folder.finish(result)
        return result


def measure(config: ProbeConfig, folder: RunFolder | None = None) -> dict:
    """Measures frozen features.

    Returns:
        What ``probe.json`` holds: ``knn`` and ``probe``, each with ``top1`` and ``top1_interval`` (percent) and, where
        the dataset's literature reports it, ``mean_per_class`` and its interval; ``knn`` has ``k``, ``probe`` the
        ``strength`` (scikit-learn's C), ``chosen_by`` and held-out ``accuracies``; ``largest_class`` (percent: what
        naming the largest class every time would score); ``init``, ``model``, ``size``, ``precision``, ``crop_pct``,
        ``dataset``, image counts, ``seed``, ``seconds`` and what ``interval`` means.
    """
    began, (data, notes) = time.monotonic(), resolve_name(config.data)
    config = replace(config, data=data)
    backbone = frozen_backbone(config)
    for note in notes:
        log.info("%s", note)
    built = backbone.spec.init and backbone.spec.init.img_size
    if built is None or pair(built)[0] != backbone.size:  # what may not fit is tried before the images are read
        backbone.build()
    splits = labelled_images(backbone, folder)
    if len(np.unique(splits.train.labels)) < 2:
        raise UserError("data.subset: the training images are all of one class; a probe wants two or more")
    taken = {part: (backbone.features(store, part), store.labels) for part, store in splits.parts.items()}
    metric, truth = spec_of(config.data.name).metric, splits.test.labels
    given = dict(seed=config.seed, val=taken.get("val"), metric=metric, fold=config.data.fold is not None)
    found = readouts(*taken["train"], *taken["test"], **given)
    for line in remarks(found["probe"], truth, splits.train.classes):
        log.warning("linear probe: %s", line)
    if splits.test.groups is not None:
        log.warning("%s", too_narrow(len(truth), len(set(splits.test.groups))))
    return {
        **found,
        "largest_class": largest_class(truth)[1],
        **backbone.about,
        "precision": "fp32",
        "crop_pct": config.crop_pct,
        "dataset": config.data.name,
        "num_classes": len(splits.train.classes),
        **{f"{part}_size": len(store) for part, store in splits.parts.items()},
        **splits.remarks,
        "seed": config.seed,
        "seconds": round(time.monotonic() - began, 1),
        "interval": INTERVAL,
    }


# ---------------------------------------------------------------------- images
def labelled_images(backbone: FrozenBackbone, *args) -> LoadedSplits:
    """Reads the images of a probe, centre-cropped to the backbone's size; ``args`` as for :func:`load_splits`."""
    parts = assemble(replace(backbone.config, size=backbone.size))
    parts.spec = backbone.spec  # the checkpoint is read once
    splits = load_splits(parts, *args)
    backbone.know(parts.spec)
    return splits


# ---------------------------------------------------------------------- backbones
def frozen_backbone(config: ProbeConfig) -> FrozenBackbone:
    """Reads a checkpoint, if there is one, and decides at which size it is measured; nothing is built yet.

    Raises:
        UserError: No such checkpoint or model, one whose model is not known, or a size that is not one side.
    """
    spec = model_spec(replace(config, model=replace(config.model, drop_path=0.0)))
    size, named = config.size or _usual_size(spec), replace(config, init=pinned(config.init))
    return FrozenBackbone(spec, size, named, label=config.init)


def _usual_size(spec: ModelSpec) -> int:
    """The size that it was built at; timm's for its name where any size would do, or the JSON does not say."""
    built = spec.init and (spec.init.img_size or spec.init.size)
    if built is None:
        size = (get_pretrained_cfg_value(spec.name, "input_size") or (3, 224, 224))[-1]
        log.info("size: %d px, timm's for %s; --size takes another", size, spec.name)
        return size
    height, width = pair(built)
    if height != width:
        raise UserError(f"size: '{spec.init.source}' was built at {height}x{width} pixels; wanted is --size, one side")
    return height
