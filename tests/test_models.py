"""Backbones: building over timm, weights from other sizes, and the files that others read."""

import re
import warnings

import pytest
import safetensors.torch
import timm
import torch
from contract import NORM, load
from helpers import read
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table

from idmm.errors import UserError
from idmm.models import Checkpoint, create_backbone, load_backbone, read_checkpoint
from idmm.models.build import accepts, backbone_state, check_kwargs, export_kwargs
from idmm.models.weights import save_model

DEIT = "deit_tiny_patch16_224"
VIT = {"embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN = {
    "embed_dim": 24,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
}
PVT = {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 20, 32]}
FAMILIES = [
    ("deit_tiny_patch16_224", VIT, True),
    ("deit_tiny_distilled_patch16_224", VIT, True),
    ("swin_tiny_patch4_window7_224", SWIN, True),
    ("pvt_v2_b0", PVT, False),
    ("resnet50", {"layers": [1, 1, 1, 1]}, False),
    ("caformer_s18", {}, False),  # its classifier is three layers
    (
        "t2t_vit_7",
        {
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "token_dim": 16,
        },
        True,
    ),
    (
        "cvt_13",
        {
            "embed_dims": [8, 16, 24],
            "depths": [1, 1, 2],
            "num_heads": [1, 2, 3],
        },
        True,
    ),
    ("hog", {}, False),
]


