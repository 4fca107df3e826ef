"""Starting from weights: a classifier fitted to frozen features, and pretraining that goes on from
weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from folders import result
from frozen import a_run, by_hand, linear
from helpers import call_ok, inside, inside_ok, logged, metrics, read, same
from pytest import approx
from test_resume import stop_at
from tiny import make

import idmm
from idmm import config
from idmm.data.listing import list_images
from idmm.data.split import Split
from idmm.data.stratify import stratified_folds
from idmm.errors import UserError
from idmm.evaluation import evaluate
from idmm.models import create_backbone
from idmm.models.build import has_linear_classifier
from idmm.models.spec import ModelSpec
from idmm.runs.first_weights import fit_classifier
from idmm.runs.resolve import fill_classifier_init
from idmm.seeding import seeded
from idmm.training.optim import create_optimizer

RUN = dict(
    model__name=None,
    model__kwargs=None,
    stages=[
        {"size": 16},
        {"size": 24, "epochs": 1},
    ],
)
KEY = "train.classifier_init"


@pytest.fixture(scope="module")
def init(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("init"))


@pytest.fixture(scope="module")
def tuned(init, tmp_path_factory):
    """A run that was asked to start from features."""
    out = tmp_path_factory.mktemp("tuned") / "run"
    inside_ok(
        "finetune",
        out,
        **RUN,
        init=str(init),
        train__classifier_init="features",
    )
    return out


HEADS = [  # a norm or a pool before the classifier, two classifiers, a 1x1 convolution
    (
        "vit_tiny_patch16_224",
        dict(
            patch_size=16,
            embed_dim=16,
            depth=1,
            num_heads=2,
            global_pool="avg",
        ),
        32,
    ),
    (
        "deit_tiny_distilled_patch16_224",
        dict(
            patch_size=16,
            embed_dim=16,
            depth=1,
            num_heads=2,
        ),
        32,
    ),
    ("resnetv2_18", dict(layers=(1, 1, 1, 1), channels=(8, 8, 8, 16)), 32),
    ("mobilenetv3_small_050", {}, 32),
]


@pytest.mark.parametrize("name, kwargs, size", HEADS)
def test_the_model_says_what_the_fit_says(name, kwargs, size):
    with seeded(0):
        model = create_backbone(name, size, num_classes=4, **kwargs).eval()
        images = torch.randn(24, 3, size, size)
    assert has_linear_classifier(name, kwargs)
    labels = np.arange(24) % 3  # the fourth class has none
    with torch.no_grad():
        features = model.forward_head(model.forward_features(images), pre_logits=True).numpy()
        train = Split([], [""] * 24, labels, [*"abcd"])
        fit_classifier(model, features, train, config.FinetuneConfig())
        choice = evaluate.choose_strength(features, labels)
        weight, bias = evaluate.fit_linear(features, labels, 4, choice.strength)
        heat = evaluate.fit_temperature(features, labels, choice.strength, smoothing=0.1)
        expected = (features @ weight.T + bias) / heat
        logits = model(images)
        np.testing.assert_allclose(
            logits[:, :3].numpy(),
            expected[:, :3],
            rtol=1e-3,
            atol=1e-3,
        )
        assert (expected[:, 3] == -np.inf).all()
        assert 0 < logits.softmax(1)[:, 3].max() <= 1.01 / 24, "at most 1/N"


@pytest.mark.parametrize("weighting", [None, "balanced"])
def test_the_temperature_has_the_least_loss_on_held_out_images(weighting):
    draw = np.random.default_rng(0)
    labels = np.repeat([0, 2, 3], [60, 40, 20])  # class 1 has no image
    features = draw.normal(size=(120, 8)) + 0.7 * np.eye(8)[labels]
    train, held = stratified_folds(labels, None, 3)[0]
    weight, bias = evaluate.fit_linear(features[train], labels[train], 4, 100.0, weighting)
    shares = {k: 24 / (3 * (labels[held] == k).sum()) if weighting else 1.0 for k in (0, 2, 3)}

    def loss(heat):
        total = 0.0
        for x, y in zip(features[held], labels[held], strict=True):
            logits = {k: (x @ weight[k] + bias[k]) / heat for k in (0, 2, 3)}
            log_sum = np.log(sum(np.exp(v) for v in logits.values()))
            for k, logit in logits.items():
                target = 0.1 / 3 + 0.9 * (k == y)
                total -= shares[y] * target * (logit - log_sum)
        return total

    grid = np.geomspace(1, 50, 2000)
    expected = grid[np.argmin([loss(heat) for heat in grid])]
    temperature = evaluate.fit_temperature(
        features, labels, 100.0, seed=3, smoothing=0.1, class_weight=weighting
    )
    assert len(held) == 24
    assert expected > 2
    assert temperature == approx(expected, rel=5e-3)
    assert evaluate.fit_temperature(features, labels, 1e-4, seed=3) == approx(1, abs=1e-3), (
        "never sharpened"
    )
    assert evaluate.fit_temperature(features[[0, 60]], labels[[0, 60]], 1.0) == 1.0, (
        "one image a class"
    )


@pytest.mark.parametrize("name", ["levit_128s", "volo_d1_224", "crossvit_9_240"])
def test_classifiers_that_are_more_than_linear(name):
    """A norm, a network, several widths, tokens beside the pooled features: an error if asked for,
    else a line."""
    spec = ModelSpec(name, {}, 3, [0.5] * 3, [0.5] * 3, 0.0, None)
    finetune = config.FinetuneConfig(init="a", train=config.FinetuneTrain())
    resolved, (note,) = fill_classifier_init(finetune, spec)
    assert resolved.train.classifier_init == "random"
    assert note == f"{KEY}: random, as the classifier of {name} is not linear in its features"
    with pytest.raises(
        UserError, match=f"{KEY}: features, but the classifier of {name} is not linear in them"
    ):
        fill_classifier_init(
            replace(finetune, train=config.FinetuneTrain(classifier_init="features")), spec
        )


def test_the_start_is_the_probes_accuracy(init, tuned):
    features, labels = by_hand(init)
    held, truth = by_hand(init, part="test")
    names = list_images(config.Data(), labelled=True).train.names
    subset = config.Data(subset=config.data.Subset(total=96))
    rows = [names.index(name) for name in list_images(subset, labelled=True).train.names]
    train_features = features[rows]
    classes = labels[rows]
    strength = evaluate.choose_strength(train_features, classes).strength
    expected = 100 * np.mean(linear(train_features, classes, strength).predict(held) == truth)
    results = result(tuned)
    text = logged(tuned)
    assert results["start_top1"] == approx(expected, abs=1.2), (
        "images of train are decoded for larger crops"
    )
    assert (
        "features of 96 training images, C = 1, chosen by default, as there are under 10 "
        "images per class" in text
    )
    assert f"before the first step: top-1 {results['start_top1']:.2f} on 360 test images" in text
    assert "features for the classifier, of train: 96 images" in text


def test_an_init_means_features_also_after_a_resume(init, tuned, tmp_path, monkeypatch):
    """To the last bit, in the phase that was fitted and in the next; the first accuracy is not
    measured again."""
    for stop in (
        (1, 0, 2),
        (2, 0, 1),
    ):
        out = tmp_path / f"cut-{stop[0]}"
        with monkeypatch.context() as patch:
            stop_at(patch, *stop)
            assert inside("finetune", out, **RUN, init=str(init)) == 130
            patch.setattr("idmm.runs.first_weights.fit_classifier", None)
            inside_ok(
                "finetune",
                out,
                **RUN,
                init=str(init),
                resume="must",
            )
        assert same(out, tuned)
        assert result(out)["start_top1"] == result(tuned)["start_top1"]
        assert read(out / "config.yaml")["train"]["classifier_init"] == "features"
        assert f"{KEY}: features, the default with an init" in logged(out)


def test_features_that_are_all_alike_give_no_start(init, tmp_path, monkeypatch, capsys):
    """A collapsed backbone: weights that tell its features apart would be so large that the loss
    explodes."""
    monkeypatch.setattr("idmm.runs.first_weights.spread", lambda features: 0.001)
    larger = {**RUN, "stages": [{"size": 24, "epochs": 1}]}
    inside_ok(
        "finetune",
        tmp_path / "x",
        **larger,
        init=str(init),
        train__classifier_init="features",
    )
    errors = capsys.readouterr().err
    assert (
        "hardly differ (feature_std 0.001), so the classifier starts from fresh weights" in errors
    )
    assert "start_top1" not in result(tmp_path / "x")


RESNET = {"model__name": "resnet10t", "model__kwargs": {"channels": [8, 8, 16, 16]}}
FROM = {"model__name": None, "model__kwargs": None}  # as the weights say
DECAY = {"train__layer_decay": 0.5}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A few epochs of pretraining a small ConvNet, whose weights others start from."""
    out = tmp_path_factory.mktemp("source") / "run"
    inside_ok("pretrain", out, **RESNET, train__epochs=2)
    return out


