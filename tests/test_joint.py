"""One run with labels and without: the joint loss against a naive loop, whose labels are used,
runs, and mistakes."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import TINY, paint, result, section, tree
from frozen import exported, timms
from helpers import (
    VIT,
    distance,
    flags,
    inside_ok,
    metrics,
    read,
    refused,
    run_info,
    state,
    weights,
)
from PIL import Image
from pytest import approx
from test_distributed import ALONE, both
from test_losses import naive as naive_instance
from tiny import SIDE, assert_same_loss, backbone, batch, make

from idmm.config import Subset
from idmm.data.listing import list_images
from idmm.methods.mixing import draw_cutmix, mix_images
from idmm.models import create_backbone, feature_width
from idmm.seeding import numpy_rng

SHARE = 0.5  # of the images that have labels


def joint(decay="none", groups=1, weight=3.0, classes=3, **fields):
    info = run_info(
        12,
        classes=classes,
        epochs=8,
        global_groups=groups,
        labelled=6,
    )
    fields = {"cutmix_alpha": 0.0, "label_smoothing": 0.1, **fields}
    of = backbone(num_classes=classes).double()
    return make(
        "idmm",
        of,
        info,
        label_weight=weight,
        instance_decay=decay,
        **fields,
    ).double()


def labelled_batch(labels=(2, -1, 0, -1), counts=(2, 1)):
    return {**batch(*counts), "label": torch.tensor(labels)}


def smoothed(logits, label, smoothing):
    """Cross-entropy with torch's smoothing, over all K, class by class."""
    norm = torch.logsumexp(logits, 0)
    shares = [smoothing / len(logits) + (1 - smoothing) * (c == label) for c in range(len(logits))]
    return -sum(share * (o - norm) for share, o in zip(shares, logits, strict=True))


def naive(method, inputs, key=5, left=1.0):
    """The joint loss, crop by crop; what a crop is mixed with is drawn as the method draws it."""
    alpha = method.config.cutmix_alpha
    smoothing = method.config.label_smoothing
    scale = method.classifier.scale
    instance = 0.0
    label = 0.0
    crops = 0
    for number, views in enumerate(inputs["views"]):
        count = views.shape[1]
        views, rows = views.flatten(0, 1), [i for i in range(len(views)) for _ in range(count)]
        partner = list(range(len(views)))
        lam = 1.0
        if alpha:
            mix = draw_cutmix(len(views), SIDE, SIDE, alpha, numpy_rng(key, "cutmix", number))
            views = mix_images(views, mix)
            partner = mix.partner.tolist()
            lam = mix.lam
        tokens = method.backbone.forward_features(views)
        pooled = method.backbone.forward_head(tokens, pre_logits=True)
        logits = method.backbone.forward_head(tokens)
        w = method.classifier.weight
        instances = inputs["index"][rows]
        if scale is not None:
            pooled = torch.nn.functional.normalize(pooled) * scale
            w = torch.nn.functional.normalize(w)
        instance = instance + naive_instance(
            pooled, w, instances, instances[partner], lam, smoothing
        )
        if number >= method.global_groups:
            continue
        crops += len(views)
        for crop, row in enumerate(rows):
            for of, share in (
                (row, lam),
                (rows[partner[crop]], 1 - lam),
            ):
                if inputs["label"][of] >= 0:
                    label = label + share * smoothed(logits[crop], inputs["label"][of], smoothing)
    return method.config.label_weight * label / (SHARE * crops) + left * instance


@pytest.mark.parametrize(
    "alpha, classifier, groups",
    [
        (0.0, "linear", 1),
        (0.5, "cosine", 2),
    ],
)
def test_the_loss_and_its_gradients_are_those_of_a_naive_loop(alpha, classifier, groups):
    method = joint(groups=groups, cutmix_alpha=alpha, classifier=classifier)
    assert_same_loss(method, labelled_batch(), naive, rtol=1e-5, atol=1e-6)


def test_the_instance_part_fades():
    method = joint("cosine")
    for epoch in (0, 3, 7):
        left = (1 + math.cos(math.pi * epoch / 8)) / 2
        assert float(method(labelled_batch(), 5, epoch)["instance_weight"]) == approx(left)
    assert_same_loss(
        method, labelled_batch(), lambda m, b: naive(m, b, left=left), epoch=7, rtol=1e-5, atol=1e-6
    )


