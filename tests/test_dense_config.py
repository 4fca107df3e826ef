"""Keys, recipes and refusals of detection and segmentation, and the schedules that they brought."""

import importlib.util

import pytest
import torch
from dense_trees import coco_tree, mask_tree
from folders import paint
from helpers import VIT, _flow, refused

from idmm.config import DetectConfig, SegmentConfig
from idmm.config.parsing import build
from idmm.models.weights import save_model
from idmm.training.schedule import learning_rate

MODEL = [
    "--model.name",
    "vit_tiny_patch16_224",
    "--model.kwargs",
    _flow(VIT),
    "--data.workers",
    "0",
]


def rates(kind, steps, warmup, falls=()):
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1}])
    schedule = learning_rate(optimizer, steps, warmup, kind, falls)
    values = []
    for step in range(steps):
        schedule.step_update(step)
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_schedules():
    """Steps fall to a tenth; a straight line goes to zero."""
    values = rates("steps", 12, 2, [8, 11])
    assert values[0] == pytest.approx(1e-6)
    assert values[1] == pytest.approx(0.05, rel=1e-3)
    assert values[2:] == pytest.approx([0.1] * 6 + [0.01, 0.01, 0.01, 0.001])
    assert rates("linear", 12, 2)[2:] == pytest.approx(
        [0.1 * (12 - step) / 10 for step in range(2, 12)]
    )


def test_the_supplements_protocols():
    """Sections 4.1 and 4.2 of the drloc supplement."""
    detect = build(DetectConfig, "maskrcnn_1x")
    segment = build(SegmentConfig, "upernet_160k")
    train = detect.train
    assert (train.lr, train.weight_decay, train.batch_size, train.epochs) == (1e-4, 0.05, 16, 12)
    assert (train.schedule, train.lr_steps) == ("steps", [8, 11])
    assert (train.size, detect.augment.short_side) == (1333, [480, 800])
    train = segment.train
    assert (train.lr, train.weight_decay, train.batch_size, train.size) == (6e-5, 0.01, 16, 512)
    steps = -(-20_210 // 16)
    assert abs(train.epochs * steps - 160_000) < steps
    assert round(train.warmup_epochs * steps) in range(1490, 1511)
    assert (segment.model.pyramid_width, segment.model.auxiliary) == (512, 0.4)
    assert train.schedule == "linear"
    assert segment.model.drop_path == 0.2
    assert segment.augment.scale == [0.5, 2.0]
    assert segment.eval_scales == [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]


def test_what_is_wrong_is_said_before_there_is_a_folder(tmp_path, capsys):
    coco_tree(tmp_path / "coco", form="boxes", train=3, val=2)
    mask_tree(tmp_path / "masks", train=3, val=2)
    coco = tmp_path / "coco"
    masks = tmp_path / "masks"
    out = tmp_path / "out"
    detect = ["detect", *MODEL, "--out", out, "--train.size", 64]
    segment = ["segment", *detect[1:]]
    for argv, line in (
        ([*segment, "--data.name", "flowers"], "data.name: got 'flowers'"),
        (
            [*detect, "--data.root", coco, "--data.subset", "{per_class: 2}"],
            "data.subset.per_class: these images have no",
        ),
        ([*detect, "--data.root", masks], "has no annotations of objects to train on, expected"),
        ([*segment, "--data.root", coco], "has no images with masks to train on, expected"),
        (
            [*detect, "--data.root", coco, "--train.size", 72],
            "train.size: image size 72x72: expected a multiple",
        ),
        ([*detect, "--data.root", coco, "--train.keep", "best"], "train.keep: best chooses by val"),
        (
            [*segment, "--data.root", masks, "--out", masks / "images" / "x"],
            "lies among the images of",
        ),
    ):
        said = refused(capsys, argv)
        assert line in said[-1], said
        assert not out.exists()
        assert not (masks / "images" / "x").exists()


def test_a_missing_library_is_named(tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    missing = {"pycocotools", "segmentation_models_pytorch"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name in missing else find(name, *of)
    )
    (tmp_path / "images").mkdir()
    for stage, name in (("detect", "pycocotools"), ("segment", "segmentation_models_pytorch")):
        (line,) = refused(
            capsys, [stage, "--data.root", tmp_path / "images", "--out", tmp_path / "out"]
        )
        assert line.startswith(f"{stage}: needs {name}. Install it with: pip install")
        assert "[dense]" in line
        run = tmp_path / stage
        looks = dict(size=32, mean=(0.5,) * 3, std=(0.5,) * 3, extra={"task": stage})
        save_model(run, "model", {}, name="resnet10t", kwargs={}, **looks)
        paint(tmp_path / "1.png")
        (line,) = refused(
            capsys, ["predict", "--init", run, tmp_path / "1.png", "--out", tmp_path / "out"]
        )
        assert f"{run}: needs {name}. Install it with: pip install" in line
        assert not (tmp_path / "out").exists()
