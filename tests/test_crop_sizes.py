"""Groups of crops with sizes of their own (multi-crop): views, methods, backbones, runs, and what is refused."""

import json

import numpy as np
import pytest
import timm
import torch
import yaml
from helpers import inside
from safetensors.torch import load_file
from test_views import GREY, Store
from tiny import VIT, assert_same_loss, batch, make

from idmm.config import CropGroup, PretrainConfig, Views
from idmm.config.parsing import build
from idmm.data.views import MultiCropTransform, short_side_bound
from idmm.losses import instance_discrimination_loss
from idmm.methods.mixing import draw_cutmix, mix_images
from idmm.models import create_backbone
from idmm.models.build import try_size
from idmm.seeding import numpy_rng, seeded
from idmm.stages import PretrainStage

LOCAL = [{"count": 2, "scale": [0.3, 1.0]}, {"count": 3, "scale": [0.1, 0.4], "size": 8}]


def dynamic(name="vit_tiny_patch16_224", size=16, **kwargs):
    with seeded(0):
        return create_backbone(name, size, dynamic_size=True, **kwargs)


def sized(sides, counts, **options):
    """A batch whose groups have crops of these sides."""
    given = batch(*counts, **options)
    resize = torch.nn.functional.interpolate
    views = [resize(v.flatten(0, 1), (side, side)) for v, side in zip(given["views"], sides, strict=True)]
    return {**given, "views": [v.unflatten(0, old.shape[:2]) for v, old in zip(views, given["views"], strict=True)]}


# ------------------------------------------------------------------ views
def test_a_group_of_another_size_is_drawn_as_if_all_had_that_size():
    store, indices = Store(), np.arange(4)
    groups = [CropGroup(count=2), CropGroup(count=3, scale=[0.05, 0.4], size=12)]
    own = MultiCropTransform(store, Views(size=20, crops=groups), GREY, GREY, seed=3)(1, indices)["views"]
    assert [tuple(views.shape) for views in own] == [(4, 2, 3, 20, 20), (4, 3, 3, 12, 12)]
    groups = [CropGroup(count=2), CropGroup(count=3, scale=[0.05, 0.4])]
    for number, size in enumerate((20, 12)):
        alone = MultiCropTransform(store, Views(size=size, crops=groups), GREY, GREY, seed=3)(1, indices)["views"]
        assert torch.equal(own[number], alone[number])


def test_images_are_kept_as_large_as_the_most_demanding_group_needs():
    def kept(*groups):
        return PretrainStage(build(PretrainConfig, {"views": {"size": 64, "crops": list(groups)}})).stored_size(64)

    wide, narrow = {"count": 2, "scale": [0.25, 1.0]}, {"count": 4, "scale": [0.04, 0.25]}
    assert kept(wide, narrow) == short_side_bound(64, 0.04)
    assert kept(wide, {**narrow, "size": 32}) == short_side_bound(32, 0.04) > short_side_bound(64, 0.25)
    assert kept(wide, {**narrow, "size": 16}) == short_side_bound(64, 0.25)


# ------------------------------------------------------------------ methods
def idmm_loss(method, given, key=5):
    """The sum of the groups' means, each mixed on its own (test_methods), a group at a time."""
    total = 0.0
    for number, views in enumerate(given["views"]):
        flat, own = views.flatten(0, 1), given["index"].repeat_interleave(views.shape[1])
        mix = draw_cutmix(len(flat), *flat.shape[-2:], 0.5, numpy_rng(key, "cutmix", number))
        z, weight = method.backbone(mix_images(flat, mix)).float(), method.classifier.weight
        total = total + instance_discrimination_loss(z, weight, own, own[mix.partner], mix.lam, 0.1)
    return total


def test_the_loss_of_crops_of_two_sizes():
    method = make("idmm", of=dynamic(**VIT)).double()
    assert_same_loss(method, sized((16, 8), (2, 3)), idmm_loss, epoch=3, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------ backbones
@pytest.mark.parametrize(
    ("name", "sizes", "kwargs"),
    [
        ("vit_tiny_patch16_224", (32, 16), VIT),
        ("deit_tiny_distilled_patch16_224", (32, 16), VIT),
        ("swin_tiny_patch4_window7_224", (64, 32), dict(embed_dim=24, depths=(1, 1), num_heads=(1, 2))),
        ("resnet10t", (64, 32), {}),
    ],
)
def test_a_backbone_takes_both_sizes_with_the_weights_of_a_plain_one(name, sizes, kwargs):
    model = dynamic(name, sizes[0], **kwargs)
    assert try_size(model, name, sizes[1]).shape == (1, model.feature_width) and model.training
    plain = create_backbone(name, sizes[0], **kwargs)
    plain.load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(2, 3, sizes[0], sizes[0])
    assert torch.equal(model.eval()(images), plain.eval()(images))


# ------------------------------------------------------------------ runs
def test_a_run_with_local_crops_exports_what_fine_tuning_and_timm_take(tmp_path):
    run = tmp_path / "run"
    assert inside("pretrain", run, views__crops=LOCAL, train__epochs=1, train__warmup_epochs=0) == 0
    written = yaml.safe_load((run / "config.yaml").read_text())["views"]["crops"]
    assert written == LOCAL, "a group without a size stays without"
    about = json.loads((run / "backbone.json").read_text())
    assert about["size"] == about["kwargs"]["img_size"] == 16 and "dynamic_img_size" not in about["kwargs"]
    model = timm.create_model(about["name"], **about["kwargs"])
    model.load_state_dict(load_file(run / "backbone.safetensors"), strict=True)
    few = dict(stages=None, train__size=16, train__epochs=1, init=str(run))
    assert inside("finetune", tmp_path / "tuned", **few) == 0


def test_sizes_that_cannot_be_had_are_a_line_each_and_leave_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("idmm.stages.pretrain.store_run_images", None)  # nothing is decoded
    out = tmp_path / "a"
    crops = [*LOCAL, {"count": 1, "size": 20}, {"count": 1, "size": 9}]
    assert inside("pretrain", out, views__crops=crops) == 2
    tail = "vit_tiny_patch16_224 does not accept it: expected a multiple of its patch, 8x8 pixels"
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [f"views.crops[{n}].size: image size {s}x{s}: {tail}" for n, s in ((2, 20), (3, 9))]
    fixed = dict(model__name="cait_xxs24_224", model__kwargs={**VIT, "patch_size": 16}, views__size=64)
    assert inside("pretrain", out, views__crops=[LOCAL[0], {**LOCAL[1], "size": 32}], **fixed) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("views.crops[1].size: image size 32x32: cait_xxs24_224 does not accept it: ")
    assert inside("pretrain", out, views__crops=LOCAL, drloc__weight=0.1) == 2
    line = "views.crops[1].size: got 8, but drloc.weight is 0.1, and its loss takes only crops of views.size (16)"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert not out.exists()
