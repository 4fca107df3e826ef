"""DINOv2 and DINOv3 by the command line, with random weights in the layout of timm's: class and
register tokens, patches of 14 and 16 px, learned and rotary positions."""

import functools

import pytest
import timm
import torch
from folders import tree
from helpers import as_flags, call_ok, logged, metrics, read
from huggingface_hub import constants
from test_public_weights import push
from timm.models import _registry
from timm.models._hub import save_for_hf

import idmm
from idmm.models import token_grid
from idmm.models.public import public_weights

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}  # instead of 384, 12 and 6
# side of a patch (pixels), tokens before those of patches, and weights with other shapes at
# another size
LAYOUTS = {
    "vit_small_patch14_dinov2.lvd142m": (14, 1, 1),
    "vit_small_patch14_reg4_dinov2.lvd142m": (14, 5, 1),
    "vit_small_patch16_dinov3.lvd1689m": (16, 5, 0),
}
COMMON = {
    "data.workers": 0,
    "train.epochs": 1,
    "train.batch_size": 4,
    "train.warmup_epochs": 0,
    "train.precision": "fp32",
    "train.device": "cpu",
}


@pytest.fixture(scope="module", params=LAYOUTS)
def name(request, tmp_path_factory):
    """A model whose weights are in the hub's cache, in a small version."""
    full_name = request.param
    short_name = full_name.partition(".")[0]
    entry = timm.models.model_entrypoint(short_name)

    @functools.wraps(entry)
    def small(pretrained=False, **kwargs):
        return entry(pretrained, **SMALL | kwargs)

    cache = tmp_path_factory.mktemp("cache")
    files = tmp_path_factory.mktemp("files")
    public_weights.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_registry._model_entrypoints, short_name, small)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            save_for_hf(timm.create_model(full_name), str(files), safe_serialization=True)
        push(cache, f"timm/{full_name}", {path.name: path.read_bytes() for path in files.iterdir()})
        yield full_name
    public_weights.cache_clear()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    return tree(root, train={"a": 4, "b": 4}, test={"a": 2, "b": 2})


def test_adapt_and_finetune(name, images, tmp_path):
    """At sizes that are not that of the weights; drloc's grid is that of the patches."""
    patch, prefix, resized = LAYOUTS[name]
    common = COMMON | {"data.root": images}
    keys = common | {"init": f"timm:{name}", "views.size": 2 * patch, "out": tmp_path / "a"}
    call_ok(["pretrain", "--config", "adapt", *as_flags(keys, {})])
    assert f"weights loaded, {resized} resized, 0 dropped, 0 fresh" in logged(tmp_path / "a")
    stages = [{"size": 2 * patch}, {"size": 3 * patch}]
    keys = common | {"init": tmp_path / "a", "stages": stages, "drloc.weight": 0.1}
    keys |= {"drloc.mode": "l1_all", "out": tmp_path / "b"}
    call_ok(["finetune", "--config", "fast", *as_flags(keys, {})])
    assert [0 < record["drloc"] < 10 for record in metrics(tmp_path / "b")] == [True, True]
    assert read(tmp_path / "b/backbone.json")["name"] == name.partition(".")[0]
    model = idmm.load_backbone(tmp_path / "b", img_size=4 * patch)
    batch = torch.rand(2, 3, 4 * patch, 4 * patch)
    with torch.inference_mode():
        tokens = model.forward_features(batch)
        grid = token_grid(model, batch)
    assert grid.shape == (2, 32, 4, 4)
    assert torch.equal(grid.flatten(2).mT, tokens[:, prefix:])


def test_train(name, images, tmp_path):
    patch, *_ = LAYOUTS[name]
    argv = ["train", images, "--init", f"timm:{name}", "--size", 3 * patch]
    call_ok([*argv, "--minutes", 0.05, "--out", tmp_path, "--data.workers", 0, "--device", "cpu"])
    assert read(tmp_path / "train.json")["plan"]["model"]["name"] == name.partition(".")[0]
    assert read(tmp_path / "result.json")["test_size"] == 4


def test_features(name, images, tmp_path):
    call_ok(f"probe --init timm:{name} --data.root {images} --out {tmp_path}")
    result = read(tmp_path / "result.json")
    assert result["size"] == timm.get_pretrained_cfg(name).input_size[-1]
