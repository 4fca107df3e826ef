"""Weights: read checkpoints, load them into models, write ours.

Public weights are files of :mod:`idmm.models.public`. timm converts every published format to its
own.
"""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save
from timm.layers import to_2tuple
from torch import nn

from idmm.config import IMAGENET_MEAN, IMAGENET_STD, Augment, Data, parsing
from idmm.config.base import CROP_MODES
from idmm.errors import Fault, UserError, checked
from idmm.files import AnyPath, is_public, replacing, saved_info, weights_fault, weights_file
from idmm.models.base import Backbone, Tensors
from idmm.models.build import (
    Kwargs,
    Size,
    backbone_keys,
    create_backbone,
    export_kwargs,
    model_name,
)
from idmm.models.fit import adapt_input, resized
from idmm.models.nested import best_network, read_weights
from idmm.models.public import public_weights
from idmm.text import listed

# of evaluation, if a JSON lacks them
CROP_PCT = 0.875
INTERPOLATION = "bicubic"
# tables that follow from the model's shape, never read from a checkpoint
_INDICES = ("relative_position_index", "relative_coords_table", "attn_mask", "attention_bias_idxs")
_PREPROCESSING = ("crop_pct", "crop_mode", "interpolation", "mean", "std")
Range = str | list[Any]  # "auto", [low, high] or such a pair per channel, see config.Data.range


@dataclasses.dataclass
class Checkpoint:
    """Weights (of a file on the CPU) with their metadata."""

    state: Tensors  # everything in the file
    source: str  # the file, for messages
    field: str = ""  # config field that names the file. Messages begin with it
    name: str | None = None  # timm's. None: there is no JSON next to the file
    kwargs: Kwargs = dataclasses.field(default_factory=dict)  # that the model was built with
    mean: tuple[float, ...] = IMAGENET_MEAN  # per channel, on pixel values in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD
    size: Size | None = None  # of the images in evaluation (pixels)
    crop_pct: float = CROP_PCT  # share of the resized short side that they cover
    crop_mode: str = "center"  # timm's
    interpolation: str = INTERPOLATION
    # the rest of the JSON, e.g. classes
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def in_chans(self) -> int:
        """Channels of the images (3 if the JSON has no number)."""
        in_chans: int = self.kwargs.get("in_chans", 3)
        return in_chans

    @property
    def range(self) -> Range:
        """Value range of images with more than 8 bits."""
        value_range: Range = self.extra.get("range", "auto")
        return value_range

    @property
    def bands(self) -> list[int] | None:
        """Channels of the files that were used. None: all."""
        return self.extra.get("bands")

    def fault(self, text: str, hint: str = "") -> Fault:
        """Return a fault of the file."""
        return weights_fault(self.source, self.field, text, hint)

    def load_into(self, model: Backbone, *, drop_classifier: bool = True) -> "Report":
        """Copy the weights that fit into a model, with positions and tables of its image size.

        If a file holds several networks, the most similar one is used, see :func:`best_network`.
        Position embeddings of the checkpoint must form a square grid. The first layer is adapted to
        other channels.

        Args:
            model: From :func:`create_backbone`. It is changed in place and keeps its dtype. A
                method ``checkpoint_filter_fn(state)``, as in T2T-ViT and CvT, converts other names.
            drop_classifier: Keep the model's own classifier.

        Raises:
            UserError: A checkpoint of another model: too few common names, or shapes that cannot be
                converted.
        """
        backbone = backbone_keys(model)
        targets = _without_indices(model.state_dict())
        needed = targets
        if drop_classifier:
            needed = {key: targets[key] for key in targets if key in backbone}
        prefix, state = best_network(model, _without_indices(self.state), needed)
        self._check_overlap(model, backbone, state)
        state, adapted = adapt_input(model, state, self.fault)
        report = Report(self.source, adapted=adapted, prefix=prefix)
        fitted = {}
        faults = []
        for key, value in state.items():
            if key not in needed:
                report.dropped.append(key)
                continue
            try:
                fitted[key] = resized(model, key, value, targets[key])
            except ValueError as error:
                faults.append(f"{key}: {error}")
                continue
            names = report.loaded if fitted[key].shape == value.shape else report.resized
            names.append(key)
        if faults:
            raise UserError(
                self.fault(
                    f"does not fit {model_name(model)} (another model, other model.kwargs, "
                    f"or a size that cannot be converted): {listed(faults, 3)}"
                )
            )
        model.load_state_dict(fitted, strict=False)
        report.fresh = [key for key in targets if key not in fitted]
        return report

    def _check_overlap(self, model: nn.Module, backbone: set[str], state: Tensors) -> None:
        """Raise UserError if it has fewer than half of the backbone's numbers by name."""
        sizes = {}
        for name, parameter in model.named_parameters():
            if name in backbone:
                sizes[name] = parameter.numel()
        missing = [name for name in sizes if name not in state]
        if 2 * sum(sizes[name] for name in missing) <= sum(sizes.values()):
            return
        known = _without_indices(model.state_dict())
        unknown = [name for name in state if name not in known]
        raise UserError(
            self.fault(
                f"is a checkpoint of another model: only {len(sizes) - len(missing)} "
                f"of {len(sizes)} "
                f"weights fit {model_name(model)}. Missing: {listed(missing, 3)}. "
                f"Unknown: {listed(unknown, 3) or 'none'}"
            )
        )


