"""The final embeddings of any timm model as a grid over the image."""

import contextlib
import math
import re
from collections.abc import Iterator

from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.build import model_name

_BLOCK = re.compile(r"(^|\.)blocks(\.\d+)+$")  # timm's names of blocks: blocks.0, layers.0.blocks.1, blocks.0.1
_SLACK = 0.25  # how far a grid's aspect may be from the image's: sides are rounded up to whole patches (natural log)


def token_grid(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the final embeddings of each place in the images, without class and distillation tokens.

    Rows go down the image and columns across it. A vision transformer's tokens are taken as they leave its last norm,
    a convolutional network's as its last feature map.

    Args:
        model: Any timm model whose ``forward_features`` keeps places: tokens, or maps with channels first or last.
        images: [B, C, H, W].

    Returns:
        [B, D, h, w].

    Raises:
        UserError: Its features have no places.
    """
    return as_grid(model, model.forward_features(images), images.shape[-2:])


def logits_and_grid(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what ``model(images)`` does, [B, K], and :func:`token_grid`, of one forward pass."""
    features = model.forward_features(images)
    return model.forward_head(features), as_grid(model, features, images.shape[-2:])


@contextlib.contextmanager
def block_outputs(model: nn.Module, field: str = "model.name") -> Iterator[list[Tensor]]:
    """Collects what each transformer block puts out in the forward passes inside the block; :func:`as_grid` reads it.

    Args:
        model: Whose blocks.
        field: What asks for them, for the message.

    Raises:
        UserError: The model has no transformer blocks.
    """
    named = [module for name, module in model.named_modules() if _BLOCK.search(name)]
    blocks = [module for module in named if not isinstance(module, (nn.ModuleList, nn.Sequential))]
    if not blocks:
        raise UserError(f"{field}: {model_name(model)} has no transformer blocks")
    outputs: list[Tensor] = []

    def keep(module, args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [module.register_forward_hook(keep) for module in blocks]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def as_grid(model: nn.Module, features: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns features as [B, D, h, w]: the axes (or the tokens' factors) with the image's aspect are its places.

    Args:
        model: Says how many tokens stand before those of places (``num_prefix_tokens``), and ``output_fmt``.
        features: Tokens [B, P + h w, D], or a map [B, D, h, w] or [B, h, w, D].
        size: Height and width of the images (pixels).

    Raises:
        UserError: Neither fits.
    """
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple | list) and len(patch) == 2:  # they may be no squares
        size = size[0] / patch[0], size[1] / patch[1]
    if isinstance(features, Tensor) and features.ndim == 4:
        if _channels_last(model, features, size):
            features = features.permute(0, 3, 1, 2)  # [B, h, w, D] -> [B, D, h, w]
        return features
    if isinstance(features, Tensor) and features.ndim == 3:
        declared = getattr(model, "num_prefix_tokens", None)
        prefixes = (0, 1, 2) if declared is None else (declared, 0)  # blocks may do without class tokens
        grids = [(_factors(features.shape[1] - prefix, size), prefix) for prefix in prefixes]
        grid, prefix = min(grids, key=lambda found: math.inf if found[0] is None else _stretch(found[0], size))
        if grid is not None:
            return features[:, prefix:].transpose(1, 2).unflatten(2, grid)  # [B, N, D] -> [B, D, h, w]
    raise UserError(f"model.name: the features of {model_name(model)} are not a grid of places")


def _channels_last(model: nn.Module, features: Tensor, size: tuple[float, float]) -> bool:
    declared = str(getattr(model, "output_fmt", ""))
    if declared.endswith(("NHWC", "NCHW")):
        return declared.endswith("NHWC")
    _, a, b, c = features.shape
    return _stretch((a, b), size) < _stretch((b, c), size)


def _factors(count: int, size: tuple[float, float]) -> tuple[int, int] | None:
    """Splits a number of tokens into rows and columns of the image's aspect; None where none comes near."""
    pairs = [(h, count // h) for h in range(1, count + 1) if count % h == 0]
    best = min(pairs, key=lambda pair: _stretch(pair, size), default=None)
    return best if best is not None and _stretch(best, size) <= _SLACK else None


def _stretch(grid: tuple[int, int], size: tuple[float, float]) -> float:
    """How far a grid's aspect is from the image's."""
    return abs(math.log(grid[0] / grid[1]) - math.log(size[0] / size[1]))
