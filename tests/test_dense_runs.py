"""Whole runs of detection and segmentation by the command line: what they write, killed and taken
up again, refused."""

import json
import shutil
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_trees import (
    CLASSES,
    IDS,
    TURNS,
    ade_tree,
    coco_tree,
    mask_tree,
    store_turned,
)
from helpers import (
    VIT,
    Forked,
    Together,
    as_flags,
    call,
    call_ok,
    logged,
    metrics,
    read,
    refused,
    same,
    state,
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
CHANGES = {  # of the whole runs, which lie in a folder
    "detect": lambda folder: dict(train__ema=0.9),
    "segment": lambda folder: dict(
        model__name=None,
        model__kwargs=None,
        init=folder / "detect",
        eval_scales=[0.5, 1.0],
        train__keep="best",
    ),
}


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
    return [stage, *as_flags(TINY | own, changes)]


@pytest.fixture(scope="module")
def whole(trees, tmp_path_factory):
    """Uninterrupted runs: boxes and masks from scratch, whose averaged weights count; then the best
    classes of pixels, from the backbone of the first."""
    folder = tmp_path_factory.mktemp("runs")
    for stage, changes in CHANGES.items():
        call_ok(words(stage, trees, folder / stage, **changes(folder)))
    return folder


def test_detection_writes_its_results(whole, trees):
    out = whole / "detect"
    result = read(out / "result.json")
    sizes = {
        "num_classes": 3,
        "train_size": 10,
        "test_size": 3,
        "seed": 0,
        "epochs": 2,
    }
    assert sizes.items() <= result.items()
    scores = {"ap", "ap50", "ap75", "mask_ap"}
    assert scores | {"precision", "seconds"} <= result.keys()
    losses = {"classifier", "box", "mask", "rpn_box", "rpn_objectness"}
    assert scores | losses <= metrics(out)[-1].keys()
    assert [row["class"] for row in rows(out / "per_class.csv")] == CLASSES
    for name in ("curves.png", "log.txt"):
        assert (out / name).stat().st_size > 0, name
    predictions = read(out / "predictions.json")
    assert predictions
    assert {entry["category_id"] for entry in predictions} <= set(IDS)
    truth = coco.COCO(str(trees / "coco/annotations/test.json"))
    truth.loadRes(str(out / "predictions.json"))  # the numbers of images are the file's


def test_segmentation_writes_its_results(whole):
    out = whole / "segment"
    result = read(out / "result.json")
    scores = {"miou", "macc", "pixel_accuracy"}
    assert scores | {"kept_epoch"} <= result.keys()
    assert result["num_classes"] == 4
    assert scores <= metrics(out)[-1].keys()
    per_class = rows(out / "per_class.csv")
    assert [row["class"] for row in per_class] == ["background", *CLASSES]
    assert sum(int(row["pixels"]) for row in per_class) > 0
    assert "0 fresh" in logged(out), "init is where it starts"
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

    def masks_of(network, images):
        if network.training:
            return learned(network, images)
        answer = [answers[image.contiguous().numpy().tobytes()]["mask"] for image in images]
        mask = torch.stack(answer)
        return 9.0 * F.one_hot(mask.where(mask != 255, 0), 150).permute(0, 3, 1, 2)

    def boxes_of(network, images):
        outputs = []
        for image in images:
            answer = answers[image.contiguous().numpy().tobytes()]
            real = answer["labels"] >= 0
            count = int(real.sum())
            boxes = answer["boxes"][real]
            masks = answer["masks"][real].float()
            masks = project_masks_on_boxes(masks, boxes, torch.arange(count), 28)[:, None]
            output = {
                "boxes": boxes,
                "labels": answer["labels"][real],
                "masks": masks,
            }
            outputs.append(output | {"scores": torch.ones(count)})
        return outputs

    learned = Segmenter.forward
    monkeypatch.setattr(DenseTransform, "__call__", peeked)
    monkeypatch.setattr(Detector, "forward", boxes_of)
    monkeypatch.setattr(Segmenter, "forward", masks_of)
    run = tmp_path / "run"
    call_ok(words(stage, tmp_path, run, train__size=side, train__epochs=1))
    result = read(run / "result.json")
    assert result[score] == pytest.approx(100)
    if stage == "segment":
        for path in (tmp_path / "masks/annotations/validation").iterdir():
            true = np.asarray(Image.open(path))
            written = np.asarray(Image.open(run / "masks" / path.name))
            assert (true == written)[true > 0].all()
        return
    assert result["mask_ap"] > 99
    truth = coco.COCO(str(tmp_path / "coco/annotations/val.json"))
    for kind, name in (("bbox", "ap"), ("segm", "mask_ap")):
        judge = COCOeval(truth, truth.loadRes(str(run / "predictions.json")), kind)
        for step in (judge.evaluate, judge.accumulate, judge.summarize):
            step()
        assert 100 * judge.stats[0] == pytest.approx(result[name])


def test_the_report_shows_scores_curves_and_predictions(whole, tmp_path):
    call_ok(f"report {whole}/detect {whole}/segment --out {tmp_path}")
    page = (tmp_path / "report.html").read_text()
    miou = f"{read(whole / 'segment/result.json')['miou']:.1f}</td>"
    for text in (
        "Detection: scores on the test images",
        "mask AP",
        "Segmentation: scores",
        miou,
    ):
        assert text in page
    assert page.count('alt="Curves"') == len(STAGES)


def test_boxes_on_any_files(whole, trees, tmp_path, capsys):
    """What the run found on its test images, as a dataset in COCO's format."""
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"none")
    images = trees / "coco/test"
    argv = f"predict --init {whole}/detect {images} --min_score"
    call_ok(f"{argv} 0 {broken} --out {tmp_path}/out")
    assert "skipped 1 of 4 images" in capsys.readouterr().err
    written = read(tmp_path / "out/predictions.json")
    reported = read(whole / "detect/predictions.json")
    assert [row["id"] for row in written["categories"]] == list(IDS)
    files = [(row["file_name"].split("/")[-1], row["id"]) for row in written["images"]]
    assert files == [("000.png", 1), ("001.png", 2), ("002.png", 3)]
    assert reported
    for one, other in zip(written["annotations"], reported, strict=True):
        assert one["image_id"] + 99 == other["image_id"]
        assert one["category_id"] == other["category_id"]
        assert one["bbox"] == pytest.approx(other["bbox"], abs=0.01)
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)
        assert one["segmentation"]["size"]
    call_ok(f"{argv} 0 --precision bf16 --out {tmp_path}/half")
    half = read(tmp_path / "half/predictions.json")["annotations"][0]
    assert half["score"] == pytest.approx(written["annotations"][0]["score"], abs=0.02)
    assert half["score"] != written["annotations"][0]["score"]
    call_ok(f"{argv} 1 --out {tmp_path}/none")
    assert "no box has a score of 1 or more" in capsys.readouterr().err