@pytest.fixture(scope="module")
def adapted(source):
    """The same images again, from those weights, each stage at a rate of its own."""
    out = source.parent / "adapted"
    inside_ok(
        "pretrain",
        out,
        **FROM,
        **DECAY,
        init=str(source),
    )
    return out


def test_rates_by_layer():
    """As a table by hand: the last block and what stands on it have the run's rate, each below half
    the one above."""
    backbone = create_backbone(
        "vit_tiny_patch16_224", 16, patch_size=8, embed_dim=16, depth=3, num_heads=2
    )
    method = make("idmm", of=backbone, classifier="cosine", classifier_lr_scale=10.0)
    others = {"classifier": (method.classifier, 10.0)}
    optimizer = create_optimizer(
        backbone, others, config.PretrainTrain(layer_decay=0.5, weight_decay=0.1), 1e-3
    )
    names = {id(p): name for name, p in method.named_parameters()}
    groups = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert groups.keys() == {name for name, _ in method.named_parameters()}
    for name, group in groups.items():
        part = name.split(".")
        layer = int(part[2]) + 1 if "blocks" in part else 3 if part[1] == "norm" else 0
        expected = 10.0 if part[0] == "classifier" else 0.5 ** (3 - layer)
        assert group["lr_scale"] == expected, name
        spared = part[-1] in ("bias", "pos_embed", "cls_token", "scale") or "norm" in name
        assert group["weight_decay"] == (0.0 if spared else 0.1), name


