"""Build backbones with timm: any of its models, at any image size that the model accepts."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any, cast

import timm
import torch
from timm.layers import PatchEmbed, to_2tuple
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from idmm.errors import Fault, SizeError, UserError
from idmm.models.base import Backbone, Tensors, any_tensor
from idmm.text import listed, nearest

Size = int | tuple[int, int] | list[int]  # side, or height and width, in pixels
Kwargs = dict[str, Any]  # of a model's constructor

# keys that model.kwargs must not have, and what to do instead
_RESERVED = {
    "pretrained": "weights come from --init",
    "checkpoint_path": "weights come from --init",
    "features_only": "idmm needs the whole model",
    "out_indices": "idmm needs the whole model",
    "num_classes": "the number of classes comes from the data",
    "img_size": "the image size comes from views.size, train.size or stages",
    "in_chans": "use data.in_chans",
    "drop_path_rate": "use model.drop_path",
    "drop_path": "use model.drop_path",
    "name": "use model.name",
}
_LOADING = ("pretrained", "checkpoint_path")
# that idmm calls
_INTERFACE = ("forward_features", "forward_head", "get_classifier", "reset_classifier")
# for several sizes: of ViTs, and of Swin
_DYNAMIC = {"dynamic_img_size": True, "strict_img_size": False}
_PROBES = {"img_size": 224, "drop_path_rate": 0.1, **_DYNAMIC}
# what models raise for arguments and sizes that they do not accept
_MODEL_ERRORS = (
    TypeError,
    AssertionError,
    ValueError,
    RuntimeError,
    LookupError,
    ArithmeticError,
    AttributeError,
)


def create_backbone(
    name: str,
    img_size: Size | None = None,
    *,
    drop_path: float | None = None,
    dynamic_size: bool = False,
    **kwargs: Any,
) -> Backbone:
    """Build a timm model with fresh weights from the global generators, without a classifier.

    Args:
        name: Any model name of timm, or one of ours.
        img_size: Image side, or (height, width), in pixels. It is passed on only to models that are
            built for one size (ViT, Swin, ...), and tried with one black image. None: the model's
            own.
        drop_path: Stochastic depth rate in [0, 1), ignored by models without it. None: the model's
            own.
        dynamic_size: Accept images of other sizes than ``img_size``, too, if timm supports it.
            Position embeddings are then resampled in every forward pass. The weights are the same.
        **kwargs: For the model's constructor. ``num_classes`` is 0 by default.

    Returns:
        The model in training mode, [B, in_chans, H, W] -> [B, d], with d from
        :func:`feature_width`.

    Raises:
        UserError: An unknown name, an argument that the model refuses, a model without pooled
            features, or (SizeError) a size that it does not accept.
    """
    check_name(name)
    _refuse_loading(name, kwargs)
    kwargs = {"num_classes": 0, **kwargs}
    optional: Kwargs = {"img_size": img_size, "drop_path_rate": drop_path}
    if dynamic_size:
        optional |= _DYNAMIC
    optional = _accepted(name, kwargs, optional)
    try:
        # checked below
        model = cast(Backbone, timm.create_model(name, **kwargs, **optional))
    except _MODEL_ERRORS as error:
        raise _build_error(name, kwargs, optional, error) from error
    _check_interface(name, model)
    if img_size is not None:
        output = try_size(model, name, img_size, kwargs.get("in_chans", 3))
        width = _pooled_width(name, output)
        if kwargs["num_classes"] == 0:
            model.feature_width = width
    return model


def _refuse_loading(name: str, kwargs: Kwargs) -> None:
    """Raise UserError if arguments would load other weights."""
    used = [key for key in _LOADING if kwargs.get(key)]
    if used:
        raise UserError.of(
            "model.kwargs",
            f"{name} has {listed(used)}, but {_RESERVED[used[0]]}",
            "Leave it out",
        )


def _check_interface(name: str, model: Backbone) -> None:
    """Raise UserError if a model lacks methods that idmm calls."""
    missing = [method for method in _INTERFACE if not hasattr(model, method)]
    if missing:
        raise UserError.of(
            "model.name", f"{name!r} has no method {listed(missing)}, expected timm's interface"
        )


def _accepted(name: str, kwargs: Kwargs, optional: Kwargs) -> Kwargs:
    """Return the optional arguments that the model accepts, are not None and not in kwargs."""
    accepted = {}
    for key, value in optional.items():
        if value is not None and key not in kwargs and accepts(name, key):
            accepted[key] = tuple(value) if isinstance(value, list) else value
    return accepted


def _pooled_width(name: str, output: object) -> int:
    """Return d of a model's output for an image, [1, d]. UserError if it is something else."""
    if isinstance(output, Tensor) and output.ndim == 2:
        return output.shape[1]
    returned = list(output.shape) if isinstance(output, Tensor) else type(output)
    raise UserError.of(
        "model.name",
        f"{name!r} with its model.kwargs returns {returned} for an image, "
        "expected pooled features, [1, d]",
    )


