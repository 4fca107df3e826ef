"""train.optimizer muon: which parameters Muon updates, at which rates, and exact resume."""

import re

import pytest
import torch
from helpers import inside, inside_ok, metrics, same
from test_resume import PLACE, stop_at, where
from tiny import make, run_info

from idmm import config
from idmm.models import create_backbone
from idmm.training.optim import create_optimizer

# The backbone's matrices and kernels with the patch embedding, also of one channel, but no
# depthwise kernel, classifier, position embedding or table. Of DINO's head all but the prototypes.
VIT = ["patch_embed.proj", "blocks.0.(attn.qkv|attn.proj|mlp.fc1|mlp.fc2)"]
CONVNEXT = ["stem.0", "stages.[0-3].blocks.0.mlp.fc[12]", "stages.[1-3].downsample.1"]
NETWORKS = {
    "vit_tiny_patch16_224": (
        dict(patch_size=8, embed_dim=16, depth=1, num_heads=2, in_chans=1),
        VIT,
        5,
    ),
    "swin_tiny_patch4_window7_224": (
        dict(depths=(1, 1), embed_dim=16, num_heads=(4, 4), window_size=4),
        ["patch_embed.proj", "layers.[01].blocks.0.*(qkv|proj|fc1|fc2)", "layers.1.*reduction"],
        10,
    ),
    "convnext_atto": (dict(depths=(1, 1, 1, 1), dims=(8, 8, 8, 16)), CONVNEXT, 12),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("decay", [None, 0.5])
@pytest.mark.parametrize("method", ["idmm", "dino"])
def test_muon_updates_the_hidden_matrices(name, decay, method):
    kwargs, layers, count = NETWORKS[name]
    backbone = create_backbone(name, 32, num_classes=9, **kwargs)
    whole = make(method, of=backbone, info=run_info(20, classes=9))
    others = {key: (child, 0.5) for key, child in whole.named_children() if key != "backbone"}
    train = config.PretrainTrain(optimizer="muon", layer_decay=decay, weight_decay=0.1)
    optimizer = create_optimizer(backbone, others, train, 1e-3)
    trained = {key: p for key, p in whole.named_parameters() if p.requires_grad}
    before = {key: p.detach().clone() for key, p in trained.items()}
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert groups.keys() == {*trained.values()}
    by_muon = set()
    for key, parameter in trained.items():
        assert not torch.equal(parameter, before[key]), key
        if not key.startswith("backbone."):
            assert groups[parameter]["lr_scale"] == 0.5, key
        if "momentum_buffer" in optimizer.state[parameter]:
            assert groups[parameter]["weight_decay"] == 0.1, key
            by_muon.add(key)
    hidden = re.compile(f"(backbone.({'|'.join(layers)})|head.layers.[024]).weight")
    assert by_muon == {key for key in trained if hidden.fullmatch(key)}
    assert len(by_muon) == count + 3 * (method == "dino")


@pytest.mark.parametrize("stage", PLACE)
def test_muon_resumes_exactly(stage, tmp_path):
    run = {
        "train__optimizer": "muon",
        "train__clip_grad": 0.5,
        "train__layer_decay": 0.8,
        "train__precision": "bf16",
    }
    inside_ok(stage, tmp_path / "whole", **run)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, *PLACE[stage])
        assert inside(stage, tmp_path / "cut", **run) == 130
    assert where(tmp_path / "cut") == PLACE[stage]
    inside_ok(stage, tmp_path / "cut", **run)
    assert same(tmp_path / "cut", tmp_path / "whole")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