def test_a_batch_without_labels_still_uses_the_classifier():
    method = joint()
    bare = labelled_batch(labels=(-1,) * 4)
    assert_same_loss(
        method,
        bare,
        lambda m, b: naive(m, b) + 0 * m.backbone.head(torch.zeros(1, 16).double()).sum(),
        rtol=1e-5,
        atol=1e-6,
    )
    out = method(bare, 5, 0)
    assert out["label_loss"] == 0
    assert out["loss"] == out["instance_loss"]
    out["loss"].backward()
    for p in method.parameters():
        assert p.grad is not None, "or several processes would wait for each other"
    assert method.backbone.head.weight.grad.abs().sum() == 0


@pytest.mark.parametrize(
    "name, size, kwargs",
    [
        ("deit_tiny_distilled_patch16_224", 32, VIT),  # two of them
        ("levit_128s", 224, {}),  # a norm before it
        ("volo_d1_224", 64, {}),  # another beside it
    ],
)
def test_logits_are_the_models_own(name, size, kwargs):
    """What is trained is what the exported model computes."""
    torch.manual_seed(0)
    model = create_backbone(name, size, num_classes=3, **kwargs).eval()
    for module in model.modules():  # norms whose start would hide that they were passed by
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            torch.nn.init.uniform_(module.running_mean)
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        tokens = model.forward_features(images)
        pooled, logits = (
            make("idmm", model, label_weight=1.0)
            .eval()
            .pooled_and_logits(tokens)
            .split([feature_width(model), 3], 1)
        )
        torch.testing.assert_close(logits, model(images))
        torch.testing.assert_close(pooled, model.forward_head(tokens, pre_logits=True))


def test_labels_are_drawn_as_a_subset_is(tmp_path):
    draw = {"per_class": 2, "seed": 3}
    root = tree(tmp_path / "d", train={"a": 6, "b": 8}, test={"a": 1, "b": 1})
    paint(root / "unlabelled/deep/er/x.png", 1)
    held = {"val_fraction": 0.25}
    drawn = list_images(section(root, subset=Subset(**draw), **held), labelled=True).train
    train = list_images(
        section(root, labelled=Subset(**draw), **held), labelled=True, unlabelled=True
    ).train
    known = train.labels >= 0
    assert np.array(train.names)[known].tolist() == drawn.names
    assert train.labels[known].tolist() == drawn.labels.tolist()
    assert train.names[-1] == "unlabelled/deep/er/x.png"
    assert train.labels[-1] == -1
    assert not known.all()


def test_what_unlabelled_is_for(tmp_path, caplog):
    root = tree(tmp_path / "d", train={"a": 4, "b": 4}, test={"a": 1, "b": 1})
    for i in range(3):
        paint(root / f"unlabelled/{i}.png", 50 + i)
    (root / "unlabelled/notes.txt").write_text("")
    with caplog.at_level("INFO"):
        splits = list_images(section(root), labelled=False)
    assert f"data.root: '{root}' has 8 images, and 3 more without labels" in caplog.messages
    assert len(splits.train) == 11
    assert splits.train.labels.tolist() == [0] * 4 + [1] * 4 + [-1] * 3
    assert len(list_images(section(root), labelled=True).train) == 8, "fine-tuning and probes"
    fields = {
        "subset": Subset(per_class=2),
        "val_fraction": 0.25,
        "groups": "([0-9])",
    }
    some = list_images(section(root, **fields), labelled=False)
    held = {name[-5] for part in (some.val, some.test) for name in part.names}
    more = [f"unlabelled/{i}.png" for i in range(3) if f"{i}" not in held]
    assert "0" in held
    assert [name for name in some.train.names if not name.startswith("train/")] == more


