"""A backbone measured as it is, in minutes: kNN and a linear probe of its frozen features."""

import logging
import time
from dataclasses import replace

import numpy as np
from timm.models import get_pretrained_cfg_value

from idmm.config import parsing
from idmm.config.commands import ProbeConfig
from idmm.data.registry import spec_of
from idmm.data.store import Stores
from idmm.errors import UserError
from idmm.evaluation.evaluate import largest_class, readouts, remarks
from idmm.evaluation.features import FrozenBackbone
from idmm.intervals import too_narrow
from idmm.models.build import pair
from idmm.models.hub import pin_commit
from idmm.models.spec import ModelSpec, model_spec
from idmm.progress import logging_to
from idmm.stages import ProbeStage
from idmm.stages.folds import run_folds
from idmm.stages.images import store_run_images
from idmm.stages.resolve import RunSetup, resolve
from idmm.training.run_folder import RunFolder

log = logging.getLogger("idmm")
INTERVAL = "95 %, over the test images: Wilson's"


def probe(config: ProbeConfig | RunSetup | dict | str) -> dict:
    """Measure a frozen backbone and write ``result.json`` to ``config.out``, a folder like any other run's.

    Args:
        config: A ProbeConfig, a mapping of its keys ('idmm probe --help'), or the name of a YAML file or recipe. A grid
            passes the setup that it resolved.

    Returns:
        The content of ``result.json``: ``top1`` (the linear probe's) and ``knn`` in percent, ``top5`` None,
        ``mean_per_class`` (the probe's) if the dataset's literature reports it, ``largest_class``, image counts,
        ``seed``, ``seconds``, and both ``readouts`` with intervals.

    Raises:
        UserError: No such run, no labels, or a size that the model cannot take.
        RunError: The features are not finite, or memory ran out.
    """
    setup = config if isinstance(config, RunSetup) else resolve(parsing.build(ProbeConfig, config))
    return run_folds(setup, _run) if setup.is_cross_validation else _run(setup)


def _run(setup: RunSetup) -> dict:
    config = setup.config
    with RunFolder(config.out, config, "auto") as folder:
        if folder.finished:
            log.info("%s: finished already, nothing to do", config.out)
            return folder.result()
        with logging_to(folder.path):
            for note in setup.notes:
                log.info("%s", note)
            result = measure(frozen_backbone(config, setup.spec), folder)
        folder.finish(result)
        return result


def measure(backbone: FrozenBackbone, folder: RunFolder) -> dict:
    """Measure frozen features by kNN and a linear probe; return the result. Errors are those of :func:`probe`.

    Args:
        backbone: With the config of the probe, see :func:`frozen_backbone`.
        folder: Of the run.
    """
    started, config = time.monotonic(), backbone.config
    built = backbone.spec.init and backbone.spec.init.img_size
    if built is None or pair(built)[0] != backbone.size:  # the size may not fit: try before the images are read
        backbone.build()
    splits = labelled_images(backbone, folder)
    if len(np.unique(splits.train.labels)) < 2:
        raise UserError("data.subset: the training images are all of one class. A probe needs two or more")
    features = {part: (backbone.features(store, part), store.labels) for part, store in splits.parts.items()}
    truth = splits.test.labels
    measured = readouts(
        *features["train"],
        *features["test"],
        seed=config.seed,
        val=features.get("val"),
        metric=spec_of(config.data.name).metric,
        fold=config.data.fold is not None,
    )
    for line in remarks(measured.probe.to_dict(), truth, splits.train.classes):
        log.warning("linear probe: %s", line)
    if splits.test.groups is not None:
        log.warning("%s", too_narrow(len(truth), len(set(splits.test.groups))))
    knn, linear = (readout.to_dict() for readout in measured)
    return {
        "top1": linear["top1"],
        "top5": None,
        "knn": knn["top1"],
        **{name: linear[name] for name in ("mean_per_class", "per_class") if name in linear},
        "largest_class": largest_class(truth)[1],
        **backbone.about,
        "precision": "fp32",
        "crop_pct": config.crop_pct,
        "dataset": config.data.name,
        "num_classes": len(splits.train.classes),
        **{f"{part}_size": len(store) for part, store in splits.parts.items()},
        **splits.remarks,
        "seed": config.seed,
        "seconds": round(time.monotonic() - started, 1),
        "interval": INTERVAL,
        "readouts": {"probe": linear, "knn": knn},
    }


# ---------------------------------------------------------------------- images
def labelled_images(backbone: FrozenBackbone, *args) -> Stores:
    """Read a probe's images, centre-cropped to the backbone's size. ``args`` are those of :func:`store_run_images`."""
    stage = ProbeStage(replace(backbone.config, size=backbone.size))
    setup = RunSetup(stage, backbone.spec, tuple(stage.phases))
    images = store_run_images(setup, stage.list_images(), *args)
    backbone.set_statistics(replace(backbone.spec, mean=images.mean, std=images.std))
    return images


# ---------------------------------------------------------------------- backbones
def frozen_backbone(config: ProbeConfig, spec: ModelSpec | None = None) -> FrozenBackbone:
    """Read a checkpoint, if there is one, and choose the size to measure it at. Nothing is built yet.

    Args:
        config: Of the probe.
        spec: Of the backbone, if it is known already.

    Raises:
        UserError: No such checkpoint or model, one whose model is not known, or a size that is not one side.
    """
    spec = spec or model_spec(replace(config, model=replace(config.model, drop_path=0.0)))
    pinned_config = replace(config, init=pin_commit(config.init))
    return FrozenBackbone(spec, config.size or _default_size(spec), pinned_config, label=config.init)


def _default_size(spec: ModelSpec) -> int:
    """Return the size that it was built at, or timm's size for its name if any size fits or the JSON has none."""
    built = spec.init and (spec.init.img_size or spec.init.size)
    if built is None:
        size = (get_pretrained_cfg_value(spec.name, "input_size") or (3, 224, 224))[-1]
        log.info("size: %d px, timm's for %s. --size sets another", size, spec.name)
        return size
    height, width = pair(built)
    if height != width:
        raise UserError(f"size: '{spec.init.source}' was built at {height}x{width} pixels. Give --size, one side")
    return height