def test_masks_on_any_files(whole, trees, tmp_path):
    """The same as through the loaders of a run, at one scale."""
    images = trees / "masks/images/test"
    call_ok(f"predict --init {whole}/segment {images} --out {tmp_path}")
    for name, expected in predicted(whole / "segment", trees).items():
        mask = Image.open(tmp_path / "masks" / name)
        assert mask.mode == "L"
        assert (np.asarray(mask) == expected).all()
    assert not (tmp_path / "predictions.json").exists()
    half = f"--precision bf16 --out {tmp_path}/half"
    call_ok(f"predict --init {whole}/segment {images} {half}")
    masks = [np.asarray(Image.open(tmp_path / folder / name)) for folder in ("masks", "half/masks")]
    assert (masks[0] == masks[1]).mean() > 0.9


def test_predictions_are_of_the_upright_image(whole, trees, tmp_path):
    """However a camera stores it. In evaluation they are, too: test_dense_faults."""
    photos = tmp_path / "photos"
    upright = trees / "coco/test/000.png"
    photos.mkdir()
    shutil.copy(upright, photos / "1.png")
    for orientation in TURNS:
        shutil.copy(upright, photos / f"{orientation}.png")
        store_turned(photos / f"{orientation}.png", orientation)
    argv = ["predict", photos, "--min_score", 0, "--init", whole / "detect"]
    call_ok([*argv, "--out", tmp_path / "detect"])
    predictions = read(tmp_path / "detect/predictions.json")
    sizes = {(row["width"], row["height"]) for row in predictions["images"]}
    assert sizes == {Image.open(upright).size}
    boxes = defaultdict(list)
    for row in predictions["annotations"]:
        boxes[row["image_id"]].append([*row["bbox"], row["score"]])
    assert len(boxes) == len(TURNS) + 1
    for of_image in boxes.values():
        np.testing.assert_allclose(of_image, boxes[1], atol=1e-3)
    argv = ["predict", photos, "--init", whole / "segment"]
    call_ok([*argv, "--out", tmp_path / "segment"])
    masks = [Image.open(path).tobytes() for path in (tmp_path / "segment/masks").iterdir()]
    assert len(masks) == len(TURNS) + 1
    assert len(set(masks)) == 1


