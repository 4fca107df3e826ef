"""Weights: reading checkpoints, fitting them to a model of another image size, writing ours."""

import json
import math
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save
from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc, resize_rel_pos_bias_table
from timm.layers.pos_embed_rel import resize_rel_pos_bias_table_levit
from timm.models import load_state_dict
from torch import Tensor, nn
from torch.nn.functional import interpolate

from idmm.config import IMAGENET_MEAN, IMAGENET_STD
from idmm.errors import UserError, listed
from idmm.files import replacing
from idmm.models.build import Size, backbone_keys, classifier_prefixes, create_backbone, model_name, pair

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar")
_WANTED = f"give a run folder, or a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file in timm's format"
# tables that follow from the model's shape: never read from a checkpoint
_INDICES = ("relative_position_index", "relative_coords_table", "attn_mask", "attention_bias_idxs")


@dataclass
class Checkpoint:
    """Weights from a file, and what is known about them."""

    state: dict[str, Tensor]
    """Names and tensors, on the CPU."""
    source: str
    """The file, for messages."""
    name: str | None = None
    """timm's name of the model; None where no JSON lies beside the file."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """What the model was built with."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Of each channel, on pixel values in [0, 1]."""
    std: tuple[float, ...] = IMAGENET_STD
    """Likewise."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Whatever else the JSON holds, e.g. ``classes``."""

    @property
    def in_chans(self) -> int:
        """Channels of the images (3 unless the JSON says otherwise)."""
        return self.kwargs.get("in_chans", 3)

    @property
    def img_size(self) -> Size | None:
        """Size that the model was built at (pixels), where the JSON says it."""
        return self.kwargs.get("img_size")


@dataclass
class Report:
    """What became of each weight; every list holds names, and no name is in two lists."""

    kept: list[str]
    """Copied as they were."""
    resized: list[str]
    """Position embeddings and tables, interpolated to the model's size."""
    dropped: list[str]
    """In the checkpoint, not used: the classifier, and what the model does not have."""
    fresh: list[str]
    """In the model, not in the checkpoint: left as they were initialised."""
    source: str = ""

    def lines(self) -> list[str]:
        """Returns a short log: the counts, then up to 8 names of each kind that is out of the ordinary."""
        counts = f"{len(self.kept)} weights kept" + "".join(f", {len(n)} {kind}" for kind, n in self._unusual())
        head = f"{self.source}: {counts}" if self.source else counts
        return [head, *(f"  {kind}: {listed(names, 8)}" for kind, names in self._unusual() if names)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _unusual(self):
        return ("resized", self.resized), ("dropped", self.dropped), ("fresh", self.fresh)


def read_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Reads weights from a run folder (its backbone), or from a file in timm's format.

    Wrappers (``state_dict``, ``model``, their EMA forms) and the prefixes ``module.`` and ``_orig_mod.`` are taken
    off where they are. Name and arguments come from the JSON beside the file (same stem), if there is one.

    Raises:
        UserError: Nothing there, no backbone in the folder, or a file that is no checkpoint.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        path = _backbone_of(path)
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder; {_WANTED}")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: is not a checkpoint; {_WANTED}")
    state, info = _read_state(path), _read_info(path.with_suffix(".json"))
    return Checkpoint(
        state=state,
        source=str(path),
        name=info.pop("name", None),
        kwargs=info.pop("kwargs", {}),
        mean=tuple(info.pop("mean", IMAGENET_MEAN)),
        std=tuple(info.pop("std", IMAGENET_STD)),
        extra=info,
    )


