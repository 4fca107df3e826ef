"""Weights: reading checkpoints, fitting them to a model of another image size, writing ours."""

import dataclasses
import json
import logging
import math
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torch import Tensor, nn

from idmm.config import IMAGENET_MEAN, IMAGENET_STD
from idmm.errors import UserError, listed
from idmm.files import is_public, replacing, weights_file, weights_label
from idmm.models.build import Size, backbone_keys, classifier_prefixes, create_backbone, model_name, pair
from idmm.models.channels import adapt_input
from idmm.models.hub import public_weights
from idmm.models.nested import beside, best_part, contents, read_weights

log = logging.getLogger("idmm")

# of evaluation, if a JSON does not have it
CROP_PCT, INTERPOLATION = 0.875, "bicubic"
# tables that follow from the model's shape: never read from a checkpoint
_INDICES = ("relative_position_index", "relative_coords_table", "attn_mask", "attention_bias_idxs")


@dataclasses.dataclass
class Checkpoint:
    """Weights, on the CPU where they are from a file, and what is known about them."""

    state: dict[str, Tensor]  # of a file all that it holds, named without ``nest``
    source: str  # the file, for messages
    field: str = ""  # of the config, that names the file; messages begin with it
    name: str | None = None  # timm's; None where no JSON lies beside the file
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # what the model was built with
    mean: tuple[float, ...] = IMAGENET_MEAN  # of each channel, on pixel values in [0, 1]
    std: tuple[float, ...] = IMAGENET_STD
    size: Size | None = None  # of the images that it was evaluated on (pixels)
    crop_pct: float = CROP_PCT  # share of the resized short side that they covered
    interpolation: str = INTERPOLATION  # by which they were resized
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # what else the JSON holds, e.g. classes
    nest: str = ""  # what the names of all weights in the file begin with, e.g. state_dict.module.
    others: list[str] = dataclasses.field(default_factory=list)  # entries of the file without weights, e.g. epoch

    @property
    def in_chans(self) -> int:
        """Channels of the images (3 unless the JSON says otherwise)."""
        return self.kwargs.get("in_chans", 3)

    @property
    def img_size(self) -> Size | None:
        """Size that the model was built at (pixels), where the JSON says it."""
        return self.kwargs.get("img_size")

    @property
    def range(self) -> str | list:
        """Of images of more than 8 bits, see :attr:`idmm.config.Data.range`."""
        return self.extra.get("range", "auto")

    def load_into(self, model: nn.Module, *, drop_classifier: bool = True, in_chans: int | None = None) -> "Report":
        """Copies into the model what fits; resizes position embeddings and relative-position tables to its size.

        A file may hold several networks with heads; the one that fits best is used, see :func:`best_part`. The
        checkpoint's grid is taken to be square.

        Args:
            model: From :func:`create_backbone`; changed in place, in its own dtype. Where it has a method
                ``checkpoint_filter_fn(state)``, as T2T-ViT and CvT do, that converts weights of other names.
            drop_classifier: Leave the model's classifier as it is.
            in_chans: Channels of the model's images, which the first layer is adapted to; None: as it is.

        Raises:
            UserError: A checkpoint of another model: too few names in common, or shapes that cannot be converted.
        """
        label, adapted = weights_label(self.source, self.field), ""
        backbone, prefixes = backbone_keys(model), classifier_prefixes(model)
        targets = {k: t for k, t in model.state_dict().items() if not k.endswith(_INDICES)}

        def in_classifier(key):
            return key not in backbone and (key in targets or key.startswith(prefixes))

        wanted = {k: t for k, t in targets.items() if not (drop_classifier and in_classifier(k))}
        names = {f"{self.nest}{k}": v for k, v in self.state.items() if not k.endswith(_INDICES)}
        prefix, state = best_part(model, names, wanted, self.nest)
        unknown = [k for k in state if k not in targets and not in_classifier(k)]
        _check_enough(self, model, backbone, state, unknown)
        if in_chans is not None:
            state, adapted = adapt_input(model, state, in_chans, label)
        usable = {k: v for k, v in state.items() if k in wanted}
        new = _fitted(model, usable, targets, label)
        model.load_state_dict({key: value for key, (value, _) in new.items()}, strict=False)
        return Report(
            self.source,
            kept=[k for k, (_, resized) in new.items() if not resized],
            resized=[k for k, (_, resized) in new.items() if resized],
            dropped=[k for k in state if k not in new],
            fresh=[k for k in targets if k not in new],
            adapted=adapted,
            prefix=prefix,
            left_out=beside(names, prefix),
            others=self.others,
        )