def predicted(run, trees):
    """The masks that a run's network gives for the test images, by their names, through the loaders
    of a run."""
    saved = read_checkpoint(run, stem="model")
    listing = read_images("segment", Data(root=str(trees / "masks")))
    store = store_split(listing.test, stored_size=SIDE, data=Data(cache="off"))
    batch = DenseTransform(store, SIDE, saved.mean, saved.std)(0, np.arange(3))
    with torch.no_grad():
        shares = segmented(saved_network(saved), batch["images"])
    masks = {}
    for name, own, target in zip(store.names, shares, store.targets, strict=True):
        masks[name.split("/")[-1]] = classes_on_file(own, target.size, SIDE).numpy()
    return masks


@pytest.mark.parametrize("stage", STAGES)
def test_killed_and_taken_up_again(whole, trees, tmp_path, stage):
    """Ends with the same weights, to the last bit, and the same metrics."""
    out = tmp_path / "run"
    argv = words(stage, trees, out, **CHANGES[stage](whole))
    with Forked(argv, tmp_path / "err") as process:
        assert process.until(lambda: _position(out) >= (0, 2)), process.said()
        process.send()
        process.wait()
    assert not (out / "result.json").exists()
    call_ok(argv)
    assert "resumes from epoch" in logged(out)
    assert same(out, whole / stage)
    assert metrics(out) == metrics(whole / stage)
    results = [read(run / "result.json") | {"seconds": 0} for run in (out, whole / stage)]
    assert results[0] == results[1]


def _position(out):
    try:
        saved = state(out)
    except Exception:  # not there yet, or in the midst of being replaced
        return (-1, -1)
    return saved["epoch"], saved["step"]


def test_two_processes_report_the_network_that_is_written(trees, tmp_path):
    """Each evaluates its share of the images, with the first one's running statistics of batch
    norms."""
    out = tmp_path / "run"
    few = dict(
        data__subset={"total": 6},
        train__epochs=1,
        train__lr=0.003,
        train__warmup_epochs=0,
    )
    with Together(words("segment", trees, out, **few), tmp_path / "err") as process:
        process.succeed()
    for name, expected in predicted(out, trees).items():
        assert np.mean(np.asarray(Image.open(out / "masks" / name)) == expected) > 0.999, name


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
    file = root / "coco/annotations/train.json"
    content = read(file)
    content["annotations"][0]["bbox"][2] -= 2
    file.write_text(json.dumps(content))
    *_, line = refused(capsys, words("detect", root, out))
    start = "data.root: the images changed since this run: 1 with another label, 0 new, 0 gone, "
    assert line.startswith(start)
