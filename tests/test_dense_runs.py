"""Whole runs of detection and segmentation by the command line: what they write, killed and taken
up again, refused."""

import json
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_trees import CLASSES, IDS, TURNS, ade_tree, coco_tree, mask_tree, store_turned
from helpers import (
    VIT,
    Forked,
    Together,
    _flow,
    call,
    logged,
    metrics,
    read,
    refused,
    same,
    state_file,
)
from PIL import Image
from pycocotools import coco
from pycocotools.cocoeval import COCOeval
from torchvision.models.detection.roi_heads import project_masks_on_boxes

from idmm.config import Data
from idmm.data.image_store import store_split
from idmm.dense.evaluate import classes_on_file, segmented
from idmm.dense.network import Detector, Segmenter, saved_network
from idmm.dense.read import read_images
from idmm.dense.transforms import DenseTransform
from idmm.errors import Interrupted
from idmm.files import read_csv as rows
from idmm.models.weights import read_checkpoint
from idmm.training.loop import Loop

SIDE = 64
TINY = {
    "model.name": "vit_tiny_patch16_224",
    "model.kwargs": VIT,
    "model.drop_path": 0.3,
    "model.pyramid_width": 16,
    "data.workers": 0,
    "train.size": SIDE,
    "train.epochs": 2,
    "train.batch_size": 4,
    "train.layer_decay": 0.9,
    "train.eval_every": 1,
    "train.precision": "fp32",
    "train.device": "cpu",
    "train.save_minutes": 0,  # every step
}
STAGES = {"detect": "coco", "segment": "masks"}


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """A folder with boxes and masks in COCO's format and one with masks, both with val and test."""
    root = tmp_path_factory.mktemp("trees")
    coco_tree(root / "coco", train=10, val=3, test=3)
    mask_tree(root / "masks", train=10, val=3, test=3)
    return root


def words(stage, trees, out, **changes):
    """The command line of a tiny run; changes by key, '__' for the dot, None to leave a flag
    out."""
    own = {"data.root": str(trees / STAGES[stage]), "out": str(out)}
    values = {**TINY, **own, **{key.replace("__", "."): value for key, value in changes.items()}}
    pairs = ((key, value) for key, value in values.items() if value is not None)
    return [
        stage,
        *(
            w
            for key, value in pairs
            for w in (f"--{key}", value if isinstance(value, str) else _flow(value))
        ),
    ]


@pytest.fixture(scope="module")
def whole(trees, tmp_path_factory):
    """Uninterrupted runs: boxes and masks from scratch, whose averaged weights count; then the best
    classes of pixels, from the backbone of the first."""
    folder = tmp_path_factory.mktemp("runs")
    assert call(words("detect", trees, folder / "detect", train__ema=0.9)) == 0
    assert call(words("segment", trees, folder / "segment", **own(folder))) == 0
    return folder


def own(folder):
    """What the run of segmentation changes."""
    return dict(
        model__name=None,
        model__kwargs=None,
        init=str(folder / "detect"),
        eval_scales=[0.5, 1.0],
        train__keep="best",
    )


def test_detection_writes_its_results(whole, trees):
    out = whole / "detect"
    result = read(out / "result.json")
    last = metrics(out)[-1]
    assert {
        "num_classes": 3,
        "train_size": 10,
        "test_size": 3,
        "seed": 0,
        "epochs": 2,
    }.items() <= result.items()
    assert {"ap", "ap50", "ap75", "mask_ap", "precision", "seconds"} <= result.keys()
    assert {
        "ap",
        "ap50",
        "ap75",
        "mask_ap",
        "classifier",
        "box",
        "mask",
        "rpn_box",
        "rpn_objectness",
    } <= last.keys()
    assert [row["class"] for row in rows(out / "per_class.csv")] == CLASSES
    for name in ("curves.png", "log.txt"):
        assert (out / name).stat().st_size > 0, name
    found = read(out / "predictions.json")
    assert found
    assert {entry["category_id"] for entry in found} <= set(IDS)
    truth = coco.COCO(str(trees / "coco" / "annotations" / "test.json"))
    truth.loadRes(str(out / "predictions.json"))  # the numbers of images are the file's


def test_segmentation_writes_its_results(whole):
    out = whole / "segment"
    result = read(out / "result.json")
    last = metrics(out)[-1]
    assert {"miou", "macc", "pixel_accuracy", "kept_epoch"} <= result.keys()
    assert result["num_classes"] == 4
    assert {"miou", "macc", "pixel_accuracy"} <= last.keys()
    assert [row["class"] for row in rows(out / "per_class.csv")] == ["background", *CLASSES]
    assert sum(int(row["pixels"]) for row in rows(out / "per_class.csv")) > 0
    assert sorted(path.name for path in (out / "masks").iterdir()) == [
        "000.png",
        "001.png",
        "002.png",
    ]
    assert "weights loaded" in logged(out) and "0 fresh" in logged(out), "init is where it starts"
    assert "train.keep: the weights of epoch" in logged(out)


