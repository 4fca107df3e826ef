"""Labels for images without one: the maths against a dense solution, the step of ``idmm train``."""

import os

import numpy as np
import pytest
import timm
import torch
import yaml
from folders import section, tree
from frozen import a_run
from helpers import VIT, call_ok, logged, read
from numpy.random import default_rng
from PIL import Image
from safetensors.torch import load_file

import idmm
from idmm.auto import pseudolabels as train_pseudolabels
from idmm.auto.plan import Classifier, Plan
from idmm.config.commands import TrainCommand
from idmm.data.listing import list_images
from idmm.evaluation import similarity
from idmm.files import read_csv as rows

pytestmark = pytest.mark.usefixtures("own_cache")
COLOURS = {"blue": (30, 40, 200), "red": (200, 40, 30)}
FEW = ["--data.labelled", "{per_class: 2}"]
MODEL = [
    "--model.name",
    "vit_tiny_patch16_224",
    "--model.kwargs",
    yaml.safe_dump(VIT, default_flow_style=True).strip(),
]
MODEL += ["--data.workers", 0]


def coloured(root, **counts):
    """Makes ROOT/SPLIT/CLASS/*.png of noise around a colour each; of a split without classes in
    turn."""
    rng = default_rng(0)
    for split, count in counts.items():
        for i in range(count):
            name = list(COLOURS)[i % 2]
            path = root / split / (name if split != "unlabelled" else "") / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(np.array(COLOURS[name]) + rng.normal(0, 25, (24, 24, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return coloured(
        tmp_path_factory.mktemp("images") / "d",
        train=16,
        test=8,
        unlabelled=6,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("run"), size=24)


def test_spread_labels_as_the_papers_have_it():
    """(I - a S)^-1 Y of a dense graph written out, with columns and rows divided by their sums."""
    rng = default_rng(0)
    features = similarity.unit_rows(rng.normal(size=(30, 6)) + 4 * np.eye(6)[np.arange(30) % 3])
    labels = np.where(np.arange(30) < 7, np.arange(30) % 3, -1)  # 3, 2 and 2 labels
    near = similarity.nearest(features, 4)
    weight = np.zeros((30, 30))
    for i in range(30):
        for j in near.index[i]:
            weight[i, j] = max(features[i].astype(float) @ features[j].astype(float), 0) ** 3
    weight = weight + weight.T
    degree = weight.sum(axis=1)
    smooth = weight / np.sqrt(degree[:, None] * degree[None])
    shares = np.linalg.inv(np.eye(30) - 0.9 * smooth) @ np.array(
        [[label == c for c in range(3)] for label in labels]
    )
    shares = shares / shares.sum(axis=0)
    shares = shares / shares.sum(axis=1, keepdims=True)
    actual = similarity.spread_labels(near, labels, 3)
    np.testing.assert_allclose(actual, shares, atol=2e-5)
    assert (actual[7:].argmax(axis=1) == np.arange(7, 30) % 3).mean() > 0.8, "the groups are found"


def test_spread_labels_where_none_reaches():
    """Two groups that no edge joins, one of them without a label; a class without a label is
    nobody's."""
    features = np.repeat(np.eye(2, dtype=np.float32), 4, axis=0)
    labels = np.array([1, -1, -1, -1, -1, -1, -1, -1])
    actual = similarity.spread_labels(similarity.nearest(features, 3), labels, 3)
    np.testing.assert_allclose(actual[:4], np.tile([0.0, 1, 0], (4, 1)))
    assert not actual[4:].any()


def test_spread_labels_over_many_hops():
    """A chain of 400 rows with a label at either end: each half is of the nearer one, however
    little reaches it."""
    index = np.clip(np.stack([np.arange(400) - 1, np.arange(400) + 1], axis=1), 0, 399)
    index[0], index[-1] = 1, 398
    near = similarity.Neighbours(index, np.ones((400, 2), dtype=np.float32))
    labels = np.array([0, *[-1] * 398, 1])
    assert (
        similarity.spread_labels(near, labels, 2).argmax(axis=1).tolist() == [0] * 200 + [1] * 200
    )


def section_of(root, **changes):
    return section(root, labelled={"per_class": 2}, **changes)


def labelled(
    run, data, out, teacher=None, seed=0, estimated=(Classifier.BASELINE, Classifier.JOINED_LINEAR)
):
    """Runs the step; returns what it found and the rows of its file. ``estimated``: on held-out
    images."""
    plan = Plan(
        "pretrain",
        {},
        [],
        size=32,
        label_size=48,
        joined=True,
    )
    splits = list_images(data, labelled=True, unlabelled=True)
    command = TrainCommand(out=str(out), device="cpu", seed=seed)
    summary, candidates = train_pseudolabels.pseudolabel(run, teacher, plan, splits, command)
    assert set(candidates) == {*estimated}
    return summary, rows(out / "pseudolabels.csv")


def test_a_teacher_joins_the_graph_if_its_predictions_agree(run, images, tmp_path, monkeypatch):
    """One that knows the colours, and one that guesses. Features of both are random."""
    _, alone = labelled(run, section_of(images), tmp_path / "alone")
    for every in (1, 3):  # of these images one is blue, and the next red

        def learned(teacher, train, *_, every=every):
            numbers = [int(os.path.basename(path)[:-4]) for path in train.items]
            return default_rng(0).normal(size=(len(train), 4)), np.array(numbers) // every % 2

        monkeypatch.setattr(train_pseudolabels, "_learned_by", learned)
        summary, lines = labelled(run, section_of(images), tmp_path / str(every), teacher="run")
        assert (summary.teacher_agreement == pytest.approx(100)) == (lines != alone) == (every == 1)


def test_what_is_written(run, images, tmp_path, caplog):
    caplog.set_level("INFO", "idmm")
    summary, lines = labelled(run, section_of(images), tmp_path)
    assert summary.given == 4
    assert summary.added == 18
    assert summary.agreement == pytest.approx(100)
    of = {split: [row for row in lines if row["split"] == split] for split in ("train", "test")}
    assert len(of["train"]) == 22
    assert len(of["test"]) == 8, "also those in unlabelled"
    known = [row for row in lines if row["given"] == "yes"]
    assert len(known) == 4 + 8
    assert all(row["share"] == "1" for row in known)
    for row in lines:
        folder = row["path"].split("/")[0]
        name = list(COLOURS)[int(row["path"].split("/")[-1][:-4]) % 2]
        assert row["class"] == name
        assert row["given"] == "yes" or 0.5 < float(row["share"]) <= 1, folder
    line = "pseudolabels.csv: 18 images without a label got a guessed one, from 4 that had one"
    assert f"{tmp_path}/{line}" in caplog.messages
    phrase = "agree on the class in 100 % of cases, corrected for chance"
    assert any(phrase in line for line in caplog.messages)
    joined = idmm.load_backbone(tmp_path / "features")
    network = idmm.load_backbone(run)
    x = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(joined.frozen(x), network(x))
    labelled(run, section_of(images), tmp_path / "again", seed=1)
    again = idmm.load_backbone(tmp_path / "again/features")
    weights, others = (each.learned.network.conv1[0].weight for each in (joined, again))
    assert not torch.equal(weights, others), "the fresh ConvNet is the seed's"


def test_features_that_say_nothing(run, tmp_path, caplog):
    """Random pixels: the labels are not used, and the file is written all the same."""
    caplog.set_level("INFO", "idmm")
    root = tree(tmp_path / "d", train={"cat": 12, "dog": 12}, test={"cat": 2, "dog": 2})
    (root / "train/cat/5.png").write_bytes(b"no image")
    # one class has one image
    summary, lines = labelled(run, section_of(root), tmp_path, estimated=())
    assert len(lines) == 27
    assert summary.baseline_top1 is None
    assert any("skipped 1 of 24 images that cannot be read" in line for line in caplog.messages)
    assert any(line.startswith("the pseudo-labels are not used: ") for line in caplog.messages)


def test_groups_go_along(run, tmp_path):
    """Those of the given images; one without a group is its own. Fine-tuning on the file has them,
    too."""
    root = coloured(
        tmp_path / "d",
        train=8,
        test=4,
        unlabelled=2,
    )
    names = [path.relative_to(root).as_posix() for path in root.rglob("*.png")]
    lines = [f"{name},{name[:-4]}g" for name in names if not name.startswith("unlabelled")]
    (tmp_path / "g.csv").write_text("\n".join(["path,group", *lines]))
    for row in labelled(run, section_of(root, groups=str(tmp_path / "g.csv")), tmp_path)[1]:
        ungrouped = row["path"].startswith("unlabelled")
        assert row["group"] == (row["path"] if ungrouped else f"{row['path'][:-4]}g")
    splits = list_images(section(root, labels=str(tmp_path / "pseudolabels.csv")), labelled=True)
    assert len(splits.train) == 10
    assert len(set(splits.test.groups)) == 4


def trained(monkeypatch, images, out, *argv, threshold=70):
    """Runs ``idmm train``, whose pseudo-labels are used from an agreement on; returns train.json.

    Similar images agree in 100 % of cases here.
    """
    for module in ("train", "pseudolabels"):
        monkeypatch.setattr(f"idmm.auto.{module}.AGREEMENT", threshold)
    argv = ["train", images, *FEW, "--data.workers", 0, "--device", "cpu", "--out", out, *argv]
    call_ok(argv)
    saved = read(out / "train.json")
    call_ok(argv)
    assert read(out / "train.json") == saved, "finished"
    return saved


@pytest.mark.parametrize(
    "threshold, init",
    [
        (70, None),
        (101, "stage1"),
    ],
)
def test_a_network_of_ones_own(threshold, init, images, tmp_path, monkeypatch, capsys, fake_clock):
    """Fresh weights learn from pseudo-labels, or the pretrained ones from the given labels. The
    baseline is that of the given labels."""
    out = tmp_path / "x"
    flags = [*MODEL, "--minutes", 2, "--size", 16]
    saved = trained(monkeypatch, images, out, *flags, threshold=threshold)
    assert saved["plan"]["way"] == "pretrain"
    assert saved["pseudolabels"]["given"] == 4
    assert saved["pseudolabels"]["added"] == 18
    config = read(out / "config.yaml")
    first, last = (read(out / part / "result.json") for part in ("stage1", ""))
    assert first["train_size"] == 22
    assert config["init"] == (init and str(out / init))
    if init is None:
        assert last["train_size"] == 22
        assert config["data"]["labels"] == str(out / "pseudolabels.csv")
        assert last["baseline_top1"] == saved["pseudolabels"]["baseline_top1"]
    else:
        assert last["train_size"] == 4
        assert config["data"]["labels"] is None
    floor = saved["result"]["baseline_top1"]
    assert last["baseline_top1"] == floor
    line = f"the baseline, fitted to 4 of 4 labelled images: {floor:.1f} %"
    assert line in capsys.readouterr().out
    assert first["seconds"] + last["seconds"] < 125, "all together"


@pytest.mark.parametrize(
    "threshold, alone, best",
    [
        (70, 55, "joined features and ConvNet on pseudo-labels"),
        (101, 55, "linear classifier on joined features"),
        (101, 101, "joined features and ConvNet"),
    ],
)
def test_joined_features_are_the_classifier(
    threshold, alone, best, images, tmp_path, capsys, monkeypatch, fake_clock
):
    """Features of a network and hand-made ones, in one file."""
    monkeypatch.setattr("idmm.auto.pseudolabels.ALONE", alone)
    fake_clock.step = 10.0
    out = tmp_path / "x"
    saved = trained(monkeypatch, images, out, "--minutes", 2, threshold=threshold)
    assert saved["best"] == best
    assert read(out / "stage1/config.yaml")["train"]["max_epochs"] == 75
    assert saved["minutes"]["last"] <= 0.4 * 2
    assert "  linear classifier on joined features: " in capsys.readouterr().out
    config = read(out / "config.yaml")
    result = read(out / "result.json")
    assert config["init"] == str(out / "features")
    assert saved["result"]["baseline_train_size"] == 4
    assert result["train_size"] == (22 if threshold == 70 else 4)
    info = read(out / "model.json")
    assert info["name"] == "hog_conv"
    assert info["kwargs"]["frozen"]["name"] == "resnet10t"
    model = timm.create_model(info["name"], **info["kwargs"])
    model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    if alone == 55 and threshold == 101:
        assert config["model"]["freeze"]
        assert result["top1"] == result["start_top1"], "nothing is trained"
    else:
        assert model.learned_weight > 0
    if alone == 101:
        assert "temperature 1\n" in logged(out), "what training does not see"
