"""Checkpoints of other tools as these write them: the network that fits is found, the rest named,
and nothing runs."""

import argparse
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import VIT, inside_ok, logged
from safetensors.torch import load_file
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from idmm.errors import UserError
from idmm.models import create_backbone, read_checkpoint

SMALL = {"vit": ("vit_tiny_patch16_224", VIT), "resnet": ("resnet18", {"layers": [1, 1, 1, 1]})}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
ARGS = argparse.Namespace(
    arch="vit_tiny", lr=0.1, output_dir=".", nested=argparse.Namespace(seed=0)
)
MLP = {f"{n}.weight": torch.ones(2, 2) for n in (0, 3)}
LIGHTNING = {
    "epoch": 1,
    "global_step": 9,
    "pytorch-lightning_version": "2.5.0",
    "loops": {},
    "callbacks": {},
}
LIGHTNING |= {
    "optimizer_states": [OPTIMIZER],
    "lr_schedulers": [],
    "hparams_name": "kwargs",
    "hyper_parameters": {},
}


def begun(prefix, state):
    return {f"{prefix}{name}": value for name, value in state.items()}


def moco(encoders, head, more):
    """As of the releases: two encoders by name, each with a head, and further weights."""
    state = dict(more)
    for name, encoder in encoders.items():
        state |= begun(f"{name}.", encoder | begun(head, MLP))
    return {
        "epoch": 3,
        "arch": "x",
        "state_dict": begun("module.", state),
        "optimizer": OPTIMIZER,
    }


def wrapped(*parts):
    state = {}
    for prefix, weights_of_part in parts:
        state |= begun(prefix, weights_of_part)
    return {**LIGHTNING, "state_dict": state}


def numbered(state):
    """Of ``nn.Sequential(*list(resnet.children())[:-1])``."""
    model = ResNet(BasicBlock, [1, 1, 1, 1])
    model.load_state_dict(state, strict=False)
    return nn.Sequential(*list(model.children())[:-1]).state_dict()


def dino(state, other, wrapper=""):
    student = begun("module.backbone.", other) | begun("module.head.mlp.", MLP)
    teacher = begun(wrapper, begun("backbone.", state) | begun("head.mlp.", MLP))
    both = {
        "student": student,
        "teacher": teacher,
        "optimizer": OPTIMIZER,
        "epoch": 3,
        "args": ARGS,
    }
    return {
        **both,
        "dino_loss": {"center": torch.ones(1, 2)},
        "fp16_scaler": {"scale": 1.0},
    }


def mae(state, other):
    state = {
        **state,
        "mask_token": torch.ones(1, 1, 8),
        **begun("decoder_blocks.0.", other),
    }
    return {
        "model": state,
        "optimizer": OPTIMIZER,
        "epoch": 3,
        "scaler": {},
        "args": ARGS,
    }


def timms(state, other):
    both = {
        "epoch": 3,
        "arch": "x",
        "state_dict": other,
        "optimizer": OPTIMIZER,
        "args": ARGS,
    }
    return {**both, "state_dict_ema": state}


# by tool: the file's name, the model, the prefix, what is written of the weights to be loaded and
# of others, and what the log has about the rest
TOOLS = {
    "dino": ("checkpoint.pth", "vit", "teacher.backbone.", dino, "read from: teacher.backbone"),
    "dino, batch norms": (
        "checkpoint0020.pth",
        "resnet",
        "teacher.module.backbone.",
        lambda s, o: dino(s, o, "module."),
        "read from: teacher.module.backbone",
    ),
    "moco v2": (
        "checkpoint_0199.pth.tar",
        "resnet",
        "state_dict.module.encoder_q.",
        lambda s, o: moco({"encoder_q": s, "encoder_k": o}, "fc.", {"queue": torch.ones(2, 2)}),
        "dropped: fc.0.weight, fc.3.weight\n  fresh: fc.weight, fc.bias\n  read from: "
        "state_dict.module.encoder_q",
    ),
    "moco v3": (
        "vit-s-300ep.pth.tar",
        "vit",
        "state_dict.module.base_encoder.",
        lambda s, o: moco(
            {"base_encoder": s, "momentum_encoder": o}, "head.", begun("predictor.", MLP)
        ),
        "read from: state_dict.module.base_encoder",
    ),
    "mae": (
        "mae_pretrain.pth",
        "vit",
        "model.",
        mae,
        "dropped: mask_token (1), decoder_blocks (30)\n  fresh: head.weight, head.bias\n  "
        "read from: model",
    ),
    "lightly's examples": (
        "epoch=9-step=30.ckpt",
        "resnet",
        "state_dict.backbone.",
        lambda s, o: wrapped(("backbone.", numbered(s)), ("projection_head.layers.", MLP)),
        "read from: state_dict.backbone",
    ),
    "lightly, masked": (
        "mae.ckpt",
        "vit",
        "state_dict.backbone.vit.",
        lambda s, o: wrapped(
            ("backbone.", {"mask_token": torch.ones(1)}), ("backbone.vit.", s), ("decoder.", MLP)
        ),
        "read from: state_dict.backbone.vit",
    ),
    "torchvision": (
        "resnet.pth",
        "resnet",
        "",
        lambda s, o: s | {"fc.weight": torch.ones(9, 9)},
        "dropped: fc.weight",
    ),
    "timm": (
        "model_best.pth.tar",
        "vit",
        "state_dict_ema.",
        timms,
        "read from: state_dict_ema",
    ),
}


