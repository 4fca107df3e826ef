"""The backbone ``hog_conv``: what it learns without labels, and its way through the commands."""

import frozen
import numpy as np
import onnxruntime
import pytest
import torch
from folders import tree
from helpers import call, read
from sklearn.datasets import load_sample_images

import idmm
from idmm.models import create_backbone

FIXED = 512
SMALL = "filters: 16, fixed: 32, widths: [8, 16], dim: 8"
NETWORK = "{name: resnet10t, kwargs: {channels: [8, 8, 16, 16]}, size: 32}"


def tiles(count=48, side=64):
    """Tiles of two photographs, float32 [count, 3, 64, 64] in [0, 1], and which of them each is from."""
    photos, rng = load_sample_images().images, np.random.default_rng(0)
    rows, columns = rng.integers(0, 427 - side, count), rng.integers(0, 640 - side, count)
    found = [photos[i % 2][r : r + side, c : c + side] for i, (r, c) in enumerate(zip(rows, columns, strict=True))]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float() / 255, np.arange(count) % 2


def started(images, seed=0, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create_backbone("hog_conv", in_chans=images.shape[1], num_classes=0, **kwargs).eval()
    model.set_statistics([0.0] * images.shape[1], [1.0] * images.shape[1])
    model.learn_start([{"images": part} for part in images.split(16)], seed)
    return model


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_fixed_features_are_turned_components_of_equal_variance(channels):
    images = tiles()[0].mean(1, keepdim=True).repeat(1, channels, 1, 1) if channels != 3 else tiles()[0]
    model = started(images, filters=32)
    features = model(images)[:, :FIXED]
    assert features.shape == (48, FIXED) and abs(float(features.std()) - 1) < 0.1
    assert torch.equal(features, started(images, filters=32)(images)[:, :FIXED]), "from the seed"
    _, raw = model._hand_made(model.pixels(images))
    groups = raw.split((model.hand_made, 9 * 64), dim=1)
    scaled = [g / g.std(0, correction=0).clamp(min=1e-3 * g.std(0, correction=0).max() + 1e-6) for g in groups]
    weighed = torch.cat([g / g.shape[1] ** 0.5 for g in scaled], dim=1)
    distances = torch.cdist(weighed, weighed), torch.cdist(features, features)
    ratio = (distances[1] / distances[0])[~torch.eye(48, dtype=bool)]
    assert ratio.std() / ratio.mean() < 0.01, "a rotation keeps distances"


@torch.no_grad()
def test_flat_images_keep_the_random_filters_and_finite_features():
    flat = torch.linspace(0, 1, 16)[:, None, None, None].repeat(1, 3, 64, 64)
    assert bool(torch.isfinite(started(flat, filters=32)(flat)).all())


def test_the_network_learns_and_the_rest_does_not():
    images, labels = tiles()
    model = started(images, filters=32)
    fixed = {name: value.clone() for name, value in model.state_dict().items() if "network" not in name}
    model.train()
    model(images)[:, FIXED:].square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    dropped = (model(images)[:, :FIXED] == 0).all(1)
    assert 0 < dropped.sum() < 48, "in training fixed features of some images are 0"
    changed = [name for name, value in fixed.items() if not torch.equal(value, model.state_dict()[name])]
    assert all(name.startswith("maps_norm") for name in changed)


@pytest.mark.usefixtures("own_cache")
def test_through_the_commands(tmp_path):
    root = tree(tmp_path / "d", train={"cat": 8, "dog": 8}, test={"cat": 4, "dog": 4})
    small = ["--data.root", root, "--data.workers", 0, "--train.epochs", 1, "--train.precision", "fp32"]
    model = ["--model.name", "hog_conv", "--model.kwargs", f"{{{SMALL}, pixels: {NETWORK}}}"]
    pretrained = ["--config", "idmm_fast", "--views.size", 64, "--train.batch_size", 8]
    assert call(["pretrain", *small, *model, *pretrained, "--out", tmp_path / "p"]) == 0
    tuned = ["--train.size", 64, "--train.batch_size", 8]
    assert call(["finetune", *small, *tuned, "--init", tmp_path / "p", "--out", tmp_path / "f"]) == 0
    assert "start_top1" in read(tmp_path / "f/result.json")
    before, after = (idmm.load_backbone(tmp_path / name) for name in "pf")
    assert torch.equal(before.filters, after.filters) and torch.equal(before.components, after.components)
    assert call(["export", "--init", tmp_path / "f", "--format", "onnx", "--out", tmp_path / "m.onnx"]) == 0
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"images": images.numpy()})[0]
    with torch.inference_mode():
        np.testing.assert_allclose(found, frozen.exported(tmp_path / "f")[0](images), atol=1e-4)