def load_weights(
    model: nn.Module,
    state: dict[str, Tensor],
    *,
    source: str,
    drop_classifier: bool = True,
    img_size: Size | None = None,
    strict: bool = False,
) -> Report:
    """Copies into the model what fits; resizes position embeddings and relative-position tables to the model's size.

    Args:
        model: From :func:`create_backbone`; changed in place, in its own dtype. Where it has a method
            ``checkpoint_filter_fn(state)``, as T2T-ViT and CvT do, that renames the weights of its public release.
        state: Names and tensors, from :func:`read_checkpoint`.
        source: Where they came from, for messages.
        drop_classifier: Leave the model's classifier as it is.
        img_size: Size that ``state`` was trained at (pixels), where known; needed only for sizes that are not square.
        strict: Refuse a checkpoint that lacks weights of the backbone, or has some that the model does not know.

    Raises:
        UserError: A checkpoint of another model: too few names in common, or shapes that cannot be brought together.
    """
    state = getattr(model, "checkpoint_filter_fn", dict)(state)
    backbone, prefixes = backbone_keys(model), classifier_prefixes(model)
    own = {k: t for k, t in model.state_dict().items() if not k.endswith(_INDICES)}

    def is_head(key):
        return key not in backbone and (key in own or key.startswith(prefixes))

    given = {k: v for k, v in state.items() if not k.endswith(_INDICES)}
    usable = {k: v for k, v in given.items() if k in own and not (drop_classifier and is_head(k))}
    unknown = [k for k in given if k not in own and not is_head(k)]
    _check_enough(model, backbone, usable, unknown, source)
    if strict:
        _check_all(model, [k for k in own if k in backbone and k not in usable], unknown, source)

    new, resized, faults = {}, [], []
    for key, value in usable.items():
        try:
            new[key], changed = _fit(model, key, value, own[key], img_size)
            resized += [key] if changed else []
        except ValueError as error:
            faults.append(f"{key}: {error}")
    if faults:
        why = "another model, other model.kwargs, or a size that cannot be converted"
        raise UserError(f"{source}: does not fit {model_name(model)} ({why}): {listed(faults, 3)}")
    model.load_state_dict(new, strict=False)
    return Report(
        kept=[k for k in new if k not in set(resized)],
        resized=resized,
        dropped=[k for k in given if k not in new],
        fresh=[k for k in own if k not in new],
        source=source,
    )


