"""The final embeddings of any timm model as a grid over the image."""

import contextlib
import math
import re
from collections.abc import Iterator

from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.build import model_name

# timm's names of blocks: blocks.0, layers.0.blocks.1, blocks.0.1
_BLOCK = re.compile(r"(^|\.)blocks(\.\d+)+$")
# log ratio of a grid's aspect to the image's, at most: sides are rounded up to whole patches
_SLACK = 0.25


def token_grid(model: nn.Module, images: Tensor) -> Tensor:
    """Return the final embeddings as a grid [B, D, h, w], without class and distillation tokens.

    Rows go down the image and columns across it. The embeddings are a vision transformer's tokens
    after its last norm, or a convolutional network's last feature map.

    Args:
        model: Any timm model whose ``forward_features`` returns tokens, or maps with channels first
            or last.
        images: [B, C, H, W].

    Raises:
        UserError: Its features do not form a grid.
    """
    return as_grid(model, model.forward_features(images), images.shape[-2:])


@contextlib.contextmanager
def block_outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the output of each transformer block in the forward passes of the ``with`` block, for
    :func:`as_grid`.

    Raises:
        UserError: The model has no transformer blocks. The line begins with drloc's mode, which
            needs them.
    """
    named = [module for name, module in model.named_modules() if _BLOCK.search(name)]
    blocks = [module for module in named if not isinstance(module, (nn.ModuleList, nn.Sequential))]
    if not blocks:
        raise UserError(f"drloc.mode: l1_all: {model_name(model)} has no transformer blocks")
    outputs = []

    def collect(module, args, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with contextlib.ExitStack() as hooks:  # which it removes
        for module in blocks:
            hooks.enter_context(module.register_forward_hook(collect))
        yield outputs


def as_grid(model: nn.Module, features: Tensor, size: tuple[int, int]) -> Tensor:
    """Return features as [B, D, h, w]. The axes, or factors of the token count, with the image's
    aspect are h and w.

    Args:
        model: Its ``num_prefix_tokens`` and ``output_fmt`` are used, if present.
        features: Tokens [B, P + h w, D], or a map [B, D, h, w] or [B, h, w, D].
        size: Height and width of the images (pixels).

    Raises:
        UserError: They do not form a grid.
    """
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple | list) and len(patch) == 2:  # patches need not be square
        size = size[0] / patch[0], size[1] / patch[1]
    if isinstance(features, Tensor) and features.ndim == 4:
        declared, (_, a, b, c) = str(getattr(model, "output_fmt", "")), features.shape
        last = declared.endswith("NHWC") or _stretch((a, b), size) < _stretch((b, c), size)
        if last and not declared.endswith("NCHW"):
            features = features.permute(0, 3, 1, 2)  # [B, h, w, D] -> [B, D, h, w]
        return features
    if isinstance(features, Tensor) and features.ndim == 3:
        declared = getattr(model, "num_prefix_tokens", None)
        # blocks may lack class tokens
        if declared is None:
            prefixes = (0, 1, 2)
        else:
            prefixes = (declared, 0)
        grids = [(_factors(features.shape[1] - prefix, size), prefix) for prefix in prefixes]
        grid, prefix = min(
            grids, key=lambda item: math.inf if item[0] is None else _stretch(item[0], size)
        )
        if grid is not None:
            # [B, N, D] -> [B, D, h, w]
            return features[:, prefix:].transpose(1, 2).unflatten(2, grid)
    raise UserError(f"model.name: the features of {model_name(model)} do not form a grid")


def _factors(count: int, size: tuple[float, float]) -> tuple[int, int] | None:
    """Return rows and columns of a number of tokens with about the image's aspect, or None."""
    pairs = [(h, count // h) for h in range(1, count + 1) if count % h == 0]
    best = min(pairs, key=lambda pair: _stretch(pair, size), default=None)
    if best is not None and _stretch(best, size) <= _SLACK:
        return best
    return None


def _stretch(grid: tuple[int, int], size: tuple[float, float]) -> float:
    """Return the log ratio of a grid's aspect to the image's."""
    return abs(math.log(grid[0] / grid[1]) - math.log(size[0] / size[1]))