SMALL = {
    **TINY,
    "train__epochs": 2,
    "train__accumulate": 1,
    "method__label_weight": 3.0,
    "train__lr": 0.003,
    "views__crops": [{"count": 2, "scale": [0.35, 1.0]}],
    "train__save_minutes": 60,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tree(
        tmp_path_factory.mktemp("joint") / "d", train={"a": 8, "b": 8}, test={"a": 3, "b": 3}
    )
    for i in range(4):
        paint(root / f"unlabelled/{i}.png", 70 + i)
    return root


@pytest.fixture(scope="module")
def ran(root, tmp_path_factory):
    """A joint run: half of the labels, averaged weights, kNN, a fading N-way part."""
    out = tmp_path_factory.mktemp("ran") / "run"
    flags_of_run = dict(
        SMALL,
        data__root=str(root),
        data__labelled={"per_class": 4},
        method__instance_decay="cosine",
        train__ema=0.9,
        train__knn_every=1,
    )
    inside_ok("pretrain", out, **flags_of_run)
    return out, flags_of_run


def test_a_run_is_tested_and_exports_its_classifier(ran, root):
    out, _ = ran
    results = result(out)
    info = read(out / "model.json")
    assert results["train_size"] == 20
    assert results["labelled_size"] == 8
    assert results["test_size"] == 6
    assert results["num_classes"] == 2
    assert {"top1_interval", "mean_per_class", "loss", "knn"} <= {*results}
    assert info["classes"] == ["a", "b"]
    assert info["kwargs"]["num_classes"] == 2
    assert info["ema"] is True
    assert {"predictions.csv", "per_class.csv", "confusion.png", "curves.png"} <= {*os.listdir(out)}
    model, _ = exported(out)
    names = sorted((root / "test").glob("*/*"))
    images = torch.stack([timms(info)(Image.open(name)) for name in names])
    with torch.inference_mode():
        right = [
            info["classes"][k] == name.parent.name
            for k, name in zip(model(images).argmax(1), names, strict=True)
        ]
    assert results["top1"] == approx(100 * np.mean(right))
    shared = weights(out)
    for n, t in shared.items():
        if n.startswith("backbone/"):
            assert torch.equal(t, shared[f"model/{n[9:]}"])
    assert torch.equal(shared["model/head.weight"], state(out)["ema"]["head.weight"])
    log = (out / "log.txt").read_text()
    assert "method.label_weight: 8 of 20 training images are used with their labels" in log
    assert "has 16 images, and 4 more without labels" in log


OWN = ("classifier", "classifier_init", "classifier_lr_scale", "label_weight")
OTHER = {f"method__{key}": None for key in OWN}
MISTAKES = [  # what is changed, and how the last line begins
    ({"data__root": "bare"}, "data.root: 'bare' has no 'train' folder"),
    (
        {"data__root": "untested"},
        "data.root: 'untested' has no 'val' or 'test' images to evaluate on",
    ),
    (
        {"data__labelled": {"per_class": 2}, "method__label_weight": None},
        "data.labelled: no label is used, as ",
    ),
    (
        {"data__labelled": {"total": 17}},
        "data.labelled.total: 17 is more than the 16 training images",
    ),
    (
        {"data__labelled": {"total": 1}},
        "data.labelled: the images that are drawn are all of class ",
    ),
    (
        {
            **OTHER,
            "method__name": "supcon",
            "data__labelled": {"per_class": 2},
        },
        "data.labelled: supcon cannot use images without labels. ",
    ),
    (
        {**OTHER, "method__name": "simclr", "method__label_weight": 1},
        "method.label_weight: got 1, but simclr has no such option. Leave it out.",
    ),
]


@pytest.mark.parametrize(
    "changes, line", MISTAKES, ids=[line.split(" ")[0] for _, line in MISTAKES]
)
def test_mistakes_leave_no_folder(changes, line, root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "bare/0.png")
    tree(tmp_path / "untested", train={"a": 2, "b": 2})
    changed = {**SMALL, "data__root": str(root), **changes}
    *_, last = refused(capsys, ["pretrain", *flags("pretrain", "run", **changed)])
    assert last.startswith(line)
    assert not Path("run").exists()


def test_two_processes_are_one(root, tmp_path):
    """Few labels: most batches have none. Weights and both parts of the loss are those of one
    process."""
    run = {
        **SMALL,
        **ALONE,
        "method__cutmix_alpha": 0,
        "data__labelled": {"total": 3},
        "data__root": str(root),
    }
    run |= {"train__optimizer": "sgd", "train__lr": 0.05, "train__batch_size": 5}
    one, two, _ = both("pretrain", tmp_path, **run)
    assert distance(one, two) < 1e-5
    for a, b in zip(metrics(one), metrics(two), strict=True):
        for name in ("loss", "label_loss", "instance_loss"):
            assert b[name] == approx(a[name], rel=1e-4, abs=1e-6)
    assert result(one)["top1"] == result(two)["top1"]