def load_backbone(run_or_file: str | os.PathLike, img_size: Size | None = None) -> nn.Module:
    """Builds the backbone that a run wrote, with its weights, without a classifier.

    Args:
        run_or_file: A run folder, or a checkpoint with its JSON beside it.
        img_size: Image side, or (height, width), in pixels; None: as saved.

    Returns:
        A timm model in evaluation mode, [B, in_chans, H, W] -> [B, num_features]; ``pretrained_cfg`` holds the mean
        and std that its images want.

    Raises:
        UserError: See :func:`read_checkpoint`, :func:`create_backbone` and :func:`load_weights`.
    """
    saved = read_checkpoint(run_or_file)
    if saved.name is None:
        beside = Path(saved.source).with_suffix(".json").name
        raise UserError(f"{saved.source}: the model's name is unknown; wanted is {beside} beside it (name, kwargs)")
    kwargs = {k: v for k, v in saved.kwargs.items() if k not in ("img_size", "num_classes")}
    model = create_backbone(saved.name, img_size or saved.img_size, **kwargs)
    load_weights(model, saved.state, source=saved.source, img_size=saved.img_size)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": saved.mean, "std": saved.std}
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
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes ``<stem>.safetensors``, then ``<stem>.json``; each is the old file or the new one, never half of one.

    Args:
        folder: Where to; made if missing.
        stem: ``backbone`` or ``model``.
        model_state: A state dict, on any device.
        name: timm's name of the model.
        kwargs: From :func:`export_kwargs`.
        mean: Of each channel, on pixel values in [0, 1].
        std: Likewise.
        extra: More keys for the JSON, e.g. ``classes``.

    Raises:
        RunError: The disk is full or the folder cannot be written; the old files are kept.
    """
    folder = Path(folder)
    info = {"name": name, "kwargs": kwargs, "mean": list(mean), "std": list(std), **(extra or {})}
    with replacing(folder / f"{stem}.json") as info_file, replacing(folder / f"{stem}.safetensors") as weights_file:
        info_file.write((json.dumps(info, indent=2) + "\n").encode())
        weights_file.write(save(_unshared(model_state), metadata={"format": "pt"}))


def _unshared(state):
    """Returns contiguous CPU tensors, no two in one memory (tied weights are written twice), as safetensors wants."""
    out, seen = {}, set()
    for key, value in state.items():
        value = value.detach().cpu().contiguous()
        memory = value.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != value.numel() * value.element_size():
            value = value.clone()
        seen.add(value.untyped_storage().data_ptr())
        out[key] = value
    return out


def _backbone_of(folder):
    missing = [n for n in ("backbone.safetensors", "backbone.json") if not (folder / n).is_file()]
    if missing and (folder / "last").is_dir():
        raise UserError(f"{folder}: this run has not written its {missing[0]} yet; let it finish, or {_WANTED}")
    if missing:
        raise UserError(f"{folder}: there is no {' and no '.join(missing)} in it; {_WANTED}")
    return folder / "backbone.safetensors"


def _read_state(path):
    try:
        state = load_state_dict(str(path), weights_only=True)
        state = {k: v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    except Exception as error:  # a damaged file fails in any way it likes
        said = f"{error} {error.__cause__ or ''}"
        if "nsupported global" in said:
            why = "holds Python objects, which are never run; save weights alone: torch.save(model.state_dict(), path)"
            raise UserError(f"{path}: {why}") from error
        raise UserError(f"{path}: cannot be read as a checkpoint ({type(error).__name__}); {_WANTED}") from error
    if not state:
        raise UserError(f"{path}: holds no weights; {_WANTED}")
    return state


def _read_info(path):
    """Returns the JSON beside a checkpoint, or nothing where there is none or it is not about a model."""
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({' '.join(str(error).split())})") from error
    if not (isinstance(info, dict) and isinstance(info.get("name"), str) and isinstance(info.get("kwargs"), dict)):
        return {}
    return info


def _check_enough(model, backbone, usable, unknown, source):
    """Raises UserError if less than half of the backbone, counted in numbers, is in the checkpoint by name."""
    weights = {k: p.numel() for k, p in model.named_parameters() if k in backbone}
    found = [k for k in weights if k in usable]
    if 2 * sum(weights[k] for k in found) >= sum(weights.values()):
        return
    missing = listed([k for k in weights if k not in usable], 3)
    raise UserError(
        f"{source}: is a checkpoint of another model: only {len(found)} of {len(weights)} weights fit "
        f"{model_name(model)}; missing: {missing}; unknown: {listed(unknown, 3) or 'none'}"
    )


def _check_all(model, missing, unknown, source):
    """Raises UserError if the backbone lacks weights, or weights lack a place."""
    surprises = {"missing": missing, "unknown": unknown}
    said = "; ".join(f"{len(names)} {kind}: {listed(names, 3)}" for kind, names in surprises.items() if names)
    if said:
        raise UserError(f"{source}: differs from {model_name(model)} and model.strict is true; {said}")


def _fit(model, key, value, target, img_size):
    """Returns the value in the model's shape and dtype, and whether it was resized; ValueError if it cannot be."""
    if target.is_floating_point():
        value = value.to(target.dtype)
    if _is_position(key) and target.ndim == 3 and (value.shape != target.shape or img_size is not None):
        fitted = _resize_tokens(model, value, target, img_size)
    elif value.shape == target.shape:
        return value, False
    elif _is_position(key) and target.ndim == 4:
        fitted = _resize_map(value, target)
    else:
        fitted = _resize_table(model, key, value, target)
    if fitted.shape != target.shape:
        raise ValueError(_shapes(value, target))
    return fitted, fitted is not value


def _is_position(key):
    return any(part.startswith(("pos_embed", "patch_pos")) for part in key.split(".")[-2:])