def _without_indices(state: Tensors) -> Tensors:
    return {key: value for key, value in state.items() if not key.endswith(_INDICES)}


@dataclasses.dataclass
class Report:
    """The fate of each weight of ``source``. No name is in two lists.

    As text: the counts, then the names of each list but ``loaded``. Many names are grouped by their
    first word.
    """

    source: str
    adapted: str = ""  # how the first layer was adapted to other channels
    prefix: str = ""  # removed from the names of the checkpoint's weights
    # copied unchanged
    loaded: list[str] = dataclasses.field(default_factory=list)
    # position embeddings and tables, interpolated to the model's size
    resized: list[str] = dataclasses.field(default_factory=list)
    # unused weights of the checkpoint: the classifier, and what the model lacks
    dropped: list[str] = dataclasses.field(default_factory=list)
    # weights of the model that the checkpoint lacks, left as initialised
    fresh: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lists = {"resized": self.resized, "dropped": self.dropped, "fresh": self.fresh}
        counts = "".join(f", {len(names)} {kind}" for kind, names in lists.items())
        lines = [f"{self.source}: {len(self.loaded)} weights loaded{counts}"]
        for kind, names in lists.items():
            if len(names) > 8:
                groups = Counter(name.partition(".")[0] for name in names)
                names = [f"{name} ({count})" for name, count in groups.items()]
            if names:
                lines.append(f"  {kind}: {listed(names, 20)}")
        if self.prefix:
            lines.append(f"  read from: {self.prefix.rstrip('.')}")
        if self.adapted:
            lines.append(f"  {self.adapted}")
        return "\n".join(lines)


def read_checkpoint(path: AnyPath, field: str = "", stem: str = "backbone") -> Checkpoint:
    """Return the weights of a run folder, a file in timm's format, or public ones.

    Model name and arguments come from a JSON with the same stem next to the file. Public weights
    are ``timm:NAME``, downloaded unless the hub's cache has them, or ``imagenet``.

    Args:
        path: Of the folder or file, or the name of public weights.
        field: Config field for messages.
        stem: File of a run: ``backbone``, or ``model`` for the one with the classifier.

    Raises:
        UserError: Nothing there, no such weights in the folder, or a file that is no checkpoint.
            See also :func:`public_weights`.
    """
    file = weights_file(path, field, stem)
    if is_public(path):
        return _public_checkpoint(str(path), field)
    state = read_weights(file, field)
    info = saved_info(file)
    _check_preprocessing(info, file.with_suffix(".json"), field)
    info.pop("channels", None)  # kwargs has them
    keys = info.keys() & {"name", "kwargs", "size", *_PREPROCESSING}
    metadata = {key: info.pop(key) for key in keys}
    return Checkpoint(state, str(file), field, **metadata, extra=info)


def _check_preprocessing(info: dict[str, Any], path: Path, field: str) -> None:
    """Raise UserError if the JSON next to weights has values that images cannot be prepared by.

    Valid ones become values of the config's types.
    """
    values = {key: info[key] for key in ("mean", "std", "range", "bands") if key in info}
    crop = {"crop_pct": info.get("crop_pct", CROP_PCT)}
    try:
        data, augment = checked(
            lambda: parsing.build(Data, values),
            lambda: parsing.build(Augment, crop),
        )
        info["crop_pct"] = augment.crop_pct
        faults = _wrong_lengths(info, data)
    except UserError as error:
        faults = [*error.faults]
    if faults:
        named = [weights_fault(path, field, f"{one.field}: {one.text}", one.hint) for one in faults]
        raise UserError(*named)


def _wrong_lengths(info: dict[str, Any], data: Data) -> list[Fault]:
    """Set mean and std of the JSON as tuples. Return faults of lists and of the image size."""
    faults = []
    channels = info.get("kwargs", {}).get("in_chans", 3)
    for key, values in (("mean", data.mean), ("std", data.std)):
        if values is not None:
            info[key] = tuple(values)
            if len(values) != channels:
                faults.append(Fault(key, f"{len(values)} values for {channels} channels"))
    classes = info.get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        faults.append(Fault("classes", "expected a list of names"))
    modes = list(CROP_MODES.values())
    if info.get("crop_mode", modes[0]) not in modes:
        faults.append(Fault("crop_mode", f"expected {listed(modes)}"))
    sides = info.get("size") or 1
    for side in sides if isinstance(sides, list) else [sides]:
        if not isinstance(side, int) or side < 1:
            faults.append(Fault("size", "expected a number of pixels"))
    return faults


