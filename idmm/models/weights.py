"""Weights: read checkpoints, fit them to a model of another image size, write ours.

Public weights, ``timm:NAME``, come from the Hugging Face hub or its cache. huggingface_hub
downloads (environment variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT) and locks each file. timm
converts every published format to its own.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import timm
import torch
from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import save
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table, to_2tuple
from timm.models import adapt_input_conv, get_pretrained_cfg
from torch import Tensor, nn

from idmm.config import IMAGENET_MEAN, IMAGENET_STD, Augment, Data, parsing
from idmm.errors import UserError, checked, in_short
from idmm.files import is_public, replacing, saved_info, weights_fault, weights_file, weights_label
from idmm.models.base import Tensors
from idmm.models.build import Size, backbone_keys, create_backbone, export_kwargs, model_name
from idmm.models.nested import best_network, read_weights
from idmm.text import listed, nearest

# of evaluation, if a JSON lacks them
CROP_PCT = 0.875
INTERPOLATION = "bicubic"
# tables that follow from the model's shape, never read from a checkpoint
_INDICES = ("relative_position_index", "relative_coords_table", "attn_mask", "attention_bias_idxs")
_PREPROCESSING = ("crop_pct", "interpolation", "mean", "std")


@dataclasses.dataclass
class Checkpoint:
    """Weights (of a file on the CPU) with their metadata."""

    state: Tensors  # everything in the file
    source: str  # the file, for messages
    field: str = ""  # config field that names the file. Messages begin with it
    name: str | None = None  # timm's. None: there is no JSON next to the file
    kwargs: dict = dataclasses.field(default_factory=dict)  # arguments the model was built with
    mean: tuple[float, ...] = IMAGENET_MEAN  # per channel, on pixel values in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD
    size: Size | None = None  # of the images in evaluation (pixels)
    crop_pct: float = CROP_PCT  # share of the resized short side that they cover
    interpolation: str = INTERPOLATION
    extra: dict = dataclasses.field(default_factory=dict)  # the rest of the JSON, e.g. classes

    @property
    def in_chans(self) -> int:
        """Channels of the images (3 if the JSON has no number)."""
        return self.kwargs.get("in_chans", 3)

    @property
    def range(self) -> str | list:
        """Value range of images with more than 8 bits, see :attr:`idmm.config.Data.range`."""
        return self.extra.get("range", "auto")

    def load_into(self, model: nn.Module, *, drop_classifier: bool = True) -> "Report":
        """Copy the weights that fit into a model, with position embeddings and tables resized to
        its image size.

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
        label = weights_label(self.source, self.field)
        backbone = backbone_keys(model)
        targets = {k: t for k, t in model.state_dict().items() if not k.endswith(_INDICES)}
        needed = {k: t for k, t in targets.items() if k in backbone or not drop_classifier}
        weights = {k: v for k, v in self.state.items() if not k.endswith(_INDICES)}
        prefix, state = best_network(model, weights, needed)
        _check_overlap(self, model, backbone, state, [k for k in state if k not in targets])
        state, adapted = adapt_input(model, state, label)
        fitted = {}
        faults = []
        for key, value in state.items():
            try:
                if key in needed:
                    fitted[key] = _fit(model, key, value, targets[key])
            except ValueError as error:
                faults.append(f"{key}: {error}")
        if faults:
            why = "another model, other model.kwargs, or a size that cannot be converted"
            raise UserError(
                f"{label} does not fit {model_name(model)} ({why}): {listed(faults, 3)}"
            )
        model.load_state_dict(fitted, strict=False)
        resized = [k for k, v in fitted.items() if v.shape != state[k].shape]
        return Report(
            self.source,
            loaded=[k for k in fitted if k not in resized],
            resized=resized,
            dropped=[k for k in state if k not in fitted],
            fresh=[k for k in targets if k not in fitted],
            adapted=adapted,
            prefix=prefix,
        )


