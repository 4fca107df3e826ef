"""Pretraining from weights: lower rates for lower layers, kNN before and after."""

import signal

import pytest
import yaml
from folders import result
from helpers import call, inside, logged, metrics, same, start, state_file
from tiny import make

import idmm
from idmm import config
from idmm.models import create_backbone
from idmm.training.optim import create_optimizer

RESNET = {"model__name": "resnet10t", "model__kwargs": {"channels": [8, 8, 16, 16]}}
FROM = {"model__name": None, "model__kwargs": None}  # as the weights say
DECAY = {"train__layer_decay": 0.5}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A few epochs of pretraining a small ConvNet, whose weights others start from."""
    out = tmp_path_factory.mktemp("source") / "run"
    assert inside("pretrain", out, **RESNET, train__epochs=2) == 0
    return out


@pytest.fixture(scope="module")
def adapted(source):
    """The same images again, from those weights, each stage at a rate of its own."""
    out = source.parent / "adapted"
    assert inside("pretrain", out, **FROM, **DECAY, init=str(source)) == 0
    return out


# ------------------------------------------------------------------ learning rates
def test_rates_by_layer():
    """As a table by hand: the last block and what stands on it have the run's rate, each below half the one above."""
    of = create_backbone("vit_tiny_patch16_224", 16, patch_size=8, embed_dim=16, depth=3, num_heads=2)
    method = make("idmm", of=of, classifier="cosine", classifier_lr_scale=10.0)
    others = {"classifier": (method.classifier, 10.0)}
    optimizer = create_optimizer(of, others, config.PretrainTrain(layer_decay=0.5, weight_decay=0.1), 1e-3)
    names = {id(p): name for name, p in method.named_parameters()}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == {name for name, _ in method.named_parameters()}
    for name, group in found.items():
        part = name.split(".")
        layer = int(part[2]) + 1 if "blocks" in part else 3 if part[1] == "norm" else 0
        wanted = 10.0 if part[0] == "classifier" else 0.5 ** (3 - layer)
        assert group["lr_scale"] == wanted, name
        spared = part[-1] in ("bias", "pos_embed", "cls_token", "scale") or "norm" in name
        assert group["weight_decay"] == (0.0 if spared else 0.1), name


# ------------------------------------------------------------------ resuming
def test_killed_and_taken_up(source, adapted, tmp_path):
    out, given = tmp_path / "run", {**FROM, **DECAY, "init": str(source)}
    with start("pretrain", out, **given) as process:
        assert process.until(lambda: state_file(out).exists()), process.said()
        process.send(signal.SIGKILL)
        process.wait()
    assert not (out / "result.json").exists()
    assert inside("pretrain", out, **given) == 0
    assert same(out, adapted) and metrics(out) == metrics(adapted)
    assert result(out)["start_knn"] == result(adapted)["start_knn"]


# ------------------------------------------------------------------ kNN before and after
def test_knn_before_and_after(source, adapted):
    """Before the first step it is what idmm probe finds, at the end that of the last record."""
    found = result(adapted)
    probed = idmm.probe({"init": str(source), "size": 16, "data": {"name": "digits", "subset": {"total": 96}},
                         "device": "cpu", "out": str(source.parent / "probed")})  # fmt: skip
    assert found["start_knn"] == pytest.approx(probed["knn"])
    assert [record.get("knn") for record in metrics(adapted)] == [None, None, found["knn"]]
    line = f"kNN accuracy: {found['start_knn']:.1f} before the first step, {found['knn']:.1f} at the end"
    assert line in logged(adapted)


def test_the_recipe_takes_the_model_of_the_weights(source, tmp_path, capsys):
    out = tmp_path / "run"
    few = ["--data.subset", "{total: 40}", "--data.workers", 0, "--train.epochs", 1, "--views.size", 16]
    argv = ["pretrain", "--config", "adapt", "--init", source, *few, "--train.precision", "fp32", "--out", out]
    assert call(argv) == 0
    settings = yaml.safe_load((out / "config.yaml").read_text())
    assert settings["model"]["name"] == "resnet10t" and settings["train"]["lr"] == 5e-4
    assert {"start_knn", "knn"} < result(out).keys()
    assert f"features before training, by the weights of '{source}': 40 images" in logged(out)
    capsys.readouterr()
    assert call([*argv[:-1], tmp_path / "b", "--config", "backbone/pvt_v2_b0"]) == 2, "which is the user's own choice"
    assert capsys.readouterr().err.startswith("model.name: 'pvt_v2_b0', but ")


def test_from_scratch_it_is_measured_where_asked_for(source, tmp_path):
    assert not {"knn", "start_knn"} & result(source).keys()
    assert inside("pretrain", tmp_path / "run", **RESNET, train__epochs=2, train__knn_every=1) == 0
    found = result(tmp_path / "run")
    assert 0 < found["start_knn"] < 100
    assert same(tmp_path / "run", source), "to look changes nothing"
