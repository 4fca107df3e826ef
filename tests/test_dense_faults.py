"""What people get wrong in annotations and masks: read if it has one meaning, refused or warned of
otherwise."""

import json
import os

import numpy as np
import pytest
from dense_trees import (
    TURNS,
    coco_tree,
    mask_tree,
    packed,
    scenes,
    store_turned,
)
from folders import faults, section
from helpers import call_ok, logged, metrics, read, refused
from PIL import Image
from test_dense_runs import words

from idmm.dense.read import read_images
from idmm.dense.targets import IGNORED, mask_values
from idmm.files import read_csv


def detection(root, **fields):
    return read_images("detect", section(root, cache="off", **fields))


def segmentation(root):
    return read_images("segment", section(root, cache="off"))


def digests(reader, root):
    return [target.digest for target in reader(root).train.targets]


# ---------------------------------------------------------------------- nothing to learn
NO_PIXEL = "classes with a pixel in the training images"


def remapped(root, values, part="**"):
    """Gives the masks other numbers: ``values[old]``."""
    for path in (root / "masks").glob(f"{part}/*.png"):
        Image.fromarray(np.array(values, np.uint8)[np.asarray(Image.open(path)).clip(max=4)]).save(
            path
        )


@pytest.mark.parametrize(
    ("values", "names", "fault"),
    [
        ([0] * 5, "a\nb", f"{NO_PIXEL}: 1, expected 2 or more"),
        (
            [0, 255, 255, 255, 0],
            "a\nb",
            f"{NO_PIXEL}: 1, expected 2 or more. 255 means no class.",
        ),
        (
            [0, 255, 255, 255, 0],
            None,
            f"{NO_PIXEL}: 1, expected 2 or more. 255 means no class. If it is your",
        ),
        ([255] * 5, "a\nb", f"{NO_PIXEL}: 0, expected 2 or more"),
        (
            [0, 128, 128, 128, 0],
            None,
            "has the values 0, 128, but not 1, 2, 3, 4, 5 and 122 more. Number the classes",
        ),
    ],
)
def test_masks_without_two_classes(tmp_path, capsys, values, names, fault):
    root = tmp_path / "masks"
    mask_tree(root, train=3, val=2)
    remapped(root, values)
    (root / "classes.txt").unlink()
    if names:
        (root / "classes.txt").write_text(names)
    (line,) = refused(capsys, words("segment", tmp_path, tmp_path / "out"))
    assert fault in line
    assert not (tmp_path / "out").exists()


def test_classes_without_a_pixel_are_warned_of(tmp_path, caplog):
    mask_tree(tmp_path, train=3, val=2)
    remapped(tmp_path, [0, 1, 2, 2, 255], "train")
    remapped(tmp_path, [255] * 5, "val")
    segmentation(tmp_path)
    for part, names in (
        ("train", "'seven'"),
        ("test", "'background', 'zero', 'one', 'seven'"),
    ):
        line = f"no {part} image has a pixel of {names}. Scores of these classes are undefined"
        assert line in caplog.text


def without(*labels, part="train"):
    """Removes the boxes of some categories from a part."""

    def change(name, content):
        rows = content["annotations"]
        content["annotations"] = [
            row for row in rows if name != part or row["category_id"] not in labels
        ]

    return change


def test_classes_without_a_box(tmp_path, caplog, capsys):
    coco_tree(tmp_path / "coco", change=without(7))
    detection(tmp_path / "coco")
    assert "no train image has a box of 'one'. Scores of these classes are undefined" in caplog.text

    def crowds(part, content):
        for row in content["annotations"]:
            row["iscrowd"] = 1

    def only_last(part, content):
        del content["annotations"][:-1]

    fault = "data.root: classes with a box in the training images: 0, expected 1 or more"
    for change in (without(3, 7, 11), crowds):
        coco_tree(tmp_path / "coco", change=change)
        assert refused(capsys, words("detect", tmp_path, tmp_path / "out")) == [fault]
        assert not (tmp_path / "out").exists()
    coco_tree(tmp_path / "coco", change=only_last)
    assert faults(detection, tmp_path / "coco", subset={"total": 1}) == [fault]