def fails(call, *args, **kwargs):
    """Returns the one line that a user is told."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    assert len(str(caught.value).splitlines()) == 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tiny(size=112, **kwargs):
    return create_backbone(DEIT, size, **{**VIT, **kwargs})


def swin(size=112, **kwargs):
    return create_backbone("swin_tiny_patch4_window7_224", size, **{**SWIN, **kwargs})


def saved(folder, model, name=DEIT, kwargs=VIT, size=112, stem="backbone", **extra):
    arguments = export_kwargs(name, kwargs, size)
    save_model(
        folder,
        stem,
        backbone_state(model),
        name=name,
        kwargs=arguments,
        **NORM,
        **extra,
    )
    return folder


@pytest.mark.parametrize(
    "name, kwargs, sized", FAMILIES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_strict_round_trip_through_timm_alone(tmp_path, name, kwargs, sized):
    model = create_backbone(
        name,
        112,
        drop_path=0.1,
        num_classes=5,
        **kwargs,
    )
    assert accepts(name, "img_size") == sized
    images = torch.randn(2, 3, 112, 112)
    model(images)  # batch norms have seen something
    saved(tmp_path, model, name, {**kwargs, "drop_path_rate": 0.2})
    info = read(tmp_path / "backbone.json")
    assert info["kwargs"]["num_classes"] == 0
    assert "drop_path_rate" not in info["kwargs"]
    assert info["kwargs"].get("img_size") == (112 if sized else None)
    again = timm.create_model(info["name"], **info["kwargs"])
    again.load_state_dict(
        safetensors.torch.load_file(tmp_path / "backbone.safetensors"), strict=True
    )
    model.reset_classifier(0)
    with torch.no_grad():
        expected = model.eval()(images)
        assert torch.equal(again.eval()(images), expected)
        assert torch.equal(load_backbone(tmp_path)(images), expected)
    model = create_backbone(name, 112, num_classes=5, **kwargs)
    report = load(model, again.state_dict())
    assert report.loaded == list(again.state_dict())
    assert not report.dropped


def test_drop_path_reaches_the_models_that_have_it():
    with torch.device("meta"):
        assert tiny(None, drop_path=0.3).blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
        assert create_backbone("vgg11", drop_path=0.3).training  # has none


REFUSED = [  # name, size, kwargs, and how the message begins and continues
    (
        "deit_tinny_patch16_224",
        None,
        {},
        "model.name: 'deit_tinny_patch16_224' is unknown. Did you mean",
    ),
    ("vit_tiny_patch16_224.no", 32, {}, "model.name: 'vit_tiny_patch16_224.no' cannot be built"),
    (
        DEIT,
        32,
        {"embed_dimm": 3},
        f"model.kwargs: {DEIT} refuses {{'embed_dimm': 3}}: .*unexpected keyword argument",
    ),
    (
        DEIT,
        100,
        VIT,
        f"image size 100x100: {DEIT} does not accept it: expected a multiple of its patch, 16x16",
    ),
    (
        "maxvit_tiny_rw_224",
        112,
        {},
        "image size 112x112: maxvit_tiny_rw_224 does not accept it: .*window",
    ),
    (
        "swin_tiny_patch4_window7_224",
        (30, 32),
        SWIN,
        "image size 30x32: swin_tiny_patch4_window7_224 does not",
    ),
]


@pytest.mark.parametrize("name, size, kwargs, line", REFUSED)
def test_names_arguments_and_sizes_that_are_refused(name, size, kwargs, line):
    assert re.match(
        line,
        fails(
            create_backbone,
            name,
            size,
            drop_path=0.1,
            **kwargs,
        ),
    )


def test_arguments_with_a_field_of_their_own():
    with pytest.raises(UserError) as caught:
        check_kwargs({"pretrained": True, "drop_path_rate": 0.1, "depth": 2})
    assert (
        str(caught.value).splitlines()[0]
        == "model.kwargs: pretrained is True; weights come from --init, leave it out"
    )
    assert len(str(caught.value).splitlines()) == 2
    assert tiny(100, dynamic_img_size=True, dynamic_img_pad=True) is not None, (
        "any size if the model pads"
    )


def test_position_embedding_grows_as_timm_resizes_it():
    small = tiny(112)
    large = tiny(224, num_classes=5)
    report = load(large, small.state_dict())
    expected = resample_abs_pos_embed(small.pos_embed, [14, 14], num_prefix_tokens=1)
    assert torch.equal(large.pos_embed, expected)
    assert torch.equal(large.pos_embed[:, :1], small.pos_embed[:, :1])  # the class token's stays
    assert torch.equal(large.blocks[1].mlp.fc1.weight, small.blocks[1].mlp.fc1.weight)
    assert report.resized == ["pos_embed"]
    assert report.fresh == ["head.weight", "head.bias"]
    assert not report.dropped
    assert len(report.loaded) == len(small.state_dict()) - 1


def test_relative_tables_are_resized_as_timm_does():
    small = swin(112, num_classes=2)
    large = swin(224)
    report = load(large, small.state_dict())
    key = "layers.3.blocks.0.attn.relative_position_bias_table"
    assert report.resized == [key]
    assert report.dropped == ["head.fc.weight", "head.fc.bias"]
    assert not report.fresh
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = resize_rel_pos_bias_table(small.state_dict()[key], (7, 7), (169, 4))
    assert torch.equal(large.state_dict()[key], expected)


def test_a_checkpoint_of_another_model():
    model = tiny(32)
    other = Checkpoint(create_backbone("pvt_v2_b0", **PVT).state_dict(), "p.pth", "init")
    line = fails(other.load_into, model)
    assert line.startswith(
        "init: 'p.pth' is a checkpoint of another model: only 2 of 30 weights fit deit_tiny_patch16"
    )
    assert fails(load, model, other.state, source="p.pth") == line.replace(
        "init: 'p.pth'", "p.pth:"
    )
    assert "Missing: cls_token, pos_embed," in line
    assert "Unknown: " in line
    before = {k: v.clone() for k, v in model.state_dict().items()}
    line = fails(load, model, tiny(32, embed_dim=64).state_dict(), source="p.pth")
    assert line.startswith("p.pth: does not fit deit_tiny_patch16_224")
    assert "more" in line
    assert "cls_token: 1x1x64 in the checkpoint, 1x1x32 in the model" in line
    # nothing half-loaded
    for k, v in model.state_dict().items():
        assert torch.equal(before[k], v)


def test_files_that_are_no_checkpoints(tmp_path):
    def message(path):
        line = fails(read_checkpoint, path)
        with_field = fails(read_checkpoint, path, "init")
        assert line.startswith(f"{path}: ")
        assert with_field == line.replace(f"{path}:", f"init: '{path}'", 1)
        return line

    assert "does not exist, expected a run folder, or a .safetensors" in message(tmp_path / "none")
    assert "has no backbone.safetensors and no backbone.json in it" in message(tmp_path)
    (tmp_path / "last").mkdir()
    assert "is not finished (backbone.safetensors is missing). Repeat" in message(tmp_path)
    for name in ("a.pth", "a.safetensors"):
        (tmp_path / name).write_bytes(b"not weights at all")
        assert "cannot be read as a checkpoint" in message(tmp_path / name)
    (tmp_path / "a.txt").write_text("x")
    assert "is not a checkpoint, expected" in message(tmp_path / "a.txt")
    torch.save({"state_dict": {"epoch": 3}}, tmp_path / "b.pth")
    assert "holds no weights" in message(tmp_path / "b.pth")
    torch.save({"state_dict": {}, "who": fails}, tmp_path / "c.pth")
    assert "holds Python objects, which are never run" in message(tmp_path / "c.pth")