def _resize_tokens(model, value, target, img_size):
    """Absolute position embedding, [1, prefix + h w, D]."""
    if value.ndim != 3 or value.shape[::2] != target.shape[::2]:
        raise ValueError(_shapes(value, target))
    embed = getattr(model, "patch_embed", None)
    declared = getattr(model, "num_prefix_tokens", 0)
    grid = getattr(embed, "grid_size", None)
    if grid is None or not 0 <= target.shape[1] - math.prod(grid) <= max(declared, 2):
        squares = (_square(target.shape[1] - prefix) for prefix in (declared, 1, 2))
        grid = next((g for g in squares if g), None)  # the model does not say, or means another grid
    if grid is None:
        if value.shape == target.shape:
            return value
        raise ValueError(f"{_shapes(value, target)}, and the grid is unknown")
    prefix = target.shape[1] - math.prod(grid)  # 0 where class tokens have no position
    count = value.shape[1] - prefix
    old = _old_grid(embed, grid, img_size)
    if old is None or math.prod(old) != count:
        if value.shape == target.shape:
            return value
        old = _square(count)
    if old is None:
        raise ValueError(
            f"{value.shape[1]} positions less {prefix} prefix tokens are not a square, and the checkpoint does not say "
            "at which img_size it was trained"
        )
    if value.shape == target.shape and tuple(old) == tuple(grid):
        return value
    return resample_abs_pos_embed(value, list(grid), list(old), num_prefix_tokens=prefix)


def _old_grid(embed, grid, img_size):
    now = getattr(embed, "img_size", None)
    if img_size is None or now is None:
        return None
    return tuple(old * cells // side for old, cells, side in zip(pair(img_size), grid, pair(now), strict=True))


def _square(count):
    side = math.isqrt(max(count, 0))
    return (side, side) if side and side * side == count else None


def _resize_map(value, target):
    """Absolute position embedding kept as a map, [1, H, W, D] or [1, D, H, W]."""
    if value.ndim == 4:
        (_, a, b, c), (_, x, y, z) = value.shape, target.shape
        if c == z and a * y == b * x:  # the same aspect: not NesT's [1, blocks, tokens, D]
            return resample_abs_pos_embed_nhwc(value, [x, y])
        if a == x and b * z == c * y:
            return resample_abs_pos_embed_nhwc(value.permute(0, 2, 3, 1), [y, z]).permute(0, 3, 1, 2)
    raise ValueError(_shapes(value, target))


def _resize_table(model, key, value, target):
    """Relative positions: Swin's and BEiT's [L, heads], MaxViT's [heads, h, w], LeViT's [heads, L], MViT's [L, D]."""
    owner, _, leaf = key.rpartition(".")
    if value.ndim == target.ndim and leaf == "relative_position_bias_table":
        window = getattr(model.get_submodule(owner), "window_size", None)
        heads = 1 if target.ndim == 2 else 0
        if window is not None and value.shape[heads] == target.shape[heads]:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # timm's interpolation uses what torch deprecates
                    return resize_rel_pos_bias_table(value, new_window_size=tuple(window), new_bias_shape=target.shape)
            except (ValueError, AssertionError, RuntimeError):
                raise ValueError(f"{_shapes(value, target)}, not of square windows") from None
    if value.ndim == target.ndim == 2 and leaf == "attention_biases" and value.shape[0] == target.shape[0]:
        if _square(value.shape[1]) and _square(target.shape[1]):
            return resize_rel_pos_bias_table_levit(value.t(), target.t().shape).t()
    if value.ndim == target.ndim == 2 and leaf in ("rel_pos_h", "rel_pos_w") and value.shape[1] == target.shape[1]:
        return interpolate(value.float().t()[None], size=target.shape[0], mode="linear")[0].t().to(value.dtype)
    raise ValueError(_shapes(value, target))


def _shapes(value, target):
    there, here = ("x".join(map(str, t.shape)) or "a number" for t in (value, target))
    return f"{there} in the checkpoint, {here} in the model"
