"""Backbones over timm: any model that timm names, at any image size that the model can take."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import timm
import torch
from torch import nn

from idmm.errors import SizeError, UserError, nearest

Size = int | tuple[int, int] | list[int]

# keys that model.kwargs must not hold, and what to do instead
_RESERVED = {
    "pretrained": "weights come through --init",
    "checkpoint_path": "weights come through --init",
    "features_only": "idmm needs the whole model",
    "out_indices": "idmm needs the whole model",
    "num_classes": "the number of classes comes from the data",
    "img_size": "the image size comes from views.size, train.size or stages",
    "in_chans": "give data.in_chans",
    "drop_path_rate": "give model.drop_path",
    "drop_path": "give model.drop_path",
    "name": "give model.name",
}
# what lets models that are built for one size take others: ViTs, then Swin
_DYNAMIC = {"dynamic_img_size": True, "strict_img_size": False}
_TRIED = {"img_size": 224, "drop_path_rate": 0.1, **_DYNAMIC}
# what constructors and forward passes of models raise for arguments and sizes that they cannot take
_MODEL_ERRORS = (TypeError, AssertionError, ValueError, RuntimeError, LookupError, ArithmeticError, AttributeError)


def create_backbone(
    name: str,
    img_size: Size | None = None,
    *,
    drop_path: float | None = None,
    dynamic_size: bool = False,
    **kwargs,
) -> nn.Module:
    """Builds a timm model with fresh weights (seed the global generators around it), without a classifier.

    Args:
        name: Any model name of timm, or one of ours.
        img_size: Image side, or (height, width), in pixels; passed on only where the model is built for one size
            (ViT, Swin, ...), and tried with one black image. None: the model's own.
        drop_path: Stochastic depth rate in [0, 1), ignored where the model has none. None: the model's own.
        dynamic_size: Whether it is to take images of other sizes than ``img_size`` as well, with position embeddings
            resampled in every forward pass, where timm has that (:func:`try_size` tells). Its weights are the same.
        **kwargs: For the model's constructor; ``num_classes`` is 0 unless given.

    Returns:
        The model, in training mode; [B, in_chans, H, W] -> [B, d], d from :func:`feature_width`.

    Raises:
        UserError: An unknown name, an argument that the model refuses, a model without pooled features, or (SizeError)
            a size that it cannot take.
    """
    check_name(name)
    given = {"num_classes": 0, **kwargs}
    optional = {"img_size": tuple(img_size) if isinstance(img_size, list) else img_size, "drop_path_rate": drop_path}
    optional |= _DYNAMIC if dynamic_size else {}
    optional = {k: v for k, v in optional.items() if v is not None and k not in given and accepts(name, k)}
    try:
        model = timm.create_model(name, **given, **optional)
    except _MODEL_ERRORS as error:
        raise _build_error(name, given, optional, error) from error
    if img_size is not None:
        _try_image(model, name, img_size, given)
    return model


def feature_width(model: nn.Module) -> int:
    """Returns the width d of a model's features [B, d] without a classifier, which heads are sized by.

    It is that of the forward pass in :func:`create_backbone`; else timm's ``head_hidden_size``, which is not
    ``num_features`` where layers stand between pooling and classifier (MobileNetV3, VGG, ...).
    """
    return getattr(model, "feature_width", None) or getattr(model, "head_hidden_size", None) or model.num_features


def check_name(name: str) -> None:
    """Raises UserError, with the nearest name, unless timm (with ours registered) knows ``name``."""
    if not (isinstance(name, str) and name and timm.is_model(name)):
        hint = nearest(str(name), timm.list_models()) or "; timm.list_models() lists the names"
        raise UserError(f"model.name: {name!r} is unknown{hint}")


def check_kwargs(kwargs: dict[str, Any]) -> None:
    """Raises UserError if ``model.kwargs`` holds what has a field of its own, such as ``img_size``."""
    if faults := [
        f"model.kwargs: {key} is {kwargs[key]!r}; {reason}, leave it out"
        for key, reason in _RESERVED.items()
        if key in kwargs
    ]:
        raise UserError(*faults)


def export_kwargs(
    name: str, kwargs: dict[str, Any], img_size: Size | None, num_classes: int = 0, in_chans: int = 3
) -> dict[str, Any]:
    """Returns the arguments with which ``timm.create_model(name, **kwargs)`` alone rebuilds the model.

    They are the user's ``model.kwargs`` with what else the model was built with: the image size (pixels) where it takes
    one, and channels other than 3.
    """
    out = {k: v for k, v in kwargs.items() if k not in _RESERVED}
    out["num_classes"] = num_classes
    if in_chans != 3:
        out["in_chans"] = in_chans
    if img_size is not None and accepts(name, "img_size"):
        out["img_size"] = list(img_size) if isinstance(img_size, (tuple, list)) else img_size
    return out


def classifiers(model: nn.Module) -> list[nn.Module]:
    """Returns the model's classifiers: one, or as many as it averages the logits of (distilled DeiT has two)."""
    found = model.get_classifier()
    return list(found) if isinstance(found, (tuple, list, nn.ModuleList)) else [found]


