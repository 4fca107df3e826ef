"""Build backbones with timm: any of its models, at any image size that the model accepts."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator

import timm
import torch
from timm.layers import to_2tuple
from torch import nn

from idmm.errors import SizeError, UserError
from idmm.text import listed, nearest

Size = int | tuple[int, int] | list[int]

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
    **kwargs,
) -> nn.Module:
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
    if used := [key for key in _LOADING if kwargs.get(key)]:
        raise UserError(
            f"model.kwargs: {name} has {listed(used)}, but {_RESERVED[used[0]]}. Leave it out"
        )
    kwargs = {"num_classes": 0, **kwargs}
    optional = {
        "img_size": tuple(img_size) if isinstance(img_size, list) else img_size,
        "drop_path_rate": drop_path,
    }
    optional |= _DYNAMIC if dynamic_size else {}
    optional = {
        k: v for k, v in optional.items() if v is not None and k not in kwargs and accepts(name, k)
    }
    try:
        model = timm.create_model(name, **kwargs, **optional)
    except _MODEL_ERRORS as error:
        raise _build_error(name, kwargs, optional, error) from error
    if missing := [method for method in _INTERFACE if not hasattr(model, method)]:
        raise UserError(
            f"model.name: {name!r} has no method {listed(missing)}, expected timm's interface"
        )
    if img_size is not None:
        output = try_size(model, name, img_size, kwargs.get("in_chans", 3))
        if len(shape := list(getattr(output, "shape", []))) != 2:
            what = f"{shape or type(output)} for an image, expected pooled features, [1, d]"
            raise UserError(f"model.name: {name!r} with its model.kwargs returns {what}")
        if kwargs["num_classes"] == 0:
            model.feature_width = shape[1]
    return model


def feature_width(model: nn.Module) -> int:
    """Return the width d of a model's features [B, d] without a classifier.

    It comes from the forward pass in :func:`create_backbone`, else from timm's
    ``head_hidden_size``. ``num_features`` differs if there are layers between pooling and
    classifier (MobileNetV3, VGG, ...).
    """
    return (
        getattr(model, "feature_width", None)
        or getattr(model, "head_hidden_size", None)
        or model.num_features
    )


def check_name(name: str) -> None:
    """Raise UserError, with the nearest name, unless timm or idmm has a model ``name``."""
    if not (isinstance(name, str) and name and timm.is_model(name)):
        hint = nearest(str(name), timm.list_models()) or ". timm.list_models() lists the names"
        raise UserError(f"model.name: {name!r} is unknown{hint}")


def check_kwargs(kwargs: dict) -> None:
    """Raise UserError if ``model.kwargs`` has keys with a config field of their own, such as
    ``img_size``."""
    if used := [key for key in _RESERVED if key in kwargs]:
        raise UserError(
            *(
                f"model.kwargs: {key} is {kwargs[key]!r}; {_RESERVED[key]}, leave it out"
                for key in used
            )
        )


def export_kwargs(name: str, kwargs: dict, img_size: Size | None, in_chans: int = 3) -> dict:
    """Return arguments so that ``timm.create_model(name, **kwargs)`` rebuilds the model without a
    classifier.

    They are the user's ``model.kwargs`` with the image size (pixels), if the model has this
    argument, and channels other than 3.
    """
    exported = {k: v for k, v in kwargs.items() if k not in _RESERVED} | {"num_classes": 0}
    if in_chans != 3:
        exported["in_chans"] = in_chans
    if img_size is not None and accepts(name, "img_size"):
        exported["img_size"] = img_size
    return exported


def classifiers(model: nn.Module) -> list[nn.Module]:
    """Return the model's classifiers: one, or all whose logits it averages (distilled DeiT has
    two)."""
    classifier = model.get_classifier()
    if isinstance(classifier, (tuple, list, nn.ModuleList)):
        return list(classifier)
    return [classifier]


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters, ``params``, and of those outside the classifiers,
    ``backbone_params``."""
    classifier = sum(
        parameter.numel() for layer in classifiers(model) for parameter in layer.parameters()
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"params": total, "backbone_params": total - classifier}