def test_knn_before_and_after(source, adapted):
    """Before the first step it is what idmm probe finds, at the end that of the last record."""
    results = result(adapted)
    probed = idmm.probe(
        {
            "init": str(source),
            "size": 16,
            "data": {"name": "digits", "subset": {"total": 96}},
            "device": "cpu",
            "out": str(source.parent / "probed"),
        }
    )
    assert results["start_knn"] == approx(probed["knn"])
    assert [record.get("knn") for record in metrics(adapted)] == [None, None, results["knn"]]
    line = (
        f"kNN accuracy: {results['start_knn']:.1f} before the first step, "
        f"{results['knn']:.1f} at the end"
    )
    assert line in logged(adapted)


def test_the_recipe_takes_the_model_of_the_weights(source, tmp_path):
    out = tmp_path / "run"
    few = "--data.subset '{total: 40}' --data.workers 0 --train.epochs 1 --views.size 16"
    argv = f"pretrain --config adapt --init {source} {few} --train.precision fp32 --out {out}"
    call_ok(argv)
    settings = read(out / "config.yaml")
    assert settings["model"]["name"] == "resnet10t"
    assert settings["train"]["lr"] == 5e-4
    assert {"start_knn", "knn"} < result(out).keys()
    assert f"features before training, by the weights of '{source}': 40 images" in logged(out)