@dataclasses.dataclass
class Report:
    """What became of each weight from ``source``, by name; no name is in two lists.

    As text: the counts, then the names of each kind but ``kept``, if they are many by their first word.
    """

    source: str
    kept: list[str]  # copied as they were
    resized: list[str]  # position embeddings and tables, interpolated to the model's size
    dropped: list[str]  # of the checkpoint, not used: the classifier, and what the model does not have
    fresh: list[str]  # of the model, not in the checkpoint: left as they were initialised
    adapted: str = ""  # what became of the first layer, where it was for other channels
    prefix: str = ""  # that was taken off all names of the checkpoint above
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)  # how many weights of the file begin otherwise
    others: list[str] = dataclasses.field(default_factory=list)  # entries of the file without weights

    def __str__(self) -> str:
        others = {kind: getattr(self, kind) for kind in ("resized", "dropped", "fresh")}
        counts = f"{len(self.kept)} weights kept" + "".join(f", {len(n)} {kind}" for kind, n in others.items())
        lines = [f"  {kind}: {_summed(names)}" for kind, names in others.items() if names]
        file = [("read from", self.prefix.rstrip(".")), ("left out", _counts(self.left_out))]
        file = [f"{what}: {text}" for what, text in (*file, ("without weights", listed(self.others, 20))) if text]
        lines += [f"  {'; '.join(file)}"] if file else []
        return "\n".join([f"{self.source}: {counts}", *lines, *([f"  {self.adapted}"] if self.adapted else [])])


def _summed(names: list[str]) -> str:
    return listed(names, 8) if len(names) <= 8 else _counts(Counter(name.partition(".")[0] for name in names))


def _counts(counts: Counter[str]) -> str:
    return listed((f"{name} ({count})" for name, count in counts.items()), 20)


def read_checkpoint(path: str | os.PathLike, field: str = "", stem: str = "backbone") -> Checkpoint:
    """Reads weights from a run folder, from a file in timm's format, or public ones, ``timm:NAME`` or
    ``hf-hub:ORG/NAME``, which are fetched where they are not in the hub's cache.

    What all names in a file begin with is taken off (:func:`idmm.models.nested.read_weights`). Name and arguments come
    from the JSON beside the file (same stem), if there is one.

    Args:
        path: Of the folder or file, or the name of public weights.
        field: Config field that names it, with which messages then begin.
        stem: Of a run's files: ``backbone``, or ``model`` for the one with the classifier.

    Raises:
        UserError: Nothing there, no such weights in the folder, a file that is no checkpoint, or see
            :func:`idmm.models.hub.public_weights`.
    """
    path = weights_file(path, field, stem)
    if is_public(path):
        found = public_weights(str(path), field)
        return Checkpoint(field=field, **found.read(read_weights(found.file, field)[0], weights_label(path, field)))
    (state, nest, others), info = read_weights(path, field), _read_info(path.with_suffix(".json"), field)
    known = {key: info.pop(key) for key in ("name", "kwargs", "size", "crop_pct", "interpolation") if key in info}
    known |= {key: tuple(info.pop(key)) for key in ("mean", "std") if key in info}
    info.pop("channels", None)  # as in kwargs
    return Checkpoint(state, str(path), field, **known, extra=info, nest=nest, others=others)