@dataclasses.dataclass
class Report:
    """The fate of each weight of ``source``. No name is in two lists.

    As text: the counts, then the names of each list but ``loaded``. Many names are grouped by their
    first word.
    """

    source: str
    loaded: list[str]  # copied unchanged
    resized: list[str]  # position embeddings and tables, interpolated to the model's size
    dropped: list[str]  # unused weights of the checkpoint: the classifier, and what the model lacks
    fresh: list[str]  # weights of the model that the checkpoint lacks, left as initialised
    adapted: str = ""  # how the first layer was adapted to other channels
    prefix: str = ""  # removed from the names of the checkpoint's weights

    def __str__(self) -> str:
        lists = {"resized": self.resized, "dropped": self.dropped, "fresh": self.fresh}
        counts = "".join(f", {len(names)} {kind}" for kind, names in lists.items())
        lines = [f"{self.source}: {len(self.loaded)} weights loaded{counts}"]
        for kind, names in lists.items():
            groups = Counter(name.partition(".")[0] for name in names)
            if len(names) <= 8:
                few = names
            else:
                few = [f"{name} ({count})" for name, count in groups.items()]
            lines += [f"  {kind}: {listed(few, 20)}"] if names else []
        lines += [f"  read from: {self.prefix.rstrip('.')}"] if self.prefix else []
        return "\n".join([*lines, f"  {self.adapted}"] if self.adapted else lines)


def read_checkpoint(path: str | os.PathLike, field: str = "", stem: str = "backbone") -> Checkpoint:
    """Return the weights of a run folder, a file in timm's format, or public ones (``timm:NAME``).

    Model name and arguments come from a JSON with the same stem next to the file. Public weights
    are downloaded unless the hub's cache has them.

    Args:
        path: Of the folder or file, or the name of public weights.
        field: Config field for messages.
        stem: File of a run: ``backbone``, or ``model`` for the one with the classifier.

    Raises:
        UserError: Nothing there, no such weights in the folder, or a file that is no checkpoint.
            See also :func:`public_file`.
    """
    path = weights_file(path, field, stem)
    if is_public(path):
        return _public_checkpoint(str(path), field)
    state = read_weights(path, field)
    info = saved_info(path)
    _check_preprocessing(info, weights_label(path.with_suffix(".json"), field))
    info.pop("channels", None)  # kwargs has them
    metadata = {
        key: info.pop(key)
        for key in ("name", "kwargs", "size", "crop_pct", "interpolation")
        if key in info
    }
    metadata |= {key: tuple(info.pop(key)) for key in ("mean", "std") if key in info}
    return Checkpoint(state, str(path), field, **metadata, extra=info)


def _check_preprocessing(info: dict, label: str) -> None:
    """Raise UserError if the JSON next to weights has values that images cannot be prepared by."""
    values = {key: info[key] for key in ("mean", "std", "range", "bands") if key in info}
    crop = {"crop_pct": info.get("crop_pct", CROP_PCT)}
    try:
        data, augment = checked(
            lambda: parsing.build(Data, values), lambda: parsing.build(Augment, crop)
        )
        info |= {"crop_pct": augment.crop_pct} if "crop_pct" in info else {}
        info |= {key: getattr(data, key) for key in ("mean", "std") if key in info}
        channels = info.get("kwargs", {}).get("in_chans", 3)
        odd = [key for key in ("mean", "std") if len(values.get(key) or [0] * channels) != channels]
        faults = [f"{key}: {len(values[key])} values for {channels} channels" for key in odd]
        classes = info.get("classes", [])
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            faults.append("classes: expected a list of names")
        sides = info.get("size") or 1
        for side in sides if isinstance(sides, list) else [sides]:
            if not isinstance(side, int) or side < 1:
                faults.append("size: expected a number of pixels")
    except UserError as error:
        faults = error.faults
    if faults:
        raise UserError(*(f"{label} {fault}" for fault in faults))


@functools.cache
def public_file(text: str, field: str = "") -> Path:
    """Return the file of public weights, ``timm:NAME``, in the cache. It is downloaded if it is not
    there.

    If the hub is out of reach, the cache is used. ``field``: of the config, for messages.

    Raises:
        UserError: No such name, or out of reach and not in the cache.
    """
    label = weights_label(text, field)
    names = timm.list_models(pretrained=True)
    name = text.removeprefix("timm:")
    if name in names or ("." not in name and timm.is_model(name)):
        cfg = get_pretrained_cfg(name)
    else:
        cfg = None
    if cfg is None or not cfg.hf_hub_id:
        raise UserError(
            weights_fault(
                text,
                field,
                "is not among timm's weights on the hub",
                nearest(name, names + timm.list_models()),
            )
        )
    try:
        return Path(hf_hub_download(cfg.hf_hub_id, "model.safetensors"))
    except Exception as error:  # of requests, httpx or huggingface_hub
        absent = "it is not in the cache, and the hub is out of reach or HF_HUB_OFFLINE is set"
        if isinstance(error, LocalEntryNotFoundError):
            why = absent
        else:
            why = in_short(error)
        raise UserError(
            f"{label} cannot be fetched from '{cfg.hf_hub_id}' on {constants.ENDPOINT}: {why}"
        ) from error


