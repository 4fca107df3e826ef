"""Boxes and masks: what is read from each layout, what is refused, what is left out."""

import json
import re
import shutil

import numpy as np
import pytest
from dense_trees import CLASSES, IDS, ade_tree, coco_tree, mask_tree, scenes
from dense_trees import run_lengths as outline
from folders import faults, paint, section
from PIL import Image

from idmm.data.dense import IGNORED, read_detection, read_segmentation
from idmm.data.split import LabelsMissing
from idmm.evaluate_dense import Objects, detection_scores


def of(root, **fields):
    return section(root, cache="off", **fields)


# ------------------------------------------------------------------ boxes
@pytest.mark.parametrize("form,official", [("polygons", False), ("rle", True), ("boxes", False)])
def test_boxes_are_those_of_the_file(tmp_path, form, official):
    made = coco_tree(tmp_path, form, official, train=3, val=2)
    found = read_detection(of(tmp_path))
    assert found.classes == CLASSES and found.categories == list(IDS) and found.outlined == (form != "boxes")
    assert list(found.targets) == ["train", "test"] and found.splits.val is None
    for part, wrote in (("train", "train"), ("test", "val")):
        split = getattr(found.splits, part)
        folder = f"{wrote}2017" if official else wrote
        assert split.names == [f"{folder}/{name}" for name in made[wrote]]
        assert split.labels is None and split.classes is None
        for target, scene in zip(found.targets[part], made[wrote].values(), strict=True):
            np.testing.assert_array_equal(target.boxes, scene.boxes)
            np.testing.assert_array_equal(target.labels, scene.labels)
            assert target.size == scene.image.shape[:2] and not target.crowd.any()
            assert target.boxes.dtype == np.float32 and target.labels.dtype == np.int64
            if form == "boxes":
                assert target.segments is None
            else:
                np.testing.assert_array_equal(target.masks(*target.size), scene.masks)
    assert [target.image_id for target in found.targets["train"]] == [100, 101, 102]


def test_images_without_objects_crowds_and_compressed_outlines(tmp_path):
    from pycocotools import mask as coco

    def change(part, content):
        content["images"].append({"id": 900, "file_name": "empty.png", "height": 20, "width": 30})
        paint(tmp_path / part / "empty.png", size=(30, 20))
        first = content["annotations"][0]
        packed = coco.frPyObjects(first["segmentation"], *scenes(part, 1)[0].image.shape[:2])
        packed = coco.merge(packed)
        first |= {"iscrowd": 1, "segmentation": {"size": packed["size"], "counts": packed["counts"].decode()}}

    made = coco_tree(tmp_path, change=change, train=2, val=2)
    found = read_detection(of(tmp_path))
    first, *_, empty = found.targets["train"]
    assert first.crowd.tolist() == [True] + [False] * (len(first.labels) - 1)
    np.testing.assert_array_equal(first.masks(*first.size), made["train"]["000.png"].masks)
    assert empty.boxes.shape == (0, 4) and empty.segments == [] and empty.masks(5, 6).shape == (0, 5, 6)
    assert first.take(~first.crowd).labels.tolist() == first.labels[1:].tolist()


def test_some_objects_without_an_outline(tmp_path, caplog):
    coco_tree(tmp_path, change=lambda part, content: content["annotations"][0].update(segmentation=[]))
    found = read_detection(of(tmp_path))
    assert not found.outlined and "1 of 16 objects of train have no outline" in caplog.text


def test_a_crowd_without_an_outline(tmp_path):
    """Counts as its box does."""

    def change(part, content):
        content["annotations"][0] |= {"iscrowd": 1, "segmentation": []}

    made = coco_tree(tmp_path, change=change)
    found = read_detection(of(tmp_path))
    target, scene = found.targets["test"][0], made["val"]["000.png"]
    x1, y1, x2, y2 = scene.boxes[0].astype(int)
    mask = target.masks(*target.size)[0]
    assert mask[y1:y2, x1:x2].all() and mask.sum() == (x2 - x1) * (y2 - y1)
    seen = Objects(target.boxes, target.labels, np.ones(len(target.labels)), [outline(m) for m in scene.masks])
    scores, _ = detection_scores([seen], [target], CLASSES)
    assert [scores["ap"], scores["mask_ap"]] == pytest.approx([100, 100])