def weights(kind, seed):
    """Random weights of a small model, of torchvision's if it is a ResNet."""
    torch.manual_seed(seed)
    name, kwargs = SMALL[kind]
    model = (
        create_backbone(name, 32, **kwargs) if kind == "vit" else ResNet(BasicBlock, [1, 1, 1, 1])
    )
    state = {k: v for k, v in model.state_dict().items() if not k.startswith("fc.")}
    return {k: torch.randn(v.shape) if v.is_floating_point() else v for k, v in state.items()}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_network_that_fits_is_loaded(tool, tmp_path):
    file, kind, prefix, write, rest = TOOLS[tool]
    state = weights(kind, 0)
    other = weights(kind, 1)
    torch.save(write(state, other), tmp_path / file)
    name, kwargs = SMALL[kind]
    model = create_backbone(
        name,
        32 if kind == "vit" else None,
        num_classes=4,
        **kwargs,
    )
    report = read_checkpoint(tmp_path / file, "init").load_into(model)
    for k, v in state.items():
        assert torch.equal(model.state_dict()[k], v)
    assert sorted(report.loaded) == sorted(state)
    assert len(report.fresh) == 2
    assert report.prefix == prefix
    assert rest in str(report)


def test_a_run_starts_from_another_tools_file(tmp_path):
    """Through the command line: a frozen run writes the teacher's weights, and the log has the
    rest."""
    state = weights("vit", 0)
    torch.save(dino(state, weights("vit", 1)), tmp_path / "checkpoint.ckpt")
    start = {
        "init": str(tmp_path / "checkpoint.ckpt"),
        "stages": [{"size": 32}],
        "train__epochs": 1,
    }
    inside_ok(
        "finetune",
        tmp_path / "a",
        **start,
        model__freeze=True,
        train__ema=None,
    )
    written = load_file(tmp_path / "a" / "backbone.safetensors")
    assert written.keys() == state.keys()
    for k, v in state.items():
        assert torch.equal(written[k], v)
    assert "read from: teacher.backbone" in logged(tmp_path / "a")


def refusal(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    (line,) = str(caught.value).splitlines()
    assert "\n" not in line
    return line


@pytest.mark.filterwarnings("error")  # of torch, about files that it refuses
def test_what_no_network_fits(tmp_path):
    state = weights("vit", 0)
    torch.save(dino(state, weights("vit", 1)), tmp_path / "a.pth")
    line = refusal(read_checkpoint(tmp_path / "a.pth").load_into, create_backbone("resnet18"))
    assert (
        "is a checkpoint of another model: only 0 of 60 weights fit resnet18. Missing: conv1.weight"
        in line
    )
    model = create_backbone(SMALL["vit"][0], 32, **VIT)
    for content in (
        {"a": {"c": torch.ones(2)}, ("d", "e"): 3},
        {"epoch": 3, 4: {}, "state_dict": {}},
    ):
        torch.save(content, tmp_path / "b.pth")
        line = refusal(lambda: read_checkpoint(tmp_path / "b.pth").load_into(model))
        assert "Unknown: a.c" in line or "no weights (its entries: epoch, 4, state" in line


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["zip", "old", "whole", 0, 2, 4, "namespace", "class", "script"])
def test_nothing_in_a_file_runs(kind, tmp_path):
    """Neither in an entry beside weights, in either of torch's formats, nor in a plain pickle."""
    path = tmp_path / "a.ckpt"
    ran = tmp_path / "ran"
    content = {"state_dict": weights("vit", 0), "args": Payload(ran)}
    reason = (
        r"holds Python objects, which are never run \(\w+.mkdir\). Use the file that the "
        r"tool exports, or save only"
    )
    if kind == "whole":
        content = Payload(ran)
    elif kind == "namespace":
        content["args"] = argparse.Namespace(lr=0.1, hook=Payload(ran))
    elif kind == "class":
        content["args"], reason = Path("a"), r"never run \(pathlib.\w+\)"
    if isinstance(kind, int):
        path.write_bytes(pickle.dumps({"args": Payload(ran)}, protocol=kind))
        reason = reason if kind == 2 else "is damaged or holds Python objects, which are never run"
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind != "old")
    if kind == "script":
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(f"{path.stem}/constants.pkl", b"")  # by which torch knows them
        reason = "is damaged or holds Python objects, which are never run"
    with pytest.raises(UserError, match=f"a.ckpt: .*{reason}"):
        read_checkpoint(path)
    assert not ran.exists()