def _public_checkpoint(text: str, field: str) -> Checkpoint:
    """Return public weights in timm's format, with the preprocessing that they were trained
    with."""
    # instead of a download
    overlay = {"state_dict": read_weights(public_file(text, field), field), "source": None}
    with torch.random.fork_rng(devices=[]):
        model = timm.create_model(
            text.removeprefix("timm:"), pretrained=True, pretrained_cfg_overlay=overlay
        )
    cfg = model.pretrained_cfg
    name, (chans, *size) = cfg["architecture"], cfg["input_size"]
    kwargs = export_kwargs(name, {}, size, in_chans=chans)
    preprocessing = {key: cfg[key] for key in _PREPROCESSING}
    return Checkpoint(model.state_dict(), text, field, name, kwargs, size=size, **preprocessing)


def load_backbone(run_or_file: str | os.PathLike, img_size: Size | None = None) -> nn.Module:
    """Return the backbone of a run with its weights, without a classifier.

    Args:
        run_or_file: A run folder, a checkpoint next to its JSON, or public weights, see
            :func:`read_checkpoint`.
        img_size: Image side, or (height, width), in pixels. None: as saved.

    Returns:
        A timm model in evaluation mode, [B, in_chans, H, W] -> [B, num_features]. Its
        ``pretrained_cfg`` has the preprocessing of the run's evaluation in timm's terms:
        ``input_size`` (channels, height, width), ``crop_pct``, ``crop_mode`` ("center"),
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


def build_saved(saved: Checkpoint, img_size: Size | None = None, num_classes: int = 0) -> nn.Module:
    """Return the model of a checkpoint with its weights, as :func:`load_backbone` does, with the
    same errors.

    With ``num_classes`` it has the checkpoint's classifier, [B, in_chans, H, W] -> [B,
    num_classes].
    """
    label = weights_label(saved.source, saved.field)
    if saved.name is None:
        json_name = Path(saved.source).with_suffix(".json").name
        raise UserError(
            f"{label} the model's name is unknown, expected {json_name} next to it (name, kwargs)"
        )
    if task := saved.extra.get("task"):
        raise UserError(
            f"{label} is a network of idmm {task}. Give a classifier, or backbone.safetensors next to it"
        )
    kwargs = {k: v for k, v in saved.kwargs.items() if k not in ("img_size", "num_classes")}
    built = saved.kwargs.get("img_size")
    model = create_backbone(saved.name, img_size or built, num_classes=num_classes, **kwargs)
    saved.load_into(model, drop_classifier=not num_classes)
    size = (
        img_size
        or saved.size
        or built
        or (model.pretrained_cfg.get("input_size") or (3, 224, 224))[-2:]
    )
    cfg = {
        **model.pretrained_cfg,
        "input_size": (saved.in_chans, *to_2tuple(size)),
        "crop_mode": "center",
    }
    cfg |= {
        "test_input_size": None,
        "test_crop_pct": None,
        **{key: getattr(saved, key) for key in _PREPROCESSING},
    }
    cfg |= {key: saved.extra[key] for key in ("range", "bands") if key in saved.extra}
    model.pretrained_cfg = model.default_cfg = cfg
    return model.eval()


def save_model(folder: str | os.PathLike, stem: str, model_state: Tensors, **fields) -> None:
    """Write ``<stem>.safetensors``, then ``<stem>.json``, each atomically.

    Args:
        folder: Created if missing.
        stem: ``backbone`` or ``model``.
        model_state: A state dict, on any device.
        **fields: Other fields of the :class:`Checkpoint` to write: ``name``, ``kwargs`` from
            :func:`export_kwargs`, ``mean`` and ``std``, ``size`` (None: ``img_size`` of kwargs),
            ``crop_pct`` and ``extra``.

    Raises:
        RunError: The disk is full or the folder cannot be written. The old files stay.
    """
    saved = Checkpoint(model_state, stem, **fields)
    info = {
        key: getattr(saved, key) for key in ("name", "kwargs", "size", "crop_pct", "interpolation")
    }
    info |= {"size": saved.size or saved.kwargs.get("img_size"), "channels": len(saved.mean)}
    info |= {"mean": list(saved.mean), "std": list(saved.std), **saved.extra}
    # tied weights are written twice, because safetensors refuses shared memory
    copies = {
        k: v.detach().cpu().clone(memory_format=torch.contiguous_format)
        for k, v in model_state.items()
    }
    path = Path(folder, stem)
    with (
        replacing(path.with_suffix(".json")) as info_file,
        replacing(path.with_suffix(".safetensors")) as weights_file,
    ):
        info_file.write((json.dumps(info, indent=2) + "\n").encode())
        weights_file.write(save(copies, metadata={"format": "pt"}))


def _check_overlap(
    saved: Checkpoint,
    model: nn.Module,
    backbone: set[str],
    state: Iterable[str],
    unknown: list[str],
) -> None:
    """Raise UserError if the checkpoint has fewer than half of the backbone's numbers by name."""
    sizes = {k: p.numel() for k, p in model.named_parameters() if k in backbone}
    missing = [k for k in sizes if k not in state]
    if 2 * sum(sizes[k] for k in missing) <= sum(sizes.values()):
        return
    label = weights_label(saved.source, saved.field)
    raise UserError(
        f"{label} is a checkpoint of another model: only {len(sizes) - len(missing)} of {len(sizes)} weights fit "
        f"{model_name(model)}. Missing: {listed(missing, 3)}. Unknown: {listed(unknown, 3) or 'none'}"
    )