BROKEN = [  # how the annotations of a file are spoilt, one after the other, and what its line is
    (lambda a: a.update(segmentation={"size": [64, 96], "counts": "oooo7"}), r"or RLE of its size"),
    (lambda a: a["bbox"].__setitem__(2, 0), r"bbox \[.*\] has no area"),
    (lambda a: a["bbox"].__setitem__(0, 90), r"bbox \[90, .*\] reaches outside of the image "),
    (lambda a: a.update(bbox=[1] * 999), r"bbox \[1, 1, .{0,80}\.\.\.; wanted \[x, y, width, height\] in pixels"),
    (lambda a: a.update(image_id=77), r"annotation 5: of an image 77 that is not in the list"),
    (lambda a: a.update(category_id=5), r"of a category 5 that is not in the list"),
    (lambda a: a.update(segmentation=[[1, 2, 3, 4]]), r"segmentation: wanted polygons in the image"),
    (lambda a: a.update(segmentation={"size": [2, 2], "counts": [4]}), r"or RLE of its size"),
    # a far outline takes gigabytes in pycocotools
    (lambda a: a.update(segmentation=[[0, 0, 1e9, 0, 1e9, -1e30]]), r"segmentation: wanted polygons in the image"),
]


def test_annotations_that_cannot_be_used(tmp_path, caplog):
    def spoil(part, content):
        if part == "train":
            for (change, _), row in zip(BROKEN, content["annotations"], strict=False):
                change(row)

    coco_tree(tmp_path, change=spoil)
    head, *lines = faults(read_detection, of(tmp_path))
    file = tmp_path / "annotations" / "train.json"
    how = "cannot be used (--data.on_error skip leaves them out)"
    assert head == f"data.root: '{file}': 9 of 16 annotations {how}:"
    for line, (_, said) in zip(lines, BROKEN, strict=True):
        assert re.search(said, line), line
    found = read_detection(of(tmp_path, on_error="skip"))
    assert sum(len(target.labels) for target in found.targets["train"]) == 7
    assert f"left out:\ndata.root: '{file}': 9 of 16 annotations cannot be used:\n  annotation 1" in caplog.text


def test_a_box_may_reach_over_the_edge_by_rounding(tmp_path):
    def change(part, content):
        if part == "train":
            content["annotations"][0]["bbox"] = [-0.5, 10, 97, 54.9]

    coco_tree(tmp_path, change=change)
    assert read_detection(of(tmp_path)).targets["train"][0].boxes[0].tolist() == [0, 10, 96, 64]


def test_roboflows_layout(tmp_path):
    """A JSON beside the images of each part; what is for val is called valid."""
    made = coco_tree(tmp_path, train=3, val=2, test=2)
    (tmp_path / "val").rename(tmp_path / "valid")
    for part, folder in (("train", "train"), ("val", "valid"), ("test", "test")):
        (tmp_path / "annotations" / f"{part}.json").rename(tmp_path / folder / "_annotations.coco.json")
    found = read_detection(of(tmp_path))
    assert found.splits.val.names == [f"valid/{name}" for name in made["val"]]
    assert [len(targets) for targets in found.targets.values()] == [3, 2, 2]


ROWS = {
    "an image twice": ("images", lambda rows: rows[1].update(id=100), "images: there are none, or an id or file_name"),
    "a name outside": ("images", lambda rows: rows[1].update(file_name="../train/001.png"), "path below the folder"),
    "no size": ("images", lambda rows: rows[0].update(height=None), "image 100: wanted height and width in pixels"),
    "no id": ("images", lambda rows: rows[0].pop("id"), "KeyError: 'id'"),
    "a nameless one": ("categories", lambda rows: rows[1].update(name=""), "wanted an id, which is a whole number"),
    "no category": ("categories", lambda rows: rows.clear(), "categories: there are none"),
}