def feature_width(model: Backbone) -> int:
    """Return the width d of a model's features [B, d] without a classifier.

    It comes from the forward pass in :func:`create_backbone`, else from timm's
    ``head_hidden_size``. ``num_features`` differs if there are layers between pooling and
    classifier (MobileNetV3, VGG, ...).
    """
    # not all of timm's models have these two
    width = getattr(model, "feature_width", None) or getattr(model, "head_hidden_size", None)
    return width or model.num_features


def check_name(name: str) -> None:
    """Raise UserError, with the nearest name, unless timm or idmm has a model ``name``."""
    if isinstance(name, str) and name and timm.is_model(name):
        return
    hint = nearest(str(name), timm.list_models()) or "timm.list_models() lists the names"
    raise UserError.of("model.name", f"{name!r} is unknown", hint)


def check_kwargs(kwargs: Kwargs) -> None:
    """Raise UserError if ``model.kwargs`` has keys with a config field of their own."""
    faults = []
    for key, remedy in _RESERVED.items():
        if key in kwargs:
            faults.append(
                Fault("model.kwargs", f"{key} is {kwargs[key]!r}; {remedy}, leave it out")
            )
    if faults:
        raise UserError(*faults)


def export_kwargs(name: str, kwargs: Kwargs, img_size: Size | None, in_chans: int = 3) -> Kwargs:
    """Return arguments with which ``timm.create_model`` rebuilds the model without a classifier.

    They are the user's ``model.kwargs`` with the image size (pixels), if the model has this
    argument, and channels other than 3.
    """
    exported = {key: value for key, value in kwargs.items() if key not in _RESERVED}
    exported["num_classes"] = 0
    if in_chans != 3:
        exported["in_chans"] = in_chans
    if img_size is not None and accepts(name, "img_size"):
        exported["img_size"] = img_size
    return exported


def classifiers(model: Backbone) -> list[nn.Module]:
    """Return the classifiers: one, or all whose logits it averages (distilled DeiT has two)."""
    classifier = model.get_classifier()
    if isinstance(classifier, (tuple, list, nn.ModuleList)):
        return list(classifier)
    return [classifier]


def parameter_counts(model: Backbone) -> dict[str, int]:
    """Return the numbers of parameters, ``params``, and of those outside the classifiers.

    The latter is ``backbone_params``.
    """
    total = _size(model)
    return {"params": total, "backbone_params": total - sum(map(_size, classifiers(model)))}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def linear_classifiers(model: Backbone) -> list[nn.Linear | nn.Conv2d]:
    """Return the classifiers if all are linear in the pooled features [B, d].

    These are what ``forward_head(..., pre_logits=True)`` returns. A 1x1 convolution on [B, d, 1, 1]
    is linear, too. The result is [] if a classifier has inputs of another width (CrossViT), or
    layers before it (LeViT's norm) or in parallel (VOLO's tokens).
    """
    width = feature_width(model)
    layers: list[nn.Linear | nn.Conv2d] = []
    for layer in classifiers(model):
        if not isinstance(layer, nn.Linear | nn.Conv2d) or layer.bias is None:
            return []
        if layer.weight.shape[1:].numel() != width:
            return []
        layers.append(layer)
    linear_weights = {parameter for layer in layers for parameter in layer.parameters()}
    backbone = backbone_keys(model)
    for name, parameter in model.named_parameters():
        if parameter not in linear_weights and name not in backbone:
            return []
    return layers


def has_linear_classifier(name: str, kwargs: Kwargs) -> bool:
    """Return whether a model has :func:`linear_classifiers`.

    True if it cannot be built: the build explains why.
    """
    try:
        return bool(linear_classifiers(_build_on_meta(name, {**kwargs, "num_classes": 2})))
    except _MODEL_ERRORS:
        return True


def backbone_keys(model: Backbone) -> set[str]:
    """Return the keys of the model's state dict that remain with ``num_classes=0``."""
    tensors = [*model.parameters(), *model.buffers()]
    # the structure, not the weights
    bare = copy.deepcopy(model, {id(tensor): tensor.detach().to("meta") for tensor in tensors})
    bare.reset_classifier(0)
    return set(bare.state_dict())