def linear_classifiers(model: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the classifiers if all are linear in the features [B, d] of ``forward_head(...,
    pre_logits=True)``.

    A 1x1 convolution on [B, d, 1, 1] is linear, too. The result is [] if a classifier has inputs of
    another width (CrossViT), or layers before it (LeViT's norm) or in parallel (VOLO's tokens).
    """
    layers = classifiers(model)
    width = feature_width(model)
    for layer in layers:
        linear = isinstance(layer, nn.Linear) or (
            isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
        )
        if not linear or layer.bias is None or layer.weight.shape[1] != width:
            return []
    linear_weights = {id(p) for layer in layers for p in layer.parameters()}
    backbone = backbone_keys(model)
    covered = all(
        id(p) in linear_weights or name in backbone for name, p in model.named_parameters()
    )
    if covered:
        return layers
    return []


def has_linear_classifier(name: str, kwargs: dict) -> bool:
    """Return whether a model has :func:`linear_classifiers`. True if it cannot be built: the build
    explains why."""
    try:
        return bool(linear_classifiers(_build_on_meta(name, {**kwargs, "num_classes": 2})))
    except _MODEL_ERRORS:
        return True


def backbone_keys(model: nn.Module) -> set[str]:
    """Return the keys of the model's state dict that remain with ``num_classes=0``."""
    tensors = [*model.parameters(), *model.buffers()]
    # the structure, not the weights
    bare = copy.deepcopy(model, {id(t): t.detach().to("meta") for t in tensors})
    bare.reset_classifier(0)
    return set(bare.state_dict())


def backbone_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict without the classifier, for strict loading with ``num_classes=0``."""
    keys = backbone_keys(model)
    return {k: v for k, v in model.state_dict().items() if k in keys}


def model_name(model: nn.Module) -> str:
    """Return timm's name of the model, for messages."""
    return (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or type(
        model
    ).__name__


def prefers_channels_last(model: nn.Module) -> bool:
    """Return whether a model trains faster in channels-last format: it has max pooling or batch
    norm.

    Measured on one x86 core (benchmarks/backbone_speed.py). Models of attention only have the same
    speed in both.
    """
    return any(isinstance(module, (nn.MaxPool2d, nn.BatchNorm2d)) for module in model.modules())


@contextlib.contextmanager
def one_image_norms(model: nn.Module, images: torch.Tensor) -> Iterator[None]:
    """Let a batch of one image pass through batch norms in training, as a run's last batch may have
    one.

    torch refuses a batch norm with one value per channel (a 1x1 map, as in most ConvNets at 32
    pixels). Such a norm uses its running statistics unchanged. Norms with larger maps work as
    usual.

    Args:
        model: Its batch norms are used.
        images: The inputs inside the block, [B, C, H, W].
    """
    norms = [
        m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training
    ]
    # synchronised ones have images of other processes
    norms = [m for m in norms if len(images) == 1 and not isinstance(m, nn.SyncBatchNorm)]

    def train_if_several_values(norm, args):
        norm.train(args[0].numel() > args[0].shape[1])

    with contextlib.ExitStack() as hooks:  # which it removes
        for norm in norms:
            hooks.callback(norm.train)
            hooks.enter_context(norm.register_forward_pre_hook(train_if_several_values))
        yield


@functools.cache
def accepts(name: str, key: str) -> bool:
    """Return whether the model's constructor has an argument ``key`` of :data:`_PROBES`, e.g.
    ``img_size`` (ViT, Swin).

    timm's entry points hide the signature, so a build is tried.
    """
    try:
        _build_on_meta(name, {"num_classes": 0, key: _PROBES[key]})
    except _MODEL_ERRORS as error:
        return not isinstance(error, TypeError)  # other errors are about the value
    return True


def _build_on_meta(name: str, kwargs: dict) -> nn.Module:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return timm.create_model(name, **kwargs)


def _build_error(name: str, kwargs: dict, optional: dict, error: Exception) -> UserError:
    """Return the error of a failed build: about the size, the arguments or the model itself."""
    if "img_size" in optional:
        try:
            _build_on_meta(name, {**kwargs, **optional, "img_size": None})  # timm ignores None
        except _MODEL_ERRORS as other:
            error = other
        else:
            return _size_error(name, optional["img_size"], _one_line(error))
    if model_kwargs := {key: value for key, value in kwargs.items() if key not in _RESERVED}:
        return UserError(f"model.kwargs: {name} refuses {model_kwargs!r}: {_one_line(error)}")
    return UserError(f"model.name: {name!r} cannot be built: {_one_line(error)}")


def black_image(model: nn.Module, in_chans: int, size: Size) -> torch.Tensor:
    """Return zeros [1, in_chans, H, W] of a size (pixels) on the model's device."""
    tensor = next(itertools.chain(model.parameters(), model.buffers()))
    return torch.zeros(1, in_chans, *to_2tuple(size), device=tensor.device)


def try_size(model: nn.Module, name: str, img_size: Size, in_chans: int = 3) -> torch.Tensor:
    """Return a model's output for a black image. The model ends in training mode.

    Raises:
        SizeError: The model, called ``name``, does not accept images of that size (pixels).
    """
    height, width = to_2tuple(img_size)
    embed = getattr(model, "patch_embed", None)
    if (
        isinstance(embed, timm.layers.PatchEmbed)
        and not embed.dynamic_img_pad
        and accepts(name, "img_size")
    ):
        patch = to_2tuple(embed.patch_size)
        if height % patch[0] or width % patch[1]:  # timm would crop the border silently
            raise _size_error(
                name, img_size, f"expected a multiple of its patch, {patch[0]}x{patch[1]} pixels"
            )
    try:
        with torch.no_grad():
            output = model.eval()(black_image(model, in_chans, img_size))
    except _MODEL_ERRORS as error:
        raise _size_error(name, img_size, _one_line(error)) from error
    model.train()
    return output


def _size_error(name: str, img_size: Size, why: str) -> SizeError:
    height, width = to_2tuple(img_size)
    return SizeError(f"image size {height}x{width}: {name} does not accept it: {why}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
