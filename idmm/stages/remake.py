"""What older runs did not write for :mod:`idmm.stages.artifacts`, made from their weights and images."""

import functools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from idmm import distributed, evaluate
from idmm.calibrate import DTYPES
from idmm.config import PretrainConfig
from idmm.config.commands import ProbeConfig
from idmm.data.cache import ImageStore, compare, fingerprint, load_split
from idmm.data.datasets import read_splits
from idmm.data.depth import tidy
from idmm.data.images import CentreCrop
from idmm.data.loaders import centre_crops
from idmm.data.split import together
from idmm.errors import RunError, UserError
from idmm.features import extract_features
from idmm.methods import method_class
from idmm.progress import counting
from idmm.stages import Phase
from idmm.stages.assemble import Assembly, assemble
from idmm.stages.formats import Features, Instances, Predicted, about_rows, shown

BATCH = 64  # images at a time


def predictions(run: Path, config: Any, classes: list[str], device: str) -> Predicted:
    """Evaluates a run's exported classifier on its test images, see :func:`idmm.stages.artifacts.predictions`."""
    parts, device = _exported(run, config), distributed.pick_device(device)
    store = _read(run, parts, "test", parts.phases[-1])
    model = _model(parts, len(classes)).to(device)
    batches = _batches(parts, parts.phases[-1], store, "predictions of test")
    found = evaluate.predict(model, batches, device, _autocast(run, device))
    return Predicted(store.names, classes, found.truth, found.predicted, found.probability.astype(np.float64))


def features(run: Path, config: Any, classes: list[str], device: str) -> Features:
    """Takes features before and after a run, see :func:`idmm.stages.artifacts.features`."""
    after, before, device = _exported(run, config), assemble(config), distributed.pick_device(device)
    first, last = before.phases[0], after.phases[-1]
    start = before.backbone(first, len(classes))
    before.spec.load(start, config.model.strict)
    rows, stores = [], {phase.size: _read(run, after, "test", phase) for phase in (first, last)}
    for parts, phase, model in ((before, first, start), (after, last, _model(after, len(classes)))):
        numbers = shown(stores[phase.size].labels)
        batches = _batches(parts, phase, stores[phase.size], "features of test", numbers)
        rows.append(extract_features(model.to(device), batches, device, _autocast(run, device)).numpy())
    if not all(np.isfinite(found).all() for found in rows):
        raise RunError(f"{run}: its features are not finite")
    store = stores[last.size]
    return Features([store.names[i] for i in numbers], store.labels[numbers], classes, *rows)


def instances(run: Path, config: PretrainConfig) -> Instances:
    """Takes the rows of W from a run's checkpoint, see :func:`idmm.stages.artifacts.instances`."""
    name = method_class(config.method.name).instance_rows
    if name is None:
        raise UserError(f"{config.method.name} learns no row for each training image; wanted a run of idmm")
    path = run / "last" / "state.pt"
    if not path.exists():
        raise UserError(f"the run is older than this file, and '{path}', which holds the rows too, is gone")
    try:
        weight = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["method"][name]
    except Exception as error:  # torch raises many kinds
        raise UserError(f"'{path}' cannot be read ({type(error).__name__})") from None
    store = images(run, config, "train")
    if len(store) != len(weight):
        raise UserError(f"{len(store)} training images, but '{path}' has rows for {len(weight)}")
    return Instances(weight.float().numpy(), **about_rows(config.method.classifier, store))


def images(run: Path, config: Any, part: str) -> ImageStore:
    """Reads a split of a run as it was read then, see :func:`idmm.stages.artifacts.images`."""
    parts = _exported(run, config)
    return _read(run, parts, part, parts.phases[-1])


def _read(run: Path, parts: Assembly, part: str, phase: Phase) -> ImageStore:
    """Reads a split, ``val`` and ``test`` at the size of a phase; UserError where image i is no longer image i."""
    splits, data = together(read_splits(*parts.stage.images(parts.config))).parts, parts.config.data
    if part not in splits:
        raise UserError(f"the run has no {part} images")
    largest = max(phase.size for phase in parts.phases)
    bound = parts.bound(largest) if part == "train" else CentreCrop(phase.size, parts.crop_pct)
    scale = tidy(parts.spec.range)
    store = load_split(splits[part], bound=bound, data=data, part=part, progress=True, scale=scale)
    kept = run / "last" / "images.json"
    before = json.loads(kept.read_text()).get(part) if kept.exists() else None
    if lines := compare(before, fingerprint(store)) if before else []:
        raise UserError(*(f"data.root: the images changed since the run: {line}" for line in lines))
    return store


# ---------------------------------------------------------------------- models
def _exported(run: Path, config: Any) -> Assembly:
    """The parts of a run with the weights that it wrote in the place of those that it started from."""
    if isinstance(config, ProbeConfig):
        return assemble(config)
    stem = "model" if (run / "model.json").exists() else "backbone"
    model = replace(config.model, name=None, kwargs={})  # as the file says
    return assemble(replace(config, init=str(run / f"{stem}.safetensors"), model=model), init_field="")


def _model(parts: Assembly, classes: int) -> torch.nn.Module:
    """Builds the classifier that a run exported."""
    model = parts.spec.build(parts.phases[-1].size, parts.config.seed, classes)
    parts.spec.init.load_into(model, drop_classifier=False, strict=True)
    return model


def _batches(parts: Assembly, phase: Phase, store: ImageStore, label: str, numbers: np.ndarray | None = None):
    spec, workers = parts.spec, parts.config.data.workers
    crops = centre_crops(store, phase.size, parts.crop_pct, spec.mean, spec.std, BATCH, workers, numbers)
    return counting(crops, len(store) if numbers is None else len(numbers), label)


def _autocast(run: Path, device: str) -> Callable:
    """The context that a forward pass ran in, as far as the device has it."""
    precision = json.loads((run / "result.json").read_text()).get("precision", "fp32")
    if precision == "fp32" or (precision == "fp16" and device == "cpu"):
        return nullcontext
    return functools.partial(torch.autocast, device, DTYPES[precision])