def linear_classifiers(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Returns the same where each is linear in the features [B, d] of ``forward_head(..., pre_logits=True)``, else [].

    It may be a 1x1 convolution on [B, d, 1, 1]. What sees features of another width (CrossViT), or has layers of its
    own before it (LeViT's norm) or beside it (VOLO's tokens), is not.
    """
    found, width = classifiers(model), feature_width(model)
    for part in found:
        linear = isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1))
        if not linear or part.bias is None or part.weight.shape[1] != width:
            return []
    own, backbone = {id(p) for part in found for p in part.parameters()}, backbone_keys(model)
    return found if all(id(p) in own or name in backbone for name, p in model.named_parameters()) else []


def has_linear_classifier(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a model has :func:`linear_classifiers`; one that cannot be built so says why when it is."""
    try:
        return bool(linear_classifiers(build_on_meta(name, {**kwargs, "num_classes": 2})))
    except _MODEL_ERRORS:
        return True


def classifier_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Returns how the names of the classifier's weights begin, e.g. ``('head.', 'head_dist.')``."""
    names = (getattr(model, "pretrained_cfg", None) or {}).get("classifier")
    if not names:
        heads = classifiers(model)
        names = [n for n, module in model.named_modules() if n and any(module is h for h in heads)]
    return tuple(f"{n}." for n in ([names] if isinstance(names, str) else names))


def backbone_keys(model: nn.Module) -> set[str]:
    """Returns the keys of the model's state dict that the same model with ``num_classes=0`` has."""
    tensors = [*model.parameters(), *model.buffers()]
    bare = copy.deepcopy(model, {id(t): t.detach().to("meta") for t in tensors})  # the structure, not the weights
    bare.reset_classifier(0)
    return set(bare.state_dict())


def backbone_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the state dict without the classifier: what a ``num_classes=0`` model loads strictly."""
    keys = backbone_keys(model)
    return {k: v for k, v in model.state_dict().items() if k in keys}


def model_name(model: nn.Module) -> str:
    """Returns the name by which timm built the model, for messages."""
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(model).__name__


def prefers_channels_last(model: nn.Module) -> bool:
    """Whether a model trains faster with the channels of a pixel side by side: one that pools or batch-normalises maps.

    Measured on one x86 core (benchmarks/backbone_speed.py); models of attention alone are the same either way.
    """
    return any(isinstance(module, (nn.MaxPool2d, nn.BatchNorm2d)) for module in model.modules())


@contextlib.contextmanager
def one_image_norms(model: nn.Module, images: torch.Tensor | Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets one image alone through a model in training, as a run's last batch may be: ``images`` [1, C, H, W].

    A batch norm that would see one value a channel, which torch refuses (a map of 1x1, which most ConvNets make of 32
    pixels), uses its running statistics and leaves them alone. Those with larger maps work as ever.

    Args:
        model: Whose batch norms.
        images: What it is given inside the block, [B, C, H, W] or several such.
    """
    if all(len(part) > 1 for part in ([images] if isinstance(images, torch.Tensor) else images)):
        yield
        return
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    norms = [m for m in norms if not isinstance(m, nn.SyncBatchNorm)]  # they see the images of other processes

    def spare(norm, args):
        norm.train(args[0].numel() > args[0].shape[1])

    hooks = [norm.register_forward_pre_hook(spare) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm in norms:
            norm.train()


def pair(size: Size) -> tuple[int, int]:
    """Returns a size as (height, width)."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


@functools.cache
def accepts(name: str, key: str) -> bool:
    """Whether the model's constructor has an argument: ``img_size`` (ViT, Swin; ResNet takes any as it is),
    ``drop_path_rate``, or one of those that let it take several sizes.

    timm's entry points hide its signature, so it is tried.
    """
    try:
        build_on_meta(name, {"num_classes": 0, key: _TRIED[key]})
    except _MODEL_ERRORS as error:
        return not isinstance(error, TypeError)  # others: it has the argument, and does not like the value
    return True


def build_on_meta(name, kwargs):
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return timm.create_model(name, **kwargs)


def _build_error(name, given, optional, error):
    """Returns what to raise for a failed build, by what is wrong: the size, the arguments or the model itself."""
    if "img_size" in optional:
        try:
            build_on_meta(name, {**given, **optional, "img_size": None})  # timm leaves None out
        except _MODEL_ERRORS as other:
            error = other
        else:
            return _size_error(name, optional["img_size"], error)
    if own := {key: value for key, value in given.items() if key not in _RESERVED}:
        return UserError(f"model.kwargs: {name} refuses {own!r}: {_one_line(error)}")
    return UserError(f"model.name: {name!r} cannot be built: {_one_line(error)}")


def black_image(model: nn.Module, in_chans: int, size: Size) -> torch.Tensor:
    """Returns zeros [1, in_chans, H, W] of a size (pixels), where the model's weights are, to try it on."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()))
    return torch.zeros(1, in_chans, *pair(size), device=tensor.device)


def try_size(model: nn.Module, name: str, img_size: Size, in_chans: int = 3) -> torch.Tensor:
    """Sends a black image through a model in training mode, named ``name``; returns what comes out.

    Raises:
        SizeError: The model cannot take images of that size (pixels).
    """
    height, width = pair(img_size)
    embed = getattr(model, "patch_embed", None)
    if isinstance(embed, timm.layers.PatchEmbed) and not embed.dynamic_img_pad and accepts(name, "img_size"):
        patch = pair(embed.patch_size)
        if height % patch[0] or width % patch[1]:  # timm would cut the border off silently
            raise _size_error(name, img_size, f"wanted are multiples of its patch, {patch[0]}x{patch[1]} pixels")
    try:
        with torch.no_grad():
            output = model.eval()(black_image(model, in_chans, img_size))
    except _MODEL_ERRORS as error:
        raise _size_error(name, img_size, error) from error
    model.train()
    return output


def _try_image(model, name, img_size, given):
    """Tries a size and keeps the features' width; UserError unless all of it comes out as [1, d]."""
    output = try_size(model, name, img_size, given.get("in_chans", 3))
    if len(shape := list(getattr(output, "shape", []))) != 2:
        own = {key: value for key, value in given.items() if key not in _RESERVED}
        source = f"model.kwargs: {name} with {own!r}" if own else f"model.name: {name!r}"
        raise UserError(f"{source} gives {shape or type(output)} for an image; wanted are pooled features, [1, d]")
    if given["num_classes"] == 0:
        model.feature_width = shape[1]


def _size_error(name, img_size, why):
    height, width = pair(img_size)
    why = _one_line(why) if isinstance(why, Exception) else why
    return SizeError(f"image size {height}x{width}: {name} cannot take it: {why}")


def _one_line(error):
    return " ".join(str(error).split())[:200] or type(error).__name__
