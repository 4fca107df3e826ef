"""What T2T-ViT and CvT must all do, as tests that their files inherit, and weights computed from
names."""

import json
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.optim import param_groups_layer_decay
from torch import nn

from idmm import seeding
from idmm.errors import UserError
from idmm.models import (
    Checkpoint,
    create_backbone,
    read_checkpoint,
    token_grid,
)
from idmm.models.base import sinusoids

NORM = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}


def load(model, state, img_size=None, source="a", **options):
    """Loads a state dict, of a model built at a size, into another; returns the report."""
    return Checkpoint(state, source, kwargs={"img_size": img_size}).load_into(model, **options)


def published(name):
    """Names and shapes of a public release's weights, in its order."""
    return json.loads((Path(__file__).parent / f"data/{name}.json").read_text())["weights"]


def filled(shapes):
    """Weights that follow from the names in sorted order and the shapes alone, the same on any
    machine."""
    state = {}
    for number, (name, shape) in enumerate(sorted(shapes.items())):
        h = (torch.arange(torch.Size(shape).numel()) + 1_000_003 * number) * 2_654_435_761 % 2**32
        h = ((h ^ (h >> 15)) * 2_246_822_519 & 0xFFFFFFFF).bitwise_xor_(h >> 13)
        u = (h.double() / 2**31 - 1).reshape(shape)  # [-1, 1)
        if name.endswith("num_batches_tracked"):
            state[name] = torch.zeros(shape, dtype=torch.int64)
        elif len(shape) > 1:
            state[name] = (u / 2 / torch.Size(shape[1:]).numel() ** 0.5).float()
        else:
            state[name] = (u / 5 + name.endswith(("weight", "running_var"))).float()
    return state


def picture(side):
    """One image [1, 3, side, side] in [-2, 2), likewise."""
    return 4 * 3**0.5 * side * filled({"image": [1, 3, side, side]})["image"]


