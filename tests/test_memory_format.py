"""ConvNets train with the channels of a pixel side by side, and resume as they began."""

import pytest
import torch
from helpers import inside, same, state, weights
from test_resume import stop_at

from idmm.models.build import create_backbone, prefers_channels_last

NET = {"model__name": "resnet10t", "model__kwargs": {"channels": [8, 8, 16, 16]}, "data__subset": {"total": 40}}


def last(tensor):
    """Whether a convolution's weights [out, in, h, w] have a pixel's channels side by side, and could be otherwise."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("resnet10t", True), ("mobilenetv3_small_050", True)]
    + [("vit_tiny_patch16_224", False), ("convnext_atto", False), ("t2t_vit_7", False)],
)
def test_models_that_pool_or_batch_normalise_maps_train_so(name, chosen):
    assert prefers_channels_last(create_backbone(name, 64, num_classes=0)) is chosen


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert inside("pretrain", out, **NET) == 0
    return out


def test_a_run_keeps_the_format_and_exports_plain_tensors(whole):
    saved = state(whole)
    assert saved["channels_last"] and last(saved["method"]["backbone.layer3.0.conv2.weight"])
    assert all(tensor.is_contiguous() for tensor in weights(whole).values())


def test_a_stopped_run_goes_on_in_the_format_that_it_began_with(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert inside("pretrain", out, **NET) == 130
    assert inside("pretrain", out, **NET) == 0
    assert state(out)["channels_last"] and same(out, whole)