@pytest.mark.parametrize("stage,score", [("detect", "ap"), ("segment", "miou")])
def test_who_knows_all_scores_all(tmp_path, monkeypatch, stage, score):
    """Networks that say what is there: the way onto the canvas and back to the files' pixels and
    numbers loses nothing, and COCO's own evaluation of what is written agrees."""
    # twice the files' long side
    side = 192
    answers = {}
    prepare = DenseTransform.__call__
    ade_tree(tmp_path / "masks", train=4, val=4)
    coco_tree(tmp_path / "coco", train=4, val=4)

    def peeked(transform, epoch, indices):
        if transform.augment is not None:
            return prepare(transform, epoch, indices)
        known = DenseTransform(transform.store, side, transform.mean, transform.std)
        batch = prepare(known, epoch, indices)
        for b, image in enumerate(batch["images"]):
            answers[image.numpy().tobytes()] = {name: value[b] for name, value in batch.items()}
        return prepare(transform, epoch, indices)

    def told(network, images):
        found = [answers[image.contiguous().numpy().tobytes()] for image in images]
        if stage == "segment":
            mask = torch.stack([one["mask"] for one in found])
            return 9.0 * F.one_hot(mask.where(mask != 255, 0), 150).permute(0, 3, 1, 2)
        outputs = []
        for one in found:
            there = one["labels"] >= 0
            boxes = one["boxes"][there]
            labels = one["labels"][there]
            count = int(there.sum())
            masks = project_masks_on_boxes(
                one["masks"][there].float(), boxes, torch.arange(count), 28
            )[:, None]
            outputs.append(
                {"boxes": boxes, "labels": labels, "scores": torch.ones(count), "masks": masks}
            )
        return outputs

    learnt = Segmenter.forward
    monkeypatch.setattr(DenseTransform, "__call__", peeked)
    monkeypatch.setattr(Detector, "forward", told)
    monkeypatch.setattr(
        Segmenter, "forward", lambda net, x: (learnt if net.training else told)(net, x)
    )
    argv = words(stage, tmp_path, tmp_path / "run", train__size=side, train__epochs=1)
    assert call(argv) == 0
    result = read(tmp_path / "run" / "result.json")
    assert result[score] == pytest.approx(100)
    if stage == "segment":
        for path in sorted((tmp_path / "masks" / "annotations" / "validation").iterdir()):
            true = np.asarray(Image.open(path))
            written = np.asarray(Image.open(tmp_path / "run" / "masks" / path.name))
            assert (true == written)[true > 0].all()
        return
    assert result["mask_ap"] > 99
    whole = coco.COCO(str(tmp_path / "coco" / "annotations" / "val.json"))
    for kind, name in (("bbox", "ap"), ("segm", "mask_ap")):
        judge = COCOeval(whole, whole.loadRes(str(tmp_path / "run" / "predictions.json")), kind)
        for step in (judge.evaluate, judge.accumulate, judge.summarize):
            step()
        assert 100 * judge.stats[0] == pytest.approx(result[name])