def _public_checkpoint(text: str, field: str) -> Checkpoint:
    """Return public weights in timm's format, with the preprocessing of their training."""
    weights = public_weights(text, field)
    state = read_weights(weights.file, field)
    with torch.random.fork_rng(devices=[]):
        if weights.has_other_names:
            names = timm.create_model(weights.name).state_dict()
            state = dict(zip(names, state.values(), strict=True))
        overlay = {"state_dict": state, "source": None}  # instead of a download
        model: Any = timm.create_model(
            weights.name, pretrained=True, pretrained_cfg_overlay=overlay
        )
    config = model.pretrained_cfg
    name = config["architecture"]
    chans, *size = config["input_size"]
    kwargs = export_kwargs(name, {}, size, in_chans=chans)
    preprocessing = {key: config[key] for key in _PREPROCESSING}
    return Checkpoint(
        model.state_dict(), weights.source, field, name, kwargs, size=size, **preprocessing
    )


def load_backbone(run_or_file: AnyPath, img_size: Size | None = None) -> Backbone:
    """Return the backbone of a run with its weights, without a classifier.

    Args:
        run_or_file: A run folder, a checkpoint next to its JSON, or public weights, see
            :func:`read_checkpoint`.
        img_size: Image side, or (height, width), in pixels. None: as saved.

    Returns:
        A timm model in evaluation mode, [B, in_chans, H, W] -> [B, num_features]. Its
        ``pretrained_cfg`` has the preprocessing of the run's evaluation in timm's terms:
        ``input_size`` (channels, height, width), ``crop_pct``, ``crop_mode``,
        ``interpolation``, ``mean`` and ``std`` (a number per channel, on pixel values in [0, 1]).
        So ``timm.data.create_transform(**timm.data.resolve_model_data_config(model))`` prepares a
        PIL image, RGB or, for one channel, "L". ``range`` is present if images of more than 8 bits
        were scaled before, [low, high] or such a pair per channel, and ``bands`` if channels of the
        files were selected.

    Raises:
        UserError: See :func:`read_checkpoint`, :func:`create_backbone` and
            :meth:`Checkpoint.load_into`.
    """
    return build_saved(read_checkpoint(run_or_file), img_size)


def build_saved(saved: Checkpoint, img_size: Size | None = None, num_classes: int = 0) -> Backbone:
    """Return the model of a checkpoint with its weights, as :func:`load_backbone` does.

    The errors are the same. With ``num_classes`` it has the checkpoint's classifier, [B, in_chans,
    H, W] -> [B, num_classes].
    """
    if saved.name is None:
        json_name = Path(saved.source).with_suffix(".json").name
        raise UserError(
            saved.fault(
                f"the model's name is unknown, expected {json_name} next to it (name, kwargs)"
            )
        )
    task = saved.extra.get("task")
    if task:
        raise UserError(
            saved.fault(
                f"is a network of idmm {task}",
                "Give a classifier, or backbone.safetensors next to it",
            )
        )
    kwargs = {**saved.kwargs, "num_classes": num_classes}
    built_size = kwargs.pop("img_size", None)
    model = create_backbone(saved.name, img_size or built_size, **kwargs)
    saved.load_into(model, drop_classifier=not num_classes)
    own = model.pretrained_cfg.get("input_size") or (3, 224, 224)
    size = img_size or saved.size or built_size or own[-2:]
    config = {
        **model.pretrained_cfg,
        "input_size": (saved.in_chans, *to_2tuple(size)),
        "test_input_size": None,
        "test_crop_pct": None,
    }
    for key in _PREPROCESSING:
        config[key] = getattr(saved, key)
    for key in saved.extra.keys() & {"range", "bands"}:
        config[key] = saved.extra[key]
    model.pretrained_cfg = config
    model.default_cfg = config
    return model.eval()


def save_model(folder: AnyPath, stem: str, model_state: Tensors, **fields: Any) -> None:
    """Write ``<stem>.safetensors``, then ``<stem>.json``, each atomically.

    Args:
        folder: Created if missing.
        stem: ``backbone`` or ``model``.
        model_state: A state dict, on any device.
        **fields: Other fields of the :class:`Checkpoint` to write: ``name``, ``kwargs`` from
            :func:`export_kwargs`, ``mean`` and ``std``, ``size`` (None: ``img_size`` of kwargs),
            ``crop_pct``, ``crop_mode`` and ``extra``.

    Raises:
        RunError: The disk is full or the folder cannot be written. The old files stay.
    """
    saved = Checkpoint(model_state, stem, **fields)
    info = {
        "name": saved.name,
        "kwargs": saved.kwargs,
        "size": saved.size or saved.kwargs.get("img_size"),
        "crop_pct": saved.crop_pct,
        "crop_mode": saved.crop_mode,
        "interpolation": saved.interpolation,
        "channels": len(saved.mean),
        "mean": list(saved.mean),
        "std": list(saved.std),
        **saved.extra,
    }
    # tied weights are written twice, because safetensors refuses shared memory
    copies = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model_state.items()
    }
    path = Path(folder, stem)
    with (
        replacing(path.with_suffix(".json")) as info_file,
        replacing(path.with_suffix(".safetensors")) as weights,
    ):
        info_file.write((json.dumps(info, indent=2) + "\n").encode())
        weights.write(save(copies, metadata={"format": "pt"}))