# ---------------------------------------------------------------------- undefined scores
def test_a_score_of_nothing_is_null(tmp_path, capsys):
    """In each file and page that shows it. The best epoch cannot be chosen by it."""
    coco_tree(
        tmp_path / "coco",
        change=without(3, 7, 11, part="val"),
        train=4,
        val=2,
        test=2,
    )
    mask_tree(tmp_path / "masks", train=4, val=2)
    remapped(tmp_path / "masks", [255] * 5, "val")
    detect = tmp_path / "detect"
    segment = tmp_path / "segment"
    for out, score in ((detect, "ap"), (segment, "miou")):
        call_ok(words(out.name, tmp_path, out, train__epochs=1))
        assert metrics(out)[-1][score] is None
        assert "nan" not in (out / "result.json").read_text().lower()
        assert "nan" not in logged(out)
        assert (out / "curves.png").stat().st_size > 0
    result = read(segment / "result.json")
    assert [result[name] for name in ("miou", "macc", "pixel_accuracy")] == [None] * 3
    assert [row["iou"] for row in read_csv(segment / "per_class.csv")] == [""] * 4
    assert "miou undefined, macc undefined" in logged(segment)
    assert read(detect / "result.json")["ap"] is not None
    call_ok(f"report {detect} {segment} --out {tmp_path}/report")
    capsys.readouterr()
    *_, line = refused(
        capsys,
        words("detect", tmp_path, tmp_path / "best", train__keep="best"),
    )
    assert line.startswith("train.keep: best chooses by val, which has no object")


# ---------------------------------------------------------------------- orientation
@pytest.mark.parametrize("orientation", TURNS)
def test_labels_are_of_upright_images(tmp_path, caplog, capsys, orientation):
    """Boxes and masks of the upright image are right, those of the stored pixels are refused where
    it shows."""
    coco_root = tmp_path / "coco"
    mask_root = tmp_path / "masks"
    coco_tree(coco_root, train=3, val=2)
    mask_tree(mask_root, train=3, val=2)
    tasks = ((detection, coco_root), (segmentation, mask_root))
    upright = [digests(*task) for task in tasks]
    store_turned(coco_root / "train/000.png", orientation)
    store_turned(mask_root / "images/train/000.png", orientation)
    for (reader, root), expected in zip(tasks, upright, strict=True):
        caplog.clear()
        assert digests(reader, root) == expected
        line = f"000.png' ({orientation}). Boxes and masks must be of the upright images"
        assert line in caplog.text

    def stored(part, content):
        content["images"][0] |= {"width": 64, "height": 96}

    # labels of the stored pixels
    coco_tree(coco_root, change=stored, train=3, val=2)
    for part in ("train", "val"):
        store_turned(coco_root / part / "000.png", orientation)
    mask = mask_root / "masks/train/000.png"
    Image.fromarray(np.asarray(Image.open(mask)).T).save(mask)
    why = f"64 x 96 pixels, its image 96 x 64 when upright (EXIF orientation {orientation}). If the"
    for reader, root in tasks:
        assert why in faults(reader, root)[-1]


def test_a_mask_with_an_orientation_is_refused(tmp_path):
    """Tools differ in whether they turn it."""
    mask_tree(tmp_path, train=3, val=2)
    mask = tmp_path / "masks" / "train" / "000.png"
    store_turned(mask, 6)
    assert faults(segmentation, tmp_path)[1].startswith(
        f"  '{mask}': has an EXIF orientation, expected upright"
    )


# ---------------------------------------------------------------------- compressed outlines
def test_packed_runs_of_any_length(tmp_path):
    """Noise, nothing and everything, the last two in one run of half a canvas and more."""
    draw = np.random.default_rng(0)
    masks = [
        draw.random((64, 96)) < 0.3,
        np.zeros((64, 96), bool),
        np.ones((64, 96), bool),
    ]

    def change(part, content):
        if part == "train":
            first = content["annotations"][0]
            content["annotations"] = [first | {"segmentation": packed(mask)} for mask in masks]

    coco_tree(tmp_path, change=change, train=1, val=1)
    (target,) = detection(tmp_path).train.targets
    np.testing.assert_array_equal(target.masks(64, 96), masks)