@pytest.mark.parametrize("name,change,said", ROWS.values(), ids=ROWS)
def test_rows_that_are_wrong(tmp_path, name, change, said):
    coco_tree(tmp_path, change=lambda part, content: change(content[name]) and None)
    first, second = faults(read_detection, of(tmp_path, on_error="skip"))
    assert first.startswith(f"data.root: '{tmp_path}/annotations/train.json' is not in COCO's format (")
    assert said in first and second.startswith(f"data.root: '{tmp_path}/annotations/val.json'")


def test_files_that_are_no_annotations(tmp_path):
    coco_tree(tmp_path, test=2, train=2, val=2)
    train, val, test = (tmp_path / "annotations" / f"{part}.json" for part in ("train", "val", "test"))
    train.write_text("{")
    val.write_text(json.dumps({"images": [], "annotations": [3]}))
    test.unlink()
    test.mkdir()
    first, second, third = faults(read_detection, of(tmp_path))
    assert first.startswith(f"data.root: '{train}' is not in COCO's format (JSONDecodeError: Expecting property name")
    assert second.startswith(f"data.root: '{val}' is not in COCO's format (TypeError: ")
    assert third.startswith(f"data.root: '{test}' cannot be read (")


def test_categories_of_parts_that_differ(tmp_path):
    def change(part, content):
        if part == "val":
            content["categories"][0]["name"] = "nought"

    coco_tree(tmp_path, change=change)
    (line,) = faults(read_detection, of(tmp_path))
    assert line.startswith(f"data.root: '{tmp_path}/annotations/val.json' has categories that are not those of")
    assert line.endswith(": 3 'nought'")


def test_images_that_are_not_there_or_of_another_size(tmp_path, caplog):
    coco_tree(tmp_path)
    (tmp_path / "train" / "001.png").unlink()
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(tmp_path / "train" / "002.png") as image:
        image.copy().resize((96, 80)).save(tmp_path / "train" / "002.png", exif=turned)  # 80 x 80 in the file
    head, *lines = faults(read_detection, of(tmp_path))
    assert head.endswith("2 of 6 images cannot be used (--data.on_error skip leaves them out):")
    assert lines == [
        f"  image '001.png' is not there (under '{tmp_path}/train')",
        "  image '002.png' is 80 x 96, by this file 80 x 80",
    ]
    found = read_detection(of(tmp_path, on_error="skip"))
    assert [name[-7:] for name in found.splits.train.names] == ["000.png", "003.png", "004.png", "005.png"]
    assert [target.image_id for target in found.targets["train"]] == [100, 103, 104, 105]


def test_an_image_of_two_parts(tmp_path):
    """It would be tested on after it was learnt."""
    coco_tree(tmp_path, train=3, val=2)
    (tmp_path / "train").rename(tmp_path / "images")
    shutil.rmtree(tmp_path / "val")
    shutil.copy(tmp_path / "annotations" / "train.json", tmp_path / "annotations" / "val.json")
    (line,) = faults(read_detection, of(tmp_path))
    names = "images/000.png, images/001.png, images/002.png"
    assert line == f"data.root: '{tmp_path}' has images in both train and val: {names}; wanted each in one"


def test_no_image_with_a_box(tmp_path):
    coco_tree(tmp_path, change=lambda part, content: content["annotations"].clear() if part == "val" else None)
    (line,) = faults(read_detection, of(tmp_path))
    assert line == f"data.root: '{tmp_path}' has no image with a box in test; wanted one at least"


def test_a_class_without_an_example(tmp_path, caplog):
    def change(part, content):
        content["annotations"] = [row for row in content["annotations"] if row["category_id"] != IDS[1]]

    coco_tree(tmp_path, change=change)
    assert read_detection(of(tmp_path)).classes == CLASSES
    assert "1 of 3 classes have no example to train on: one" in caplog.text