def _fit(model: nn.Module, key: str, value: Tensor, target: Tensor) -> Tensor:
    """Return a value in the target's dtype and shape. ValueError if it cannot be converted."""
    value = value.to(target.dtype)
    if value.shape == target.shape:
        return value
    owner, _, leaf = key.rpartition(".")
    if leaf == "relative_position_bias_table" and value.ndim == target.ndim:
        with (
            warnings.catch_warnings(),
            contextlib.suppress(AssertionError, RuntimeError, AttributeError),
        ):
            warnings.simplefilter("ignore")  # timm's interpolation is deprecated in torch
            window = tuple(model.get_submodule(owner).window_size)
            return resize_rel_pos_bias_table(value, window, target.shape)
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if (
        leaf == "pos_embed"
        and grid is not None
        and value.ndim == 3
        and value.shape[::2] == target.shape[::2]
    ):
        prefix = target.shape[1] - math.prod(grid)  # 0 if class tokens have no position
        side = math.isqrt(max(value.shape[1] - prefix, 0))
        # otherwise the grid is not that of the tokens
        if 0 <= prefix <= 2 and side**2 == value.shape[1] - prefix:
            antialias = getattr(model, "antialias_positions", True)  # timm's default
            return resample_abs_pos_embed(
                value, list(grid), [side, side], prefix, antialias=antialias
            )
    shapes = ["x".join(map(str, t.shape)) or "a number" for t in (value, target)]
    raise ValueError(f"{shapes[0]} in the checkpoint, {shapes[1]} in the model")


def adapt_input(model: nn.Module, state: Tensors, label: str) -> tuple[Tensors, str]:
    """Return weights for RGB with a first layer for the model's channels, as in timm, and a line on
    the change.

    For one channel the weights are summed. Otherwise they repeat over the channels, scaled by 3 /
    channels.

    Raises:
        UserError: The first layer cannot be adapted. ``label`` begins the message.
    """
    names = (getattr(model, "pretrained_cfg", None) or {}).get("first_conv") or ()
    adapted = {}
    line = ""
    targets = model.state_dict()
    for key in (f"{name}.weight" for name in ([names] if isinstance(names, str) else names)):
        value = state.get(key)
        target = targets.get(key)
        if value is None or target is None or value.shape[1] == target.shape[1]:
            continue
        if value.ndim != 4 or value.shape[1] != 3:
            why = f"{key} of {model_name(model)} is no convolution of RGB and cannot be adapted to other channels"
            raise UserError(f"{label} {why}. Leave out data.in_chans or init")
        in_chans = target.shape[1]
        adapted[key] = adapt_input_conv(in_chans, value)
        if in_chans == 1:
            how = "summed"
        else:
            how = f"repeated in turn, scaled by 3/{in_chans}"
        line = f"{', '.join(adapted)}: from 3 channels to {in_chans}: {how}"
    return state | adapted, line
