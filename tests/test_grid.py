"""Every backbone's final embeddings as a grid: its places are where the image has them."""

import pytest
import timm
import torch

from idmm.errors import UserError
from idmm.models import create_backbone, token_grid
from idmm.models.grid import as_grid, block_outputs

# name, kwargs that make it small, places for an image of 64 x 96 pixels, whether it has transformer
# blocks
SMALL_VIT = {"patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 2}
MODELS = [
    ("deit_tiny_patch16_224", SMALL_VIT, (4, 6), 2),
    (
        "vit_tiny_patch16_224",
        SMALL_VIT | {"class_token": False, "global_pool": "avg"},
        (4, 6),
        2,
    ),
    ("pvt_v2_b0", {}, (2, 3), 8),
    (
        "swin_tiny_patch4_window7_224",
        {"window_size": 2, "embed_dim": 24, "depths": [2, 1, 1, 1]},
        (2, 3),
        5,
    ),
    ("t2t_vit_7", {}, (4, 6), None),
    ("cvt_13", {}, (4, 6), None),
    # else the shortcuts alone speak, which skip places
    ("resnet18", {"zero_init_last": False}, (2, 3), 0),
]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(MODELS)]


@pytest.mark.parametrize(("name", "kwargs", "places", "blocks"), MODELS, ids=IDS)
def test_features_are_a_grid_of_the_images_places(name, kwargs, places, blocks):
    """Rows are u and columns v, whatever the layout; so are the outputs of blocks."""
    torch.manual_seed(0)
    model = create_backbone(name, (64, 96), num_classes=3, **kwargs).eval()
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(3, 64, 96, generator=generator).repeat(5, 1, 1, 1)
    other = 5 * torch.randn(3, 16, 16, generator=generator)
    corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for image, (down, across) in zip(images[1:], corners, strict=True):
        image[:, 48 * down : 48 * down + 16, 80 * across : 80 * across + 16] = other
    with torch.no_grad():
        grids = token_grid(model, images)
    assert grids.shape == (5, model.num_features, *places)
    for grid, corner in zip(grids[1:], corners, strict=True):
        change = (grid - grids[0]).norm(dim=0)  # [h, w]
        row, column = divmod(int(change.argmax()), places[1])
        assert (row >= places[0] / 2, column >= places[1] / 2) == corner

    if blocks == 0:
        with (
            pytest.raises(UserError, match="has no transformer blocks"),
            block_outputs(model),
        ):
            pass
        return
    with block_outputs(model) as outputs, torch.no_grad():
        model(images)
    levels = [as_grid(model, output, (64, 96)) for output in outputs]
    assert blocks in (None, len(levels))
    assert levels[-1].shape == grids.shape
    for level in levels:
        assert 64 * level.shape[3] == 96 * level.shape[2]
    with torch.no_grad():
        model(images)
    assert len(outputs) == len(levels), "the hooks are gone"


def test_tokens_without_places_are_refused():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=0, **SMALL_VIT)
    for features in (
        torch.zeros(2, 1 + 7, 24),
        torch.zeros(2, 24),
        [torch.zeros(2, 5, 24)],
    ):
        with pytest.raises(UserError, match="do not form a grid"):
            as_grid(model, features, (64, 64))
