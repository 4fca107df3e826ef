"""Networks in use: each command's memory format and precision. CI tests the choice, no speed."""

import numpy as np
import pytest
import torch
from folders import paint
from frozen import by_timm
from helpers import call_ok, inside_ok, read, refused
from torch.nn.modules.module import register_module_forward_pre_hook

import idmm
from idmm.errors import UserError
from idmm.evaluation.network import extract_features
from idmm.models import create_backbone
from idmm.training import precision

NETS = {
    "cnn": {"model__name": "resnet10t", "model__kwargs": {"channels": [8, 8, 16, 16]}},
    "vit": {},
}
LAST = {"cnn": True, "vit": False}  # a pixel's channels side by side in memory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name, net in NETS.items():
        few = {"data__subset": {"total": 40}, "data__in_chans": 3, "train__epochs": 1}
        inside_ok("finetune", folder / name, **net, **few)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for i in range(6):
        paint(root / f"{i}.png", seed=i, size=(24, 24))
    return root


@pytest.fixture
def passes():
    """All passes through convolutions: whether channels were last, and whether it was in bf16."""
    seen = set()

    def look(module, inputs):
        if not isinstance(module, torch.nn.Conv2d) or 1 in module.weight.shape[1:]:
            return
        if len(inputs[0]) == 1:  # a model that is only tried
            return
        last = module.weight.is_contiguous(memory_format=torch.channels_last)
        seen.add((last, torch.is_autocast_enabled("cpu")))

    hook = register_module_forward_pre_hook(look)
    yield seen
    hook.remove()


def command(name, run, images, out):
    """The flags of a command on a run or on images."""
    if name == "explore":
        return [name, run, "--out", out]
    if name == "probe":
        return [
            name,
            "--init",
            run,
            "--data.subset",
            "{total: 60}",
            "--data.workers",
            0,
            "--out",
            out,
        ]
    files = {"predict": "p.csv", "embed": "f.npz", "similar": "s.png"}
    query = [images / "0.png"] * (name == "similar")
    out.mkdir(exist_ok=True)
    return [name, "--init", run, *query, images, "--out", out / files[name]]


@pytest.mark.parametrize("name", ["predict", "embed", "similar", "explore", "probe"])
def test_each_command_has_its_format_and_precision(name, runs, images, passes, tmp_path):
    for net, last in LAST.items():
        for flags in ([], ["--precision", "bf16"]):
            if name == "explore" and (net == "vit" or not flags):  # it takes seconds
                continue
            passes.clear()
            out = tmp_path / f"{net}{len(flags)}"
            call_ok([*command(name, runs / net, images, out), *flags])
            assert passes == {(last, bool(flags))}, (net, flags)
            if name == "probe":
                assert read(out / "result.json")["precision"] == (flags or ["fp32"])[-1]


def test_evaluations_in_training_have_the_format(passes):
    model = create_backbone("resnet10t", 32, channels=[8, 8, 16, 16])
    batch = {"images": torch.rand(2, 3, 32, 32), "index": torch.arange(2)}
    extract_features(model, [batch], "cpu")
    assert passes == {(True, False)}


@pytest.mark.parametrize("faster", ["fp32", "bf16"])
def test_auto_is_the_faster(faster, runs, images, passes, tmp_path, monkeypatch, capsys):
    def timed(model, images, device, name):
        return 1.0 if name == faster else 2.0

    assert precision._timed_forward(torch.nn.Flatten(), torch.zeros(2, 3), "cpu", "bf16") > 0
    monkeypatch.setattr(precision, "_timed_forward", timed)
    call_ok([*command("embed", runs / "cnn", images, tmp_path), "--precision", "auto"])
    assert passes == {(True, faster == "bf16")}
    line = f"precision auto: {faster} (32 images take "
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("net", NETS)
def test_outputs_are_nearly_those_of_plain_fp32(net, runs, images):
    files = [str(path) for path in sorted(images.rglob("*.png"))]
    plain = by_timm(runs / net, files)
    assert idmm.embed(runs / net, files) == pytest.approx(plain, abs=1e-5)
    half = idmm.embed(runs / net, files, precision="bf16")
    assert half.dtype == np.float32
    assert 0 < np.abs(half - plain).max() < 0.05 * np.abs(plain).max()


def test_other_precisions_are_refused(runs, images, tmp_path, capsys):
    argv = [*command("embed", runs / "cnn", images, tmp_path), "--precision", "fp16"]
    assert refused(capsys, argv) == ["precision: got 'fp16', expected 'fp32', 'bf16' or 'auto'"]
    with pytest.raises(UserError, match="^precision: got 'half', expected fp32, bf16 or auto$"):
        idmm.load_classifier(runs / "cnn", precision="half")
