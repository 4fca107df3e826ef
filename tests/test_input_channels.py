"""Backbones for images of any number of channels, and weights for three adapted to them."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from helpers import read
from test_backbones import SMALL

from idmm import config
from idmm.errors import UserError
from idmm.files import write_json
from idmm.models import Checkpoint, create_backbone, load_backbone
from idmm.models.spec import model_spec
from idmm.models.weights import save_model


def built(name, in_chans, seed=0):
    torch.manual_seed(seed)
    model = create_backbone(
        name,
        64,
        in_chans=in_chans,
        drop_path=0.0,
        **SMALL[name],
    )
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that say something
            parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model.eval()


@torch.no_grad()
def outputs(model, images):
    return model(images)


# its stem is no convolution
@pytest.mark.parametrize("name", [name for name in SMALL if not name.startswith("t2t")])
def test_an_image_whose_channels_repeat_gives_the_same(name):
    """Six channels that are two times three, and one that is three equal ones: what the weights for
    three give."""
    before = built(name, 3)
    images = torch.randn(2, 3, 64, 64)
    read = Checkpoint(before.state_dict(), "a.pth", kwargs={"img_size": 64})
    wide = built(name, 6, seed=1)
    report = read.load_into(wide)
    assert not report.dropped
    assert not report.fresh
    assert "from 3 channels to 6: repeated in turn, scaled by 3/6" in str(report)
    torch.testing.assert_close(
        outputs(wide, images.repeat(1, 2, 1, 1)), outputs(before, images), rtol=1e-3, atol=1e-4
    )

    grey = built(name, 1, seed=1)
    assert "from 3 channels to 1: summed" in str(read.load_into(grey))
    one = images[:, :1]
    torch.testing.assert_close(
        outputs(grey, one), outputs(before, one.expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4
    )


def test_what_is_no_convolution_is_refused():
    name = "naflexvit_base_patch16_gap"
    kwargs = dict(embed_dim=32, depth=1, num_heads=2)
    before, after = (create_backbone(name, in_chans=n, **kwargs) for n in (3, 5))
    with pytest.raises(UserError) as refused:
        Checkpoint(before.state_dict(), "a.pth", "init").load_into(after)
    reason = (
        "init: 'a.pth' embeds.proj.weight of naflexvit_base_patch16_gap is no "
        "convolution of RGB and cannot be adapted"
    )
    assert str(refused.value).startswith(f"{reason} to other channels. Leave out")


def test_a_file_without_json(tmp_path):
    """Nobody knows the mean of channels that are not RGB."""
    torch.save(
        create_backbone("resnet10t", in_chans=5, channels=[8, 8, 8, 8]).state_dict(),
        tmp_path / "a.pth",
    )
    with pytest.raises(UserError, match="the model's name is unknown, expected a.json next to it"):
        load_backbone(tmp_path / "a.pth")
    model = config.Model(name="resnet10t", kwargs={"channels": [8, 8, 8, 8]})
    pretrain_config = config.PretrainConfig(init=str(tmp_path / "a.pth"), model=model)
    for data, in_chans in (
        ({"in_chans": 5}, 5),
        (
            {"bands": [0, 1, 3, 2]},
            4,
        ),
    ):
        spec = model_spec(replace(pretrain_config, data=config.Data(**data)))
        assert spec.in_chans == in_chans
        assert spec.mean is None
        assert spec.std is None
        with (
            pytest.raises(UserError, match="cannot be adapted to other")
            if in_chans == 4
            else nullcontext()
        ):
            assert not spec.load(spec.build(32, 0)).adapted


def test_values_of_the_json_next_to_weights(tmp_path):
    """They are for the channels of files that they were measured on, and bad ones are refused."""
    kwargs = {"channels": [8, 8, 8, 8], "in_chans": 2}
    pair = [[0, 999], [0, 999]]
    state = create_backbone("resnet10t", **kwargs).state_dict()
    more = dict(
        mean=(0.1, 0.2),
        std=(0.3, 0.4),
        extra={"bands": [0, 1], "range": pair},
    )
    save_model(
        tmp_path,
        "backbone",
        state,
        name="resnet10t",
        kwargs=kwargs,
        **more,
    )
    for bands, mean, limits in (
        ([0, 1], [0.1, 0.2], pair),
        ([2, 3], None, "auto"),
    ):
        spec = model_spec(config.PretrainConfig(init=str(tmp_path), data=config.Data(bands=bands)))
        assert spec.bands == bands
        assert spec.mean == mean
        assert spec.range == limits
    path = tmp_path / "backbone.json"
    write_json(
        path,
        read(path)
        | {
            "mean": [0.5],
            "std": [0.0, 1.0],
            "crop_pct": 0,
        },
    )
    with pytest.raises(
        UserError, match=r"std\[0\]: got 0.0, .*\n.*crop_pct: got 0, expected greater than 0"
    ):
        load_backbone(tmp_path)