def load_backbone(run_or_file: str | os.PathLike, img_size: Size | None = None) -> nn.Module:
    """Builds the backbone that a run wrote, with its weights, without a classifier.

    Args:
        run_or_file: A run folder, a checkpoint with its JSON beside it, or public weights, as :func:`read_checkpoint`
            takes them.
        img_size: Image side, or (height, width), in pixels; None: as saved.

    Returns:
        A timm model in evaluation mode, [B, in_chans, H, W] -> [B, num_features]. Its ``pretrained_cfg`` says how the
        run evaluated images, in timm's terms: ``input_size`` (channels, height, width; at ``img_size`` where that is
        given), ``crop_pct``, ``crop_mode`` ("center"), ``interpolation``, ``mean`` and ``std`` (a number a channel, on
        pixel values in [0, 1]). So ``timm.data.create_transform(**timm.data.resolve_model_data_config(model))`` makes
        of a PIL image, RGB or for one channel "L", what the model wants. ``range`` is there where images of more than 8
        bits were scaled by it before, [low, high] or such a pair for each channel; ``bands`` where some channels of
        files were chosen.

    Raises:
        UserError: See :func:`read_checkpoint`, :func:`create_backbone` and :meth:`Checkpoint.load_into`.
    """
    return build_saved(read_checkpoint(run_or_file), img_size)


def build_saved(saved: Checkpoint, img_size: Size | None = None, num_classes: int = 0) -> nn.Module:
    """Builds the model of a checkpoint with its weights, as :func:`load_backbone` does; with ``num_classes`` that of a
    classifier of so many classes, [B, in_chans, H, W] -> [B, num_classes].

    Raises:
        UserError: As there, or the checkpoint lacks weights of the classifier.
    """
    label = weights_label(saved.source, saved.field)
    if saved.name is None:
        beside = Path(saved.source).with_suffix(".json").name
        raise UserError(f"{label} the model's name is unknown; wanted is {beside} beside it (name, kwargs)")
    if task := saved.extra.get("task"):
        raise UserError(
            f"{label} is a network of idmm {task}; wanted a classifier, or the backbone.safetensors beside it"
        )
    kwargs = {k: v for k, v in saved.kwargs.items() if k not in ("img_size", "num_classes")}
    model = create_backbone(saved.name, img_size or saved.img_size, num_classes=num_classes, **kwargs)
    report = saved.load_into(model, drop_classifier=not num_classes)
    if report.prefix:
        log.info("%s", report)
    if num_classes and report.fresh:
        raise UserError(f"{label} lacks weights of a classifier: {listed(report.fresh, 3)}")
    size = img_size or saved.size or saved.img_size or (model.pretrained_cfg.get("input_size") or (3, 224, 224))[-2:]
    looks = dict(input_size=(saved.in_chans, *pair(size)), test_input_size=None, test_crop_pct=None)
    looks |= {name: getattr(saved, name) for name in ("crop_pct", "interpolation", "mean", "std")}
    looks |= {name: saved.extra[name] for name in ("range", "bands") if name in saved.extra}
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **looks, "crop_mode": "center"}
    return model.eval()