def test_the_report_shows_scores_curves_and_predictions(whole, tmp_path):
    assert call(["report", whole / "detect", whole / "segment", "--out", tmp_path / "report"]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    result = read(whole / "segment" / "result.json")
    assert f"{result['miou']:.1f}</td>" in page
    for text in ("Detection: scores on the test images", "mask AP", "Segmentation: scores"):
        assert text in page
    assert page.count('alt="Curves"') == len(STAGES)


def test_boxes_on_any_files(whole, trees, tmp_path, capsys):
    """What the run found on its test images, as a dataset in COCO's format."""
    (tmp_path / "broken.png").write_bytes(b"none")
    images = trees / "coco" / "test"
    argv = ["predict", "--init", str(whole / "detect"), "--min_score", "0"]
    assert (
        call([*argv, str(images), str(tmp_path / "broken.png"), "--out", str(tmp_path / "out")])
        == 0
    )
    assert "skipped 1 of 4 images" in capsys.readouterr().err
    made = read(tmp_path / "out" / "predictions.json")
    reported = read(whole / "detect" / "predictions.json")
    assert [row["id"] for row in made["categories"]] == list(IDS)
    assert {row["file_name"].split("/")[-1]: row["id"] for row in made["images"]} == {
        "000.png": 1, "001.png": 2, "002.png": 3
    }  # fmt: skip
    assert len(made["annotations"]) == len(reported) > 0
    for one, other in zip(made["annotations"], reported, strict=True):
        assert one["image_id"] + 99 == other["image_id"]
        assert one["category_id"] == other["category_id"]
        assert one["bbox"] == pytest.approx(other["bbox"], abs=0.01)
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert one["segmentation"]["size"]
    assert call([*argv, str(images), "--min_score", "1", "--out", str(tmp_path / "none")]) == 0
    assert "no box has a score of 1 or more" in capsys.readouterr().err


def test_masks_on_any_files(whole, trees, tmp_path):
    """The same as through the loaders of a run, at one scale."""
    out = tmp_path / "out"
    images = trees / "masks" / "images" / "test"
    assert call(["predict", "--init", str(whole / "segment"), str(images), "--out", str(out)]) == 0
    for name, wanted in predicted(whole / "segment", trees).items():
        mask = Image.open(out / "masks" / name)
        assert mask.mode == "L"
        assert (np.asarray(mask) == wanted).all()
    assert not (out / "predictions.json").exists()


def test_predictions_are_of_the_upright_image(whole, trees, tmp_path):
    """However a camera stores it. In evaluation they are, too: test_dense_faults."""
    photos = tmp_path / "photos"
    upright = trees / "coco" / "test" / "000.png"
    photos.mkdir()
    for orientation in (1, *TURNS):
        shutil.copy(upright, photos / f"{orientation}.png")
        if orientation > 1:
            store_turned(photos / f"{orientation}.png", orientation)
    for name in STAGES:
        argv = ["predict", "--init", whole / name, photos, "--out", tmp_path / name]
        assert call([*argv, *(["--min_score", "0"] if name == "detect" else [])]) == 0
    made = read(tmp_path / "detect" / "predictions.json")
    assert {(row["width"], row["height"]) for row in made["images"]} == {Image.open(upright).size}
    boxes = {}
    for row in made["annotations"]:
        boxes.setdefault(row["image_id"], []).append([*row["bbox"], row["score"]])
    assert len(boxes) == len(TURNS) + 1
    for found in boxes.values():
        np.testing.assert_allclose(found, boxes[1], atol=1e-3)
    first, *others = (
        np.asarray(Image.open(path)) for path in sorted((tmp_path / "segment" / "masks").iterdir())
    )
    assert len(others) == len(TURNS)
    assert all((mask == first).all() for mask in others)


def predicted(run, trees):
    """The masks that a run's network gives for the test images, by their names, through the loaders
    of a run."""
    saved = read_checkpoint(run, stem="model")
    there = read_images("segment", Data(root=str(trees / "masks")))
    store = store_split(there.test, stored_size=SIDE, data=Data(cache="off"))
    batch = DenseTransform(store, SIDE, saved.mean, saved.std)(0, np.arange(3))
    with torch.no_grad():
        shares = segmented(saved_network(saved), batch["images"])
    found = zip(store.names, shares, store.targets, strict=True)
    return {
        name.split("/")[-1]: classes_on_file(own, target.size, SIDE).numpy()
        for name, own, target in found
    }


@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_taken_up_again(whole, trees, tmp_path, stage):
    """Ends with the same weights, to the last bit, and the same metrics."""
    out = tmp_path / "run"
    more = dict(train__ema=0.9) if stage == "detect" else own(whole)
    with Forked(words(stage, trees, out, **more), tmp_path / "err") as process:
        assert process.until(lambda: state_file(out).exists() and _position(out) >= (0, 2)), (
            process.said()
        )
        process.send()
        process.wait()
    assert not (out / "result.json").exists()
    assert call(words(stage, trees, out, **more)) == 0
    assert "resumes from epoch" in logged(out)
    assert same(out, whole / stage)
    assert metrics(out) == metrics(whole / stage)
    results = [
        {k: v for k, v in read(of / "result.json").items() if k != "seconds"}
        for of in (out, whole / stage)
    ]
    assert results[0] == results[1]


def _position(out):
    try:
        saved = torch.load(state_file(out), map_location="cpu", weights_only=True)
    except Exception:  # in the midst of being replaced
        return (-1, -1)
    return saved["epoch"], saved["step"]


def test_two_processes_report_the_network_that_is_written(trees, tmp_path):
    """Each evaluates its share of the images, with the first one's running statistics of batch
    norms."""
    out = tmp_path / "run"
    argv = words(
        "segment",
        trees,
        out,
        train__epochs=1,
        train__lr=0.003,
        train__warmup_epochs=0,
        data__subset={"total": 6},
    )
    with Together(argv, tmp_path / "err") as process:
        assert process.wait() == 0, process.said()
    for name, wanted in predicted(out, trees).items():
        assert np.mean(np.asarray(Image.open(out / "masks" / name)) == wanted) > 0.999, name


def test_images_that_changed_are_noticed(trees, tmp_path, capsys, monkeypatch):
    """Other boxes are other training data."""
    root = tmp_path / "trees"
    out = tmp_path / "run"
    shutil.copytree(trees / "coco", root / "coco")
    save = Loop._save

    def stopped(loop, *position):
        save(loop, *position)
        raise Interrupted("stopped by the test")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_save", stopped)
        assert call(words("detect", root, out)) == 130
    file = root / "coco" / "annotations" / "train.json"
    content = read(file)
    content["annotations"][0]["bbox"][2] -= 2
    file.write_text(json.dumps(content))
    *_, line = refused(capsys, words("detect", root, out))
    assert line.startswith(
        "data.root: the images changed since this run: 1 with another label, 0 new, 0 gone, "
    )
