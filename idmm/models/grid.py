"""The final embeddings of any timm model as a grid over the image."""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from idmm.errors import UserError
from idmm.models.base import Backbone, Grid, as_map
from idmm.models.build import model_name

# timm's names of blocks: blocks.0, layers.0.blocks.1, blocks.0.1
_BLOCK = re.compile(r"(^|\.)blocks(\.\d+)+$")
# log ratio of a grid's aspect to the image's, at most: sides are rounded up to whole patches
_SLACK = 0.25


def token_grid(model: Backbone, images: Tensor) -> Tensor:
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
    """Collect the output of each transformer block in forward passes, for :func:`as_grid`.

    They are those within the ``with`` block.

    Raises:
        UserError: The model has no transformer blocks. The field is drloc's mode, which needs them.
    """
    blocks = []
    for name, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
        if _BLOCK.search(name) and not is_list:
            blocks.append(module)
    if not blocks:
        raise UserError.of("drloc.mode", f"l1_all: {model_name(model)} has no transformer blocks")
    outputs: list[Tensor] = []

    def collect(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple):
            output = output[0]
        outputs.append(output)

    with contextlib.ExitStack() as hooks:  # which it removes
        for module in blocks:
            hooks.enter_context(module.register_forward_hook(collect))
        yield outputs


def as_grid(model: nn.Module, features: object, size: Grid) -> Tensor:
    """Return features as [B, D, h, w].

    The axes, or factors of the token count, with the image's aspect are h and w.

    Args:
        model: Its ``num_prefix_tokens`` and ``output_fmt`` are used, if present.
        features: Tokens [B, P + h w, D], or a map [B, D, h, w] or [B, h, w, D].
        size: Height and width of the images (pixels).

    Raises:
        UserError: They do not form a grid.
    """
    aspect = size[0] / size[1]
    # only some of timm's models have these attributes
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple | list) and len(patch) == 2:  # patches need not be square
        aspect = (size[0] / patch[0]) / (size[1] / patch[1])
    maps = None
    if isinstance(features, Tensor) and features.ndim == 4:
        maps = _channels_first(features, str(getattr(model, "output_fmt", "")), aspect)
    elif isinstance(features, Tensor) and features.ndim == 3:
        maps = _as_map(features, getattr(model, "num_prefix_tokens", None), aspect)
    if maps is None:
        raise UserError.of("model.name", f"the features of {model_name(model)} do not form a grid")
    return maps


def _channels_first(features: Tensor, declared: str, aspect: float) -> Tensor:
    """Return a map [B, D, h, w] or [B, h, w, D] as the former."""
    _, a, b, c = features.shape
    looks_last = _stretch((a, b), aspect) < _stretch((b, c), aspect)
    if declared.endswith("NHWC") or (looks_last and not declared.endswith("NCHW")):
        return features.permute(0, 3, 1, 2)
    return features


def _as_map(tokens: Tensor, declared: int | None, aspect: float) -> Tensor | None:
    """Return tokens [B, P + h w, D] as a map [B, D, h, w], or None.

    P is the declared number of other tokens, or 0, as those of blocks may lack them.
    """
    prefixes = (0, 1, 2) if declared is None else (declared, 0)
    grids = []
    for prefix in prefixes:
        count = tokens.shape[1] - prefix
        for rows in range(1, count + 1):
            if count % rows == 0:
                grids.append((prefix, (rows, count // rows)))
    prefix, grid = min(grids, key=lambda one: _stretch(one[1], aspect))
    if _stretch(grid, aspect) > _SLACK:
        return None
    return as_map(tokens[:, prefix:], grid)


def _stretch(grid: Grid, aspect: float) -> float:
    """Return the log ratio of a grid's aspect to the image's."""
    return abs(math.log(grid[0] / grid[1]) - math.log(aspect))