def save_model(
    folder: str | os.PathLike,
    stem: str,
    model_state: dict[str, Tensor],
    *,
    name: str,
    kwargs: dict[str, Any],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    size: Size | None = None,
    crop_pct: float = CROP_PCT,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes ``<stem>.safetensors``, then ``<stem>.json``; each is the old file or the new one, never half of one.

    Args:
        folder: Where to; made if missing.
        stem: ``backbone`` or ``model``.
        model_state: A state dict, on any device.
        name: timm's name of the model.
        kwargs: From :func:`export_kwargs`.
        mean: Of each channel, on pixel values in [0, 1]; ``std`` likewise.
        size: Side of the images that it was evaluated on, or (height, width) (pixels); None: ``img_size`` of kwargs.
        crop_pct: Share of the resized short side that they covered.
        extra: More keys for the JSON, e.g. ``classes``.

    Raises:
        RunError: The disk is full or the folder cannot be written; the old files are kept.
    """
    folder = Path(folder)
    looks = {"size": size or kwargs.get("img_size"), "crop_pct": crop_pct, "interpolation": INTERPOLATION}
    looks |= {"channels": len(mean), "mean": list(mean), "std": list(std)}
    info = {"name": name, "kwargs": kwargs, **looks, **(extra or {})}
    # tied weights are written twice: safetensors takes no two tensors of one memory
    copies = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in model_state.items()}
    with replacing(folder / f"{stem}.json") as info_file, replacing(folder / f"{stem}.safetensors") as weights_file:
        info_file.write((json.dumps(info, indent=2) + "\n").encode())
        weights_file.write(save(copies, metadata={"format": "pt"}))


def _read_info(path, field):
    """Returns the JSON beside a checkpoint, or nothing where there is none or it is not about a model."""
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{weights_label(path, field)} cannot be read as JSON ({why})") from error
    if not (isinstance(info, dict) and isinstance(info.get("name"), str) and isinstance(info.get("kwargs"), dict)):
        return {}
    return info


def _check_enough(saved, model, backbone, state, unknown):
    """Raises UserError if less than half of the backbone, counted in numbers, is in the checkpoint by name."""
    sizes = {k: p.numel() for k, p in model.named_parameters() if k in backbone}
    missing = [k for k in sizes if k not in state]
    if 2 * sum(sizes[k] for k in missing) <= sum(sizes.values()):
        return
    label, names = weights_label(saved.source, saved.field), [saved.nest + k for k in saved.state]
    raise UserError(
        f"{label} is a checkpoint of another model: only {len(sizes) - len(missing)} of {len(sizes)} weights fit "
        f"{model_name(model)}; missing: {listed(missing, 3)}; unknown: {listed(unknown, 3) or 'none'}; "
        f"{contents(names, saved.others)}"
    )


def _fitted(model, usable, targets, label):
    """Returns each value in the model's shape, and whether it was resized; UserError where some cannot be."""
    new, faults = {}, []
    for key, value in usable.items():
        try:
            new[key] = _fit(model, key, value, targets[key])
        except ValueError as error:
            faults.append(f"{key}: {error}")
    if faults:
        why = "another model, other model.kwargs, or a size that cannot be converted"
        raise UserError(f"{label} does not fit {model_name(model)} ({why}): {listed(faults, 3)}")
    return new


def _fit(model, key, value, target):
    """Returns the value in the model's shape, and whether it was resized; ValueError if it cannot be."""
    owner, _, leaf = key.rpartition(".")
    if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex():
        raise ValueError("is sparse, quantized, complex or without data")
    value = resized = value.to(target.dtype)
    if leaf == "pos_embed" and value.ndim == target.ndim == 3:
        resized = _resize_tokens(model, value, target)
    elif leaf == "relative_position_bias_table" and value.shape != target.shape and value.ndim == target.ndim:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # timm's interpolation uses what torch deprecates
                windows = tuple(model.get_submodule(owner).window_size)
                resized = resize_rel_pos_bias_table(value, windows, target.shape)
        except (ValueError, AssertionError, RuntimeError, AttributeError):
            raise ValueError(f"{_shapes(value, target)}, not of square windows") from None
    if resized.shape != target.shape:
        raise ValueError(_shapes(value, target))
    return resized, resized is not value


def _resize_tokens(model, value, target):
    """Absolute position embedding, [1, prefix + h w, D]; as it is where the model tells no grid, or of the same one."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None or value.shape[::2] != target.shape[::2] or value.shape == target.shape:
        return value
    prefix = target.shape[1] - math.prod(grid)  # 0 where class tokens have no position
    side = math.isqrt(max(value.shape[1] - prefix, 0))
    if not 0 <= prefix <= 2:
        return value  # the grid is not that of the tokens
    if side**2 != value.shape[1] - prefix:
        raise ValueError(f"{value.shape[1]} positions less {prefix} prefix tokens are not a square")
    antialias = getattr(model, "antialias_positions", True)  # as timm does
    return resample_abs_pos_embed(value, list(grid), [side, side], prefix, antialias=antialias)


def _shapes(value, target):
    there, here = ("x".join(map(str, t.shape)) or "a number" for t in (value, target))
    return f"{there} in the checkpoint, {here} in the model"