def backbone_state(model: Backbone) -> Tensors:
    """Return the state dict without the classifier, for strict loading with ``num_classes=0``."""
    keys = backbone_keys(model)
    return {key: value for key, value in model.state_dict().items() if key in keys}


def model_name(model: nn.Module) -> str:
    """Return timm's name of the model, for messages."""
    config = getattr(model, "pretrained_cfg", None) or {}  # models of other packages lack it
    return config.get("architecture") or type(model).__name__


def prefers_channels_last(model: nn.Module) -> bool:
    """Return whether a model is faster in channels-last format: max pooling or batch norm.

    Measured on one x86 core (benchmarks/backbone_speed.py). Models of attention only have the same
    speed in both.
    """
    return any(isinstance(module, (nn.MaxPool2d, nn.BatchNorm2d)) for module in model.modules())


def to_faster_format(model: nn.Module) -> None:
    """Put a model's weights into the memory format in which it is faster."""
    if prefers_channels_last(model):
        model.to(memory_format=torch.channels_last)


@contextlib.contextmanager
def one_image_norms(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Let a batch of one image pass through batch norms in training.

    A run's last batch may have one. torch refuses a batch norm with one value per channel (a 1x1
    map, as in most ConvNets at 32 pixels). Such a norm uses its running statistics unchanged. Norms
    with larger maps work as usual.

    Args:
        model: Its batch norms are used.
        images: The inputs inside the block, [B, C, H, W].
    """

    def train_if_several_values(norm: nn.Module, inputs: tuple[Tensor]) -> None:
        norm.train(inputs[0].numel() > inputs[0].shape[1])

    with contextlib.ExitStack() as hooks:  # which it removes
        for module in model.modules():
            # synchronised ones have images of other processes
            if isinstance(module, nn.SyncBatchNorm) or not isinstance(module, _BatchNorm):
                continue
            if module.training and len(images) == 1:
                hooks.callback(module.train)
                hooks.enter_context(module.register_forward_pre_hook(train_if_several_values))
        yield


@functools.cache
def accepts(name: str, key: str) -> bool:
    """Return whether the model's constructor has an argument ``key`` of :data:`_PROBES`.

    An example is ``img_size`` (ViT, Swin). timm's entry points hide the signature, so a build is
    tried.
    """
    try:
        _build_on_meta(name, {"num_classes": 0, key: _PROBES[key]})
    except _MODEL_ERRORS as error:
        return not isinstance(error, TypeError)  # other errors are about the value
    return True


def _build_on_meta(name: str, kwargs: Kwargs) -> Backbone:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return cast(Backbone, timm.create_model(name, **kwargs))


def _build_error(name: str, kwargs: Kwargs, optional: Kwargs, error: Exception) -> UserError:
    """Return the error of a failed build: about the size, the arguments or the model itself."""
    if "img_size" in optional:
        try:
            _build_on_meta(name, {**kwargs, **optional, "img_size": None})  # timm ignores None
        except _MODEL_ERRORS as other:
            error = other
        else:
            return _size_error(name, optional["img_size"], _one_line(error))
    model_kwargs = {key: value for key, value in kwargs.items() if key not in _RESERVED}
    if model_kwargs:
        return UserError.of("model.kwargs", f"{name} refuses {model_kwargs!r}: {_one_line(error)}")
    return UserError.of("model.name", f"{name!r} cannot be built: {_one_line(error)}")


def black_image(model: nn.Module, in_chans: int, size: Size) -> Tensor:
    """Return zeros [1, in_chans, H, W] of a size (pixels) on the model's device."""
    return torch.zeros(1, in_chans, *to_2tuple(size), device=any_tensor(model).device)


def try_size(model: Backbone, name: str, img_size: Size, in_chans: int = 3) -> Tensor:
    """Return a model's output for a black image. The model ends in training mode.

    Raises:
        SizeError: The model, called ``name``, does not accept images of that size (pixels).
    """
    height, width = to_2tuple(img_size)
    embed = getattr(model, "patch_embed", None)  # of transformers
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad and accepts(name, "img_size"):
        rows, columns = to_2tuple(embed.patch_size)
        if height % rows or width % columns:  # timm would crop the border silently
            raise _size_error(
                name, img_size, f"expected a multiple of its patch, {rows}x{columns} pixels"
            )
    try:
        with torch.no_grad():
            output: Tensor = model.eval()(black_image(model, in_chans, img_size))
    except _MODEL_ERRORS as error:
        raise _size_error(name, img_size, _one_line(error)) from error
    model.train()
    return output


def _size_error(name: str, img_size: Size, reason: str) -> SizeError:
    height, width = to_2tuple(img_size)
    return SizeError.of("", f"image size {height}x{width}: {name} does not accept it: {reason}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
