"""Keys, recipes and refusals of detection and segmentation, and the schedules that they brought."""

import importlib.util

import pytest
import torch
from dense_trees import coco_tree, mask_tree
from folders import paint
from helpers import TINY, as_flags, refused

from idmm.config import DetectConfig, SegmentConfig
from idmm.config.parsing import build
from idmm.models.weights import save_model
from idmm.training.schedule import learning_rate

MODEL = as_flags(
    {},
    {name: TINY[name] for name in ("model.name", "model.kwargs", "data.workers")},
)
FALLING = [0.1] * 6 + [0.01, 0.01, 0.01, 0.001]
LINE = [0.1 * (12 - step) / 10 for step in range(2, 12)]


@pytest.mark.parametrize(("kind", "expected"), [("steps", FALLING), ("linear", LINE)])
def test_schedules(kind, expected):
    """Steps fall to a tenth; a straight line goes to zero. Both after two steps of warm-up."""
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1}])
    schedule = learning_rate(optimizer, 12, 2, kind, [8, 11] if kind == "steps" else ())
    rates = []
    for step in range(12):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[:2] == pytest.approx([1e-6, 0.05], rel=1e-3)
    assert rates[2:] == pytest.approx(expected)


def test_the_supplements_protocols():
    """Sections 4.1 and 4.2 of the drloc supplement."""
    detect = build(DetectConfig, "maskrcnn_1x")
    segment = build(SegmentConfig, "upernet_160k")
    train = detect.train
    assert (train.lr, train.weight_decay, train.batch_size, train.epochs) == (
        1e-4,
        0.05,
        16,
        12,
    )
    assert (train.schedule, train.lr_steps) == ("steps", [8, 11])
    assert (train.size, detect.augment.short_side) == (1333, [480, 800])
    train = segment.train
    assert (train.lr, train.weight_decay, train.batch_size, train.size) == (
        6e-5,
        0.01,
        16,
        512,
    )
    steps = -(-20_210 // 16)
    assert abs(train.epochs * steps - 160_000) < steps
    assert round(train.warmup_epochs * steps) in range(1490, 1511)
    assert (segment.model.pyramid_width, segment.model.auxiliary) == (
        512,
        0.4,
    )
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
        (
            [*detect, "--data.root", masks],
            "has no annotations of objects to train on, expected",
        ),
        (
            [*segment, "--data.root", coco],
            "has no images with masks to train on, expected",
        ),
        (
            [*detect, "--data.root", coco, "--train.size", 72],
            "train.size: image size 72x72: expected a multiple",
        ),
        (
            [*detect, "--data.root", coco, "--train.keep", "best"],
            "train.keep: best chooses by val",
        ),
        (
            [*segment, "--data.root", masks, "--out", masks / "images" / "x"],
            "lies among the images of",
        ),
    ):
        assert line in refused(capsys, argv)[-1]
        assert not out.exists()
        assert not (masks / "images" / "x").exists()


def test_a_missing_library_is_named(tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    libraries = {
        "detect": "pycocotools",
        "segment": "segmentation_models_pytorch",
    }
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *of: None if name in libraries.values() else find(name, *of),
    )
    image = paint(tmp_path / "images/1.png")
    out = tmp_path / "out"
    for stage, name in libraries.items():
        (line,) = refused(capsys, f"{stage} --data.root {image.parent} --out {out}")
        assert line.startswith(f"{stage}: needs {name}. Install it with: pip install")
        assert "[dense]" in line
        run = tmp_path / stage
        looks = dict(size=32, mean=(0.5,) * 3, std=(0.5,) * 3, extra={"task": stage})
        save_model(run, "model", {}, name="resnet10t", kwargs={}, **looks)
        (line,) = refused(capsys, f"predict --init {run} {image} --out {out}")
        assert f"{run}: needs {name}. Install it with: pip install" in line
        assert not out.exists()