SIZE = [64, 96]  # of the first image
GOOD = packed(scenes("train", 1)[0].masks[0])["counts"]
SHORT = packed(np.zeros((64, 95), bool))["counts"]


@pytest.mark.parametrize(
    ("outline", "fault"),
    [
        (
            {"size": SIZE, "counts": SHORT},
            "its RLE of 96 x 64 pixels has runs of 6080, expected 96 x 64, which is 6144",
        ),
        (
            {"size": [64, 95], "counts": SHORT},
            "its RLE of 95 x 64 pixels has runs of 6080, expected 96 x 64",
        ),
        (
            {"size": SIZE, "counts": GOOD[:-1] + "o"},
            "its RLE is broken or cut off (",
        ),
        ({"size": SIZE, "counts": ""}, "its RLE is broken or cut off ("),
        ({"size": SIZE, "counts": "\x00é"}, "its RLE is broken or cut off ("),
        (
            {"size": SIZE, "counts": [7000, -856]},
            "segmentation.counts[1] is -856, expected greater than or equal to 0",
        ),
        (
            {"counts": GOOD},
            "segmentation.size field required (polygons or RLE)",
        ),
        (
            {"size": [64], "counts": SHORT},
            "segmentation.size[1] field required",
        ),
        (
            "box",
            "segmentation is 'box', expected a mapping (polygons or RLE)",
        ),
        ([1, 2, 3, 4, 5, 6], "segmentation[5] is 6, expected a list"),
        (
            [[1, 2, 3, 4]],
            "segmentation has the polygon [1.0, 2.0, 3.0, 4.0], expected x and y of three points",
        ),
        (
            [[1, 2, 3, float("nan"), 5, 6]],
            "segmentation[0][3] is nan, expected a finite number",
        ),
        (
            [[1, 2, 3, True, 5, 6]],
            "segmentation[0][3] is True, expected a number",
        ),
    ],
)
def test_outlines_that_cannot_be_drawn(tmp_path, outline, fault):
    coco_tree(
        tmp_path,
        change=spoilt("annotations", segmentation=outline),
        train=2,
        val=1,
    )
    lines = faults(detection, tmp_path)
    assert lines[1].startswith(f"  annotation 1 of '000.png': {fault}"), lines


# ---------------------------------------------------------------------- fields
def spoilt(table, **values):
    def change(part, content):
        if part == "train":
            content[table][0].update(values)

    return change


@pytest.mark.parametrize(
    ("table", "values", "fault"),
    [
        (
            "annotations",
            {"iscrowd": "2"},
            "annotations[0].iscrowd is '2', expected 0, 1, '0', '1' or None",
        ),
        (
            "annotations",
            {"bbox": "1,2,3,4"},
            "annotations[0].bbox is '1,2,3,4', expected a list",
        ),
        (
            "annotations",
            {"bbox": [1, 2, "3", 4]},
            "annotations[0].bbox[2] is '3', expected a number",
        ),
        (
            "annotations",
            {"bbox": [1, 2, 3]},
            "annotations[0].bbox is [1, 2, 3], expected at least 4 items",
        ),
        (
            "annotations",
            {"bbox": [9, 9, -3, 4]},
            "bbox [9.0, 9.0, -3.0, 4.0] is not in the image",
        ),
        (
            "annotations",
            {"category_id": True},
            "annotations[0].category_id is True, expected an integer",
        ),
        (
            "annotations",
            {"category_id": 3.5},
            "annotations[0].category_id is 3.5, expected an integer",
        ),
        (
            "images",
            {"height": -64},
            "images[0].height is -64, expected greater than 0",
        ),
        ("images", {"id": "101"}, "has several images with the id 101"),
        (
            "images",
            {"file_name": 3},
            "images[0].file_name is 3, expected a string",
        ),
        (
            "images",
            {"file_name": "./001.png"},
            "image '001.png' is listed 2 times",
        ),
    ],
)
def test_fields_of_another_kind(tmp_path, table, values, fault):
    coco_tree(tmp_path, change=spoilt(table, **values), train=2, val=1)
    assert fault in "\n".join(faults(detection, tmp_path))