def test_several_files_of_a_part(tmp_path):
    coco_tree(tmp_path)
    coco_tree(tmp_path, official=True)
    (line,) = faults(read_detection, of(tmp_path))
    files = "'annotations/instances_train2017.json', 'annotations/train.json'"
    assert f"has several files of train: {files}; wanted one" in line


# ------------------------------------------------------------------ masks
def test_masks_are_those_of_the_files(tmp_path):
    made = mask_tree(tmp_path, palette=True)
    found = read_segmentation(of(tmp_path))
    assert found.classes == ["background", *CLASSES] and not found.outlined
    for target, scene in zip(found.targets["train"], made["train"].values(), strict=True):
        mask = target.mask()
        assert mask.dtype == np.uint8 and (mask[0] == IGNORED).all() and target.size == mask.shape
        np.testing.assert_array_equal(mask[1:-1, 1:-1], scene.mask[1:-1, 1:-1])
        assert target.present == tuple(np.unique(mask[mask != IGNORED]))
        with Image.open(target) as image:  # it stands for its path
            assert image.size == target.size[::-1]


def test_classes_without_names(tmp_path):
    mask_tree(tmp_path, named=False)
    assert read_segmentation(of(tmp_path)).classes == ["0", "1", "2", "3"]


def test_ade20k(tmp_path, caplog):
    made = ade_tree(tmp_path)
    found = read_segmentation(of(tmp_path))
    assert len(found.classes) == 150 and found.classes[:3] == CLASSES and found.categories == list(range(1, 151))
    target, scene = found.targets["test"][0], next(iter(made["val"].values()))
    np.testing.assert_array_equal(target.mask(), np.where(scene.mask == 0, IGNORED, scene.mask - 1))
    assert "147 of 150 classes have no example to train on: thing 4" in caplog.text
    (tmp_path / "objectInfo150.txt").unlink()
    assert read_segmentation(of(tmp_path)).classes[-1] == "150"


def test_masks_that_cannot_be_used(tmp_path, caplog):
    mask_tree(tmp_path)
    masks = tmp_path / "masks" / "train"
    with Image.open(masks / "000.png") as image:
        image.convert("RGB").save(masks / "000.png")
    Image.fromarray(np.full((5, 6), 1, np.uint8)).save(masks / "001.png")
    Image.fromarray(np.full((80, 80), 9, np.uint8)).save(masks / "002.png")
    (masks / "003.png").write_bytes(b"no image")
    (masks / "004.png").rename(masks / "other.png")
    lines = faults(read_segmentation, of(tmp_path))
    said = "cannot be used (--data.on_error skip leaves them out):"
    assert lines == [
        f"data.root: '{tmp_path}/images/train': 1 of 6 images {said}",
        f"  '004.png' has no mask; wanted '{masks}/004.png'",
        f"data.root: '{masks}': 1 of 6 masks {said}",
        "  'other.png' is of no image",
        f"data.root: '{masks}': 4 of 5 masks {said}",
        "  '000.png': of colours (RGB); wanted a grey or palette PNG whose numbers are the classes",
        "  '001.png' is 6 x 5, its image 64 x 96",
        "  '002.png' has values without a class: 9; wanted 0 to 3, and 255 for what is ignored",
        lines[-1],
    ]
    assert lines[-1].startswith("  '003.png': unreadable or truncated")
    assert read_segmentation(of(tmp_path, on_error="skip")).splits.train.names == ["images/train/005.png"]


def test_folders_of_masks_that_are_wrong(tmp_path):
    mask_tree(tmp_path)
    Image.new("L", (4, 4)).save(tmp_path / "images" / "train" / "001.jpg")
    (tmp_path / "classes.txt").write_text("digit\n")
    lines = faults(read_segmentation, of(tmp_path))
    assert any("has images whose names differ in the ending alone; wanted one of each:" in line for line in lines)
    assert f"data.root: '{tmp_path}/classes.txt' has 1 as number of classes; wanted 2 to 255" in lines


