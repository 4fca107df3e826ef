"""Pretraining from weights: lower rates for lower layers, layers that stay, kNN before and after, both kept."""

import re
import signal

import pytest
import torch
import yaml
from folders import TINY as FOLDER
from folders import result, tree
from helpers import call, flags, inside, logged, metrics, refused, same, start, state_file, weights
from test_distributed import together
from test_resume import stop_at
from tiny import batch, make

import idmm
from idmm import config
from idmm.errors import UserError
from idmm.methods.common import MomentumEncoder
from idmm.models import create_backbone
from idmm.models.layers import freeze_layers
from idmm.monitor import gained
from idmm.optim import create_optimizer
from idmm.seeding import seeded
from idmm.stages.advice import advice

RESNET = {"model__name": "resnet10t", "model__kwargs": {"channels": [8, 8, 16, 16]}}
FROM = {"model__name": None, "model__kwargs": None}  # as the weights say
BOTH = {"train__freeze_layers": 2, "train__layer_decay": 0.5}
MODELS = {  # arguments for a small one, and how many blocks or stages it has
    "vit_tiny_patch16_224": ({"patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}, 3),
    "t2t_vit_7": ({"embed_dim": 16, "depth": 3, "num_heads": 2, "token_dim": 8}, 3),
    "pvt_v2_b0": ({"embed_dims": [8, 16, 16, 16], "num_heads": [1, 2, 2, 2]}, 4),
    "resnet10t": ({"channels": [8, 8, 8, 8]}, 4),
    "convnext_atto": ({"dims": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}, 4),
    "mobilenetv3_small_050": ({}, 6),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A few epochs of pretraining a small ConvNet, whose weights others start from."""
    out = tmp_path_factory.mktemp("source") / "run"
    assert inside("pretrain", out, **RESNET, train__epochs=2) == 0
    return out


@pytest.fixture(scope="module")
def adapted(source):
    """The same images again, from those weights, two stages frozen and the rates of the others apart."""
    out = source.parent / "adapted"
    assert inside("pretrain", out, **FROM, **BOTH, init=str(source)) == 0
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


# ------------------------------------------------------------------ frozen layers
@pytest.mark.parametrize("name", MODELS)
def test_what_is_frozen_stays_and_the_rest_moves(name):
    kwargs, blocks = MODELS[name]
    with seeded(0):
        model = create_backbone(name, 32, drop_path=0.3, **kwargs)
    with pytest.raises(UserError, match=f"train.freeze_layers: {blocks}, but {name} has {blocks} blocks or stages"):
        freeze_layers(model, blocks, name)
    freeze_layers(model, 0, name)
    assert all(p.requires_grad for p in model.parameters())
    freeze_layers(model, 1, name)
    frozen = set(model.frozen_parameters)
    assert frozen == {key for key, p in model.named_parameters() if not p.requires_grad}
    assert 0 < len(frozen) < len(list(model.parameters()))
    method = make("idmm", of=model)
    still = {key for key, part in model.named_modules() if not part.training}
    assert still and all(key.startswith(model.frozen_modules) for key in still), "the rest is trained"
    dropped = [key for key, part in model.named_modules() if type(part).__name__ == "DropPath"]
    assert {key in still for key in dropped} in ({True, False}, {False}, set())
    before = {key: tensor.clone() for key, tensor in method.backbone.state_dict().items()}
    optimizer = create_optimizer(model, {"classifier": (method.classifier, 1.0)}, config.PretrainTrain(), 0.1)
    images = {**batch(2, double=False), "views": [torch.randn(4, 2, 3, 32, 32)]}
    method(images, 0, 0)["loss"].backward()
    optimizer.step()
    after = model.state_dict()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    held = tuple(f"{part}." for part in model.frozen_modules)
    assert not {key for key in moved if key in frozen or key.startswith(held)}
    assert len(moved) > len(model.state_dict()) / 4
    method.add_module("teacher", MomentumEncoder(model, torch.nn.Identity(), 0.9))  # whose batch norms train
    method.train()
    for of in (model, method.teacher.copies[0]):
        assert not any(part.training for key in of.frozen_modules for part in of.get_submodule(key).modules())


def test_models_that_do_not_tell(capsys, tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UserError, match="train.freeze_layers: 1, but linear does not tell its layers apart; wanted 0"):
        freeze_layers(model, 1, "linear")
    out = tmp_path / "run"
    (line,) = refused(capsys, ["pretrain", *flags("pretrain", out, train__freeze_layers=7)])
    assert line.startswith("train.freeze_layers: 7, but vit_tiny_patch16_224 has 2 blocks or stages after its stem")
    assert line.endswith("wanted at most 1") and not out.exists()


def test_frozen_weights_of_a_run(source, adapted):
    before, after = weights(source), weights(adapted)
    held = {key for key in before if re.match(r"backbone/(conv1|bn1|layer1|layer2)\.", key)}
    assert any("running_mean" in key for key in held)
    for key in before:
        if key.startswith("backbone/") and "num_batches" not in key:
            assert torch.equal(before[key], after[key]) == (key in held), key


def test_a_momentum_encoders_frozen_layers_stay(source, tmp_path):
    """Rounding would move m p + (1 - m) p, and its batch norms would count on."""
    small = {"method__hidden_dim": 12, "method__dim": 6, "method__momentum": 0.9, "method__outputs": 9}
    given = {"method__classifier": None, "method__classifier_init": None, "method__classifier_lr_scale": None}
    given |= {"method__name": "dino", "views__crops": [{"count": 2, "scale": [0.3, 1.0]}], "train__accumulate": 1}
    out = tmp_path / "run"
    assert inside("pretrain", out, **FROM, **given, **small, train__freeze_layers=2, init=str(source)) == 0
    before, after = weights(source), weights(out)
    for key in after:
        if re.match(r"backbone/(conv1|bn1|layer1|layer2)\.", key):
            assert torch.equal(before[key], after[key]), key
    assert not torch.equal(before["backbone/layer4.0.conv1.weight"], after["backbone/layer4.0.conv1.weight"])


def test_frozen_on_two_processes(source, tmp_path):
    given = {**FROM, **BOTH, "init": str(source), "train__epochs": 1, "train__precision": "fp32"}
    with together("pretrain", tmp_path / "two", **given) as both:
        assert both.wait() == 0, both.said()
    assert inside("pretrain", tmp_path / "one", **given) == 0
    one, two = result(tmp_path / "one"), result(tmp_path / "two")
    assert one["start_knn"] == two["start_knn"]
    after, before = weights(tmp_path / "two"), weights(source)
    assert torch.equal(before["backbone/layer2.0.bn1.running_mean"], after["backbone/layer2.0.bn1.running_mean"])


def test_frozen_without_weights_is_warned_of():
    given = config.PretrainConfig(train=config.PretrainTrain(freeze_layers=2))
    line = "train.freeze_layers: 2 without --init: the layers that stay as they are are random ones"
    assert advice(given, [], 1000) == [line]
    given = config.PretrainConfig(train=config.PretrainTrain(layer_decay=0.5))
    assert advice(given, [], 1000) == []


# ------------------------------------------------------------------ resuming
def test_killed_and_taken_up(source, adapted, tmp_path):
    out, given = tmp_path / "run", {**FROM, **BOTH, "init": str(source)}
    with start("pretrain", out, **given) as process:
        assert process.until(lambda: state_file(out).exists()), process.said()
        process.send(signal.SIGKILL)
        process.wait()
    assert not (out / "result.json").exists()
    assert (out / "start/backbone.safetensors").exists(), "before the first step"
    assert inside("pretrain", out, **given) == 0
    assert same(out, adapted) and same(out / "start", adapted / "start") and metrics(out) == metrics(adapted)
    assert result(out)["start_knn"] == result(adapted)["start_knn"]
    assert line_of(out).replace(str(out), "") == line_of(adapted).replace(str(adapted), "")


def test_stopped_after_its_last_measurement(source, adapted, tmp_path, monkeypatch):
    out, given = tmp_path / "run", {**FROM, **BOTH, "init": str(source)}
    stop_at(monkeypatch, 1, 3, 0)
    assert inside("pretrain", out, **given) == 130
    monkeypatch.undo()
    assert inside("pretrain", out, **given) == 0
    assert line_of(out).replace(str(out), "") == line_of(adapted).replace(str(adapted), "")


# ------------------------------------------------------------------ kNN before and after
def line_of(out):
    return next(line for line in logged(out).splitlines() if " at the end: " in line).partition(" INFO ")[2]


def test_knn_before_and_after(source, adapted):
    """Before the first step it is what idmm probe finds, at the end that of the last record."""
    found = result(adapted)
    probed = idmm.probe({"init": str(source), "size": 16, "data": {"name": "digits", "subset": {"total": 96}},
                         "device": "cpu", "out": str(source.parent / "probed")})  # fmt: skip
    assert found["start_knn"] == pytest.approx(probed["knn"])
    assert [record.get("knn") for record in metrics(adapted)] == [None, None, found["knn"]]
    line = f"kNN {found['start_knn']:.1f} before the first step, {found['knn']:.1f} at the end: "
    assert line in logged(adapted) and f"--init {adapted / 'start'} takes them as they were" in logged(adapted)


def test_both_are_kept(source, adapted, tmp_path):
    before, kept = weights(source), weights(adapted / "start")
    assert kept.keys() == {key for key in before if key.startswith("backbone/")}
    assert all(torch.equal(before[key], tensor) for key, tensor in kept.items())
    assert {path.name for path in (adapted / "start").iterdir()} == {"backbone.json", "backbone.safetensors"}
    given = {**FROM, "stages": [{"size": 16}], "train__epochs": 1}
    assert inside("finetune", tmp_path / "run", **given, init=str(adapted / "start")) == 0


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


def test_what_the_line_says():
    start = "kNN 61.2 before the first step, "
    assert gained(61.2, 66.0, 0.001, 500) == f"{start}66.0 at the end: +4.8 on 500 images: pretraining helped"
    assert "-3.1 on 500 images: the weights were better as they were" in gained(61.2, 58.1, 0.001, 500, "runs/a/start")
    assert "+0.4 on 500 images, which may be chance (p = 0.61)" in gained(61.2, 61.6, 0.61, 500)


def test_from_scratch_it_is_measured_where_asked_for(source, tmp_path):
    assert not {"knn", "start_knn"} & result(source).keys() and not (source / "start").exists()
    assert inside("pretrain", tmp_path / "run", **RESNET, train__epochs=2, train__knn_every=1) == 0
    found = result(tmp_path / "run")
    assert 0 < found["start_knn"] < 100 and not (tmp_path / "run/start").exists()
    assert same(tmp_path / "run", source), "to look changes nothing"
    assert "--init" not in line_of(tmp_path / "run")


def test_without_labels_there_is_none(source, tmp_path):
    for name, splits in {"bare": {"train": {"": 9}}, "no test": {"train": {"a": 5, "b": 5}}}.items():
        root, out = tree(tmp_path / name, **splits), tmp_path / f"{name} run"
        given = {**FOLDER, **FROM, "data__root": str(root), "train__epochs": 1, "init": str(source)}
        assert inside("pretrain", out, **given) == 0
        assert not {"knn", "start_knn"} & result(out).keys() and (out / "start/backbone.json").exists()
        said = "before the first step and after the last: no kNN accuracy, it needs labels and a val or test split"
        assert said in logged(out)