def test_fields_with_one_meaning(tmp_path):
    """Numbers of images as text, sizes with a point, crowds as text, and files in other
    encodings."""
    coco_tree(tmp_path, train=2, val=1)
    expected = digests(detection, tmp_path)
    path = tmp_path / "annotations" / "train.json"
    content = read(path)
    for row in content["annotations"]:
        row |= {"iscrowd": "0", "id": None}
        for key in ("image_id", "category_id"):
            row[key] = str(row[key])
    for row in content["images"]:
        for key in ("height", "width"):
            row[key] = float(row[key])
    for encoding in ("utf-8-sig", "utf-16"):
        path.write_text(json.dumps(content), encoding=encoding)
        assert digests(detection, tmp_path) == expected
    content["annotations"][0]["iscrowd"] = "1"
    path.write_text(json.dumps(content))
    assert detection(tmp_path).train.targets[0].crowd[0]


# ---------------------------------------------------------------------- names of files
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("{root}/train/sub/000.png", None),
        ("sub\\000.png", None),
        ("sub/../sub/./000.png", None),
        ("gone\\000.png", "does not exist (in '{root}/train')"),
        ("a\0b.png", "does not exist (in '{root}/train')"),
        (
            "../outside.png",
            "lies outside of '{root}/train', expected a path below it",
        ),
        (
            "{root}/outside.png",
            "lies outside of '{root}/train', expected a path below it",
        ),
        (
            "link/outside.png",
            "lies outside of '{root}/train', expected a path below it",
        ),
        (
            "link/train/../outside.png",
            "lies outside of '{root}/train', expected a path below it",
        ),
    ],
)
def test_paths_stay_in_the_folder_of_images(tmp_path, name, fault):
    name = name.format(root=tmp_path)
    coco_tree(tmp_path, change=spoilt("images", file_name=name), train=2, val=1)
    train = tmp_path / "train"
    (train / "sub").mkdir()
    (train / "000.png").rename(train / "sub" / "000.png")
    os.link(train / "sub" / "000.png", tmp_path / "outside.png")
    os.symlink(tmp_path, train / "link")
    if fault is None:
        assert detection(tmp_path).train.names == [
            "train/sub/000.png",
            "train/001.png",
        ]
    else:
        shown = name.replace("\0", "\\x00")
        assert f"  image '{shown}' {fault.format(root=tmp_path)}" in faults(detection, tmp_path)


# ---------------------------------------------------------------------- deep masks
def test_masks_of_16_bits(tmp_path):
    mask_tree(tmp_path, train=3, val=2)
    expected = [target.mask() for target in segmentation(tmp_path).train.targets]
    for path in (tmp_path / "masks").rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)).astype(np.uint16)).save(path)
    for target, mask in zip(segmentation(tmp_path).train.targets, expected, strict=True):
        np.testing.assert_array_equal(target.mask(), mask)
        assert IGNORED in target.values
    path = tmp_path / "masks" / "train" / "001.png"
    Image.fromarray(np.asarray(Image.open(path)) * 257).save(path)
    line = f"  '{path}': values from 0 to 65535, expected 0 to 255"
    assert line in faults(segmentation, tmp_path)


def test_a_mask_that_changed_is_no_longer_used(tmp_path):
    mask_tree(tmp_path, train=3, val=2)
    target = segmentation(tmp_path).train.targets[0]
    remapped(tmp_path, [0, 200, 2, 3, 255], "train")
    with pytest.raises(Exception, match="was changed while in use"):
        target.mask()
    assert mask_values((tmp_path / "masks" / "train" / "000.png").read_bytes()).max() == 255


def test_a_list_of_classes_that_is_no_file(tmp_path):
    mask_tree(tmp_path, train=3, val=2)
    file = tmp_path / "classes.txt"
    file.unlink()
    os.mkfifo(file)
    line = f"data.root: '{file}' cannot be read (not a regular file)"
    assert faults(segmentation, tmp_path) == [line]