# ------------------------------------------------------------------ parts of it
def test_subset_held_out_and_left_out(tmp_path):
    made = coco_tree(tmp_path, train=8)
    (tmp_path / "exclude.txt").write_text("train/000.png\n")
    with pytest.raises(LabelsMissing, match="--data.val_fraction"):
        read_detection(of(tmp_path))
    fields = {"val_fraction": 0.25, "exclude": str(tmp_path / "exclude.txt")}
    found = read_detection(of(tmp_path, **fields))
    assert len(found.splits.train) == 5 and len(found.splits.test) == 2 and found.splits.excluded == 1
    drawn = read_detection(of(tmp_path, subset={"total": 3}, **fields))
    assert len(drawn.splits.train) == 3 and drawn.splits.test.names == found.splits.test.names
    names = drawn.splits.train.names + drawn.splits.test.names
    assert len(set(names)) == 5 and "train/000.png" not in names
    for name, target in zip(names, [*drawn.targets["train"], *drawn.targets["test"]], strict=True):
        np.testing.assert_array_equal(target.boxes, made["train"][name[6:]].boxes)
    assert drawn.of("train", names[1:3]) == drawn.targets["train"][1:]


def test_keys_that_have_no_meaning(tmp_path):
    mask_tree(tmp_path)
    lines = faults(read_segmentation, of(tmp_path, labels="a.csv", folds=3, bands=[0, 1]))
    assert [line.partition(":")[0] for line in lines] == ["data.labels", "data.folds", "data.bands"]
    (line,) = faults(read_segmentation, of(tmp_path, subset={"per_class": 2}))
    assert line.startswith("data.subset.per_class")
    (line,) = faults(read_segmentation, of(tmp_path, in_chans=4))
    assert line.startswith("data.in_chans: got 4; boxes and masks are learnt from pictures alone")


def test_folders_without_parts(tmp_path):
    """A share of images and masks is held out."""
    mask_tree(tmp_path, train=8)
    for kind in ("images", "masks"):
        for path in (tmp_path / kind / "train").iterdir():
            path.rename(tmp_path / kind / path.name)
        (tmp_path / kind / "train").rmdir()
    with pytest.raises(LabelsMissing, match="hold out a share of train"):
        read_segmentation(of(tmp_path))
    found = read_segmentation(of(tmp_path, val_fraction=0.25))
    assert [len(targets) for targets in found.targets.values()] == [6, 2]
    for name, target in zip(found.splits.train.names, found.targets["train"], strict=True):
        assert target.path == str(tmp_path / name.replace("images/", "masks/"))


def test_a_test_set_without_masks(tmp_path, caplog):
    mask_tree(tmp_path)
    paint(tmp_path / "images" / "test" / "1.png")
    assert list(read_segmentation(of(tmp_path)).targets) == ["train", "test"]
    assert f"'{tmp_path}/images/test' is not used, as there are no masks of it" in caplog.text


def test_images_in_folders(tmp_path):
    """Of the parts and their masks alike; and ADE20K's whole folder as it is unpacked."""
    for kind in ("images", "masks"):
        mask_tree(tmp_path)
        (tmp_path / kind / "train" / "a" / "b").mkdir(parents=True)
    for kind in ("images", "masks"):
        (tmp_path / kind / "train" / "000.png").rename(tmp_path / kind / "train" / "a" / "b" / "x.png")
    names = read_segmentation(of(tmp_path)).splits.train.names
    assert "images/train/a/b/x.png" in names and len(names) == 6
    (tmp_path / "ade" / "ADEChallengeData2016").mkdir(parents=True)
    ade_tree(tmp_path / "ade" / "ADEChallengeData2016")
    found = read_segmentation(of(tmp_path / "ade"))
    assert found.splits.train.names[0] == "ADEChallengeData2016/images/training/ADE_train_00000000.png"