class Contract:
    """Subclasses give the fields and ``grid_size(model)``."""

    name: str
    kwargs: dict  # of a small model without dropout
    dim: int
    resized: list[str] = []  # weights that depend on the image size
    layers: list[str]  # how the names of each layer begin
    # every 125th class score and the sum of all magnitudes, computed once by the public code
    # (commit, file and settings in tests/data/*.json) in evaluation mode, with weights filled(its
    # names and shapes) and a picture of its size
    official: dict[str, tuple[list[float], float]]

    def build(self, img_size=64, **kwargs):
        with seeding.seeded(5):
            return create_backbone(self.name, img_size, **{**self.kwargs, **kwargs})

    def release(self, tmp_path, model):
        """The report of loading a file like the public release's, filled, into a model."""
        shapes = published(self.name)
        values = filled(shapes)
        if "pos_embed" in shapes:
            values["pos_embed"] = sinusoids(*shapes["pos_embed"][1:])
        state = {f"module.{k}": values[k] for k in shapes}
        torch.save(
            {"epoch": 300, "state_dict": {}, "state_dict_ema": state},
            tmp_path / "release.pth.tar",
        )
        read = read_checkpoint(tmp_path / "release.pth.tar")
        return read.load_into(model, drop_classifier=model.num_classes == 0)

    def test_timm_knows_it(self):
        with torch.device("meta"):
            model = timm.create_model(self.name)
        assert model.default_cfg["architecture"] == self.name
        assert model.default_cfg["input_size"] == (3, 224, 224)
        assert model.get_classifier().out_features == model.num_classes == 1000
        with pytest.raises(RuntimeError, match="No pretrained weights exist"):
            timm.create_model(self.name, pretrained=True, **self.kwargs)

    def test_numbers_are_those_of_the_public_code(self, tmp_path):
        for name, (some, total) in self.official.items():
            self.name = name
            model = timm.create_model(name).eval()
            assert sorted(self.release(tmp_path, model).loaded) == sorted(model.state_dict())
            with torch.no_grad():
                (scores,) = model(picture(model.default_cfg["input_size"][-1]))
            torch.testing.assert_close(scores[::125], torch.tensor(some), atol=2e-5, rtol=0)
            assert scores.abs().sum() == pytest.approx(total, rel=1e-5)

    def test_starts_as_the_release(self):
        model = self.build(num_classes=200)
        linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
        assert len(linear) > 10
        for module in linear:
            assert module.weight.std().item() == pytest.approx(0.02, rel=0.3)
            assert module.bias is None or not module.bias.any()
        for module in model.modules():
            if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
                assert (module.weight == 1).all()
                assert not module.bias.any()
                assert module.eps == 1e-5
        (token,) = (p for n, p in model.named_parameters() if n.endswith("cls_token"))
        assert token.std().item() == pytest.approx(0.02, rel=0.5)

    def test_heads(self):
        images = torch.randn(2, 3, 64, 64)
        model = self.build(num_classes=5).eval()
        tokens = model.forward_features(images)
        assert tokens.shape == (2, 17, self.dim)
        assert model.num_prefix_tokens == 1
        assert model.num_features == model.head_hidden_size == model.embed_dim == self.dim
        # the class token, first
        assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
        assert torch.equal(model(images), model.head(tokens[:, 0]))
        model.reset_classifier(3, "avg")
        assert model(images).shape == (2, 3)
        assert model.num_classes == 3
        assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 1:].mean(1))
        model.reset_classifier(0, "token")
        assert isinstance(model.get_classifier(), nn.Identity)
        assert model(images).shape == (
            2,
            self.dim,
        )

    @pytest.mark.parametrize(
        ("size", "grid"),
        [(224, 14), (448, 28), (16, 1), (50, 3), ((96, 160), (6, 10))],
    )
    def test_sizes(self, size, grid):
        height, width = (size, size) if isinstance(size, int) else size
        grid = (grid, grid) if isinstance(grid, int) else grid
        model = self.build([height, width]).eval()
        assert self.grid_size(model) == grid
        with torch.no_grad():
            tokens = model.forward_features(torch.zeros(1, 3, height, width))
        assert tokens.shape == (1, 1 + grid[0] * grid[1], self.dim)

    def test_drop_path_rises_over_the_blocks(self):
        model = self.build(drop_path=0.6, img_size=32)
        rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(0.6)
        images = torch.randn(16, 3, 32, 32)
        torch.manual_seed(0)
        assert not torch.equal(model(images), model(images))
        assert torch.equal(model.eval()(images), model(images))

    def test_the_releases_file_loads_at_any_size(self, tmp_path):
        model = create_backbone(self.name, 112)
        report = self.release(tmp_path, model)
        assert report.dropped == ["head.weight", "head.bias"]
        assert report.fresh == []
        assert report.resized == self.resized
        assert sorted(report.loaded) == sorted(
            k for k in model.state_dict() if k not in self.resized
        )
        with pytest.raises(
            UserError,
            match="release.pth.tar: is a checkpoint of another model|does not fit",
        ):
            self.release(tmp_path, self.build(64))

    def test_data_of_any_size_where_that_is_asked_for(self):
        model = self.build(64, dynamic_size=True).eval()
        other = self.build((32, 48)).eval()
        load(other, model.state_dict(), 64)
        images = torch.randn(2, 3, 32, 48)
        torch.testing.assert_close(model(images), other(images))
        torch.testing.assert_close(token_grid(model, images), token_grid(other, images))

    def test_layer_decay(self):
        model = self.build(num_classes=2)
        groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
        group_of = {id(p): group for group in groups for p in group["params"]}
        own = {name: group_of[id(p)] for name, p in model.named_parameters()}
        for number, start in enumerate(reversed(self.layers)):
            scales = {group["lr_scale"] for name, group in own.items() if name.startswith(start)}
            assert scales == {0.5**number}
        (token,) = (name for name in own if name.endswith("cls_token"))
        assert own[token]["weight_decay"] == 0
        assert own["head.weight"]["weight_decay"] == 0.05
