"""Boxes and masks: what is read from each layout, what is refused or left out, and how batches are
made of it."""

import json
import re
import struct
import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dense_trees import CLASSES, IDS, coco_tree, mask_tree, packed, scenes
from dense_trees import run_lengths as outline
from folders import faults, paint, section
from helpers import read
from PIL import Image

from idmm.data.image_store import store_split
from idmm.data.split import LabelsMissing
from idmm.dense.evaluate import Objects, detection_scores
from idmm.dense.read import read_images
from idmm.dense.targets import IGNORED, mask_values, outlined
from idmm.dense.transforms import DenseTransform, letterboxed

UNUSABLE = "cannot be used:"
read_detection = partial(read_images, "detect")
read_segmentation = partial(read_images, "segment")


def of(root, **fields):
    return section(root, cache="off", **fields)


@pytest.mark.parametrize("form", ["polygons", "rle", "packed", "boxes"])
def test_boxes_are_those_of_the_file(tmp_path, form):
    official = form == "rle"
    canvases = coco_tree(tmp_path, form, official, train=3, val=2)
    listing = read_detection(of(tmp_path))
    assert listing.train.classes == CLASSES
    assert listing.categories == list(IDS)
    assert outlined(listing.train.targets) == (form != "boxes")
    assert list(listing.parts) == ["train", "test"]
    for part, name in (("train", "train"), ("test", "val")):
        split = listing.parts[part]
        folder = f"{name}2017" if official else name
        assert split.names == [f"{folder}/{file}" for file in canvases[name]]
        assert split.labels is None
        for target, scene in zip(split.targets, canvases[name].values(), strict=True):
            np.testing.assert_array_equal(target.boxes, scene.boxes)
            np.testing.assert_array_equal(target.labels, scene.labels)
            assert target.size == scene.image.shape[:2]
            assert not target.crowd.any()
            if form != "boxes":
                np.testing.assert_array_equal(target.masks(*target.size), scene.masks)
    assert [target.image_id for target in listing.train.targets] == [
        100,
        101,
        102,
    ]


def test_unusual_objects(tmp_path, caplog):
    """An image without any; a crowd with a packed outline, and one without an outline, which counts
    as its box does; a box over the edge by a rounding."""

    def change(part, content):
        content["images"].append({"id": 900, "file_name": "empty.png", "height": 20, "width": 30})
        paint(tmp_path / part / "empty.png", size=(30, 20))
        first = content["annotations"][0] | {"iscrowd": 1}
        if part == "train":
            first["segmentation"] = packed(scenes(part, 1)[0].masks[0])
            content["annotations"][1]["bbox"] = [-0.5, 50, 65, 46.9]
        else:
            first["segmentation"] = []
        content["annotations"][0] = first

    canvases = coco_tree(tmp_path, change=change, train=2, val=2)
    listing = read_detection(of(tmp_path))
    first, second, empty = listing.train.targets
    assert first.crowd.tolist() == [True] + [False] * (len(first.labels) - 1)
    assert second.boxes[0].tolist() == [0, 50, 64, 96]
    np.testing.assert_array_equal(first.masks(*first.size), canvases["train"]["000.png"].masks)
    assert empty.boxes.shape == (0, 4)
    assert empty.masks(5, 6).shape == (0, 5, 6)
    target = listing.test.targets[0]
    scene = canvases["val"]["000.png"]
    x1, y1, x2, y2 = scene.boxes[0].astype(int)
    mask = target.masks(*target.size)[0]
    assert mask[y1:y2, x1:x2].all()
    assert mask.sum() == (x2 - x1) * (y2 - y1)
    outlines = [outline(mask) for mask in scene.masks]
    objects = Objects(target.boxes, target.labels, np.ones(len(outlines)), outlines)
    scores, _ = detection_scores([objects], [target], CLASSES)
    assert [scores["ap"], scores["mask_ap"]] == pytest.approx([100, 100])


def test_objects_without_an_outline_are_counted(tmp_path, caplog):
    coco_tree(
        tmp_path,
        change=lambda _, content: content["annotations"][0].update(segmentation=[]),
    )
    assert not outlined(read_detection(of(tmp_path)).train.targets)
    assert "1 of 16 objects have no outline" in caplog.text


BROKEN = [  # how the annotations of a file are spoilt, one after the other, and what its line is
    (
        lambda a: a.update(segmentation={"size": [64, 96], "counts": "oooo7"}),
        r"annotation 1 of '000.png': its RLE of 96 x 64 pixels has runs of 8388607",
    ),
    (
        lambda a: a["bbox"].__setitem__(0, 90),
        r"annotation 2 of '001.png': bbox \[90.0, .*\] is not in the image \(64 x 96",
    ),
    (
        lambda a: a.update(image_id=77),
        r"annotation 3: image_id 77 or category_id \d+ is not in the list",
    ),
    (
        lambda a: a.update(category_id=5),
        r"annotation 4: image_id \d+ or category_id 5 is not in the list",
    ),
    # a far outline takes gigabytes in pycocotools
    (
        lambda a: a.update(segmentation=[[0, 0, 1e9, 0, 1e9, -1e30]]),
        r"expected x and y of three points or more in the im",
    ),
]


def test_annotations_and_images_that_cannot_be_used(tmp_path, caplog):
    def spoil(part, content):
        if part == "train":
            for (change, _), row in zip(BROKEN, content["annotations"], strict=False):
                change(row)
            content["annotations"][-1]["bbox"][2] = 0  # as two of COCO's

    coco_tree(tmp_path, change=spoil)
    (tmp_path / "train" / "001.png").unlink()
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(tmp_path / "train" / "002.png") as image:
        # 80 x 80 in the file
        image.copy().resize((96, 80)).save(tmp_path / "train" / "002.png", exif=turned)
    head, *lines = faults(read_detection, of(tmp_path))
    file = tmp_path / "annotations" / "train.json"
    assert head == f"data.root: '{file}': 5 of 16 annotations {UNUSABLE}"
    assert f"'{file}': left out 1 object without area" in caplog.text
    for line, (_, pattern) in zip(lines, BROKEN, strict=False):
        assert re.search(pattern, line), line
    assert lines[len(BROKEN) :] == [
        f"data.root: '{file}': 2 of 6 images {UNUSABLE}",
        f"  image '001.png' does not exist (in '{tmp_path}/train')",
        "  image '002.png': 80 x 80 pixels, its image 80 x 96 when upright (EXIF "
        "orientation 6). If the labels are of "
        "the stored pixels, remove the tag (exiftool -Orientation= FILE), else export them anew",
    ]


def test_files_that_are_no_annotations(tmp_path):
    """Of all parts at once; then categories of parts that differ."""
    coco_tree(tmp_path, test=2, train=2, val=2)
    train, val, test = (tmp_path / f"annotations/{part}.json" for part in ("train", "val", "test"))
    good = read(train)
    train.write_text("{")
    val.write_text(json.dumps({"images": [], "annotations": [3]}))
    test.unlink()
    test.mkdir()
    lines = faults(read_detection, of(tmp_path))
    starts = [
        f"data.root: '{train}' is not in COCO's format:",
        "  invalid json: eof while parsing an object at line 1 column 1",
        f"data.root: '{val}' is not in COCO's format:",
        "  images is [], expected at least 1 item",
        "  annotations[0] is 3, expected an object",
        "  categories field required",
        f"data.root: '{test}' cannot be read (",
    ]
    test.rmdir()
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), line
    train.write_text(json.dumps(good))
    good["categories"][0]["name"] = "nought"
    val.write_text(json.dumps({**good, "images": good["images"][:1], "annotations": []}))
    line, *_ = faults(read_detection, of(tmp_path))
    assert line == f"data.root: '{val}' has categories that are not in '{train}': 3 'nought'"
    for table, fault in (
        ("images", "images with the id 100, 101"),
        ("categories", "categories with the id 3, 7, 11"),
    ):
        val.write_text(json.dumps(good | {table: good[table] * 2}))
        assert f"data.root: '{val}' has several {fault}" in faults(read_detection, of(tmp_path))


def test_masks_are_those_of_the_files(tmp_path):
    canvases = mask_tree(tmp_path)["train"]
    for kind in (
        "images",
        "masks",
    ):  # folders of the parts and their masks alike
        folder = tmp_path / kind / "train"
        (folder / "a").mkdir()
        (folder / "000.png").rename(folder / "a" / "x.png")
    canvases["a/x.png"] = canvases.pop("000.png")
    train = read_segmentation(of(tmp_path)).train
    assert train.classes == ["background", *CLASSES]
    assert not outlined(train.targets)
    for target, name in zip(train.targets, train.names, strict=True):
        mask = target.mask()
        assert (mask[0] == IGNORED).all()
        expected = canvases[name.removeprefix("images/train/")].mask
        np.testing.assert_array_equal(mask[1:-1, 1:-1], expected[1:-1, 1:-1])
    (tmp_path / "classes.txt").unlink()
    assert read_segmentation(of(tmp_path)).train.classes == [
        "0",
        "1",
        "2",
        "3",
    ]
    paint(tmp_path / "images" / "test" / "1.png")  # a test set whose masks are kept by others
    assert list(read_segmentation(of(tmp_path)).parts) == ["train", "test"]


def test_masks_that_cannot_be_used(tmp_path):
    mask_tree(tmp_path)
    masks = tmp_path / "masks" / "train"
    with Image.open(masks / "000.png") as image:
        image.convert("RGB").save(masks / "000.png")
    Image.fromarray(np.full((5, 6), 1, np.uint8)).save(masks / "001.png")
    Image.fromarray(np.full((80, 80), 9, np.uint8)).save(masks / "002.png")
    (masks / "003.png").write_bytes(b"no image")
    (masks / "004.png").unlink()
    lines = faults(read_segmentation, of(tmp_path))
    assert lines == [
        f"data.root: '{tmp_path}/images/train': 1 of 6 images {UNUSABLE}",
        f"  '004.png' has no mask, expected '{masks}/004.png'",
        f"data.root: '{tmp_path}/masks': 4 of 5 masks {UNUSABLE}",
        f"  '{masks}/000.png': a colour image (RGB), expected a grey or palette PNG whose "
        "numbers are the classes",
        f"  '{masks}/001.png': 6 x 5 pixels, its image 64 x 96",
        f"  '{masks}/002.png': values without a class: 9, expected 0 to 3, and 255 for "
        "ignored pixels",
        f"  '{masks}/003.png': not an image",
    ]
    file = tmp_path / "classes.txt"
    for content, fault in (
        ("digit\n", "1 as number of classes, expected 2 to 255"),
        ("a\n\nb\n", "an empty line, expected the name of class 1"),
    ):
        file.write_text(content)
        assert f"data.root: '{file}' has {fault}" in faults(read_segmentation, of(tmp_path))


def test_grey_masks_of_two_bits():
    rows = b"".join(b"\0" + bytes([0b00011011]) for _ in range(2))  # 0, 1, 2, 3
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 4, 2, 2, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    png = b"\x89PNG\r\n\x1a\n"
    for tag, data in chunks:
        png += struct.pack(">I", len(data)) + tag + data
        png += struct.pack(">I", zlib.crc32(tag + data))
    assert mask_values(png).tolist() == [[0, 1, 2, 3]] * 2


def test_subset_held_out_and_left_out(tmp_path):
    canvases = coco_tree(tmp_path, train=8)["train"]
    (tmp_path / "exclude.txt").write_text("train/000.png\n")
    with pytest.raises(LabelsMissing, match="--data.val_fraction"):
        read_detection(of(tmp_path))
    fields = {"val_fraction": 0.25, "exclude": str(tmp_path / "exclude.txt")}
    listing = read_detection(of(tmp_path, **fields))
    assert len(listing.train) == 5
    assert listing.excluded == 1
    drawn = read_detection(of(tmp_path, subset={"total": 3}, **fields))
    assert len(drawn.train) == 3
    assert drawn.test.names == listing.test.names
    names = drawn.train.names + drawn.test.names
    assert len(set(names)) == 5
    assert "train/000.png" not in names
    for name, target in zip(names, [*drawn.train.targets, *drawn.test.targets], strict=True):
        np.testing.assert_array_equal(target.boxes, canvases[name[6:]].boxes)


SIDE = 96  # the canvas, which is the long side of most images
LOOKS = (SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))  # with mean and std
AUGMENT = SimpleNamespace(scale=[0.5, 2.0], flip=0.5, photometric=True)
EVERY = np.arange(6)


def stored(reader, data, bound=2 * SIDE):
    return store_split(reader(data).train, stored_size=bound, data=data)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """Canvases with a background of 0 to 59 and digits of 160 to 255, with targets."""
    root = tmp_path_factory.mktemp("boxes")
    coco_tree(root)
    return stored(read_detection, of(root))


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    root = tmp_path_factory.mktemp("masks")
    mask_tree(root)
    return stored(read_segmentation, of(root))


def shown(batch, b):
    """The pixels of an image of a batch, [S, S, 3] in [0, 1]."""
    pixels = batch["images"][b].permute(1, 2, 0)
    return (pixels * torch.tensor(LOOKS[2]) + torch.tensor(LOOKS[1])).numpy()


def plain(**changes):
    return SimpleNamespace(**{**vars(AUGMENT), "photometric": False, **changes})


@pytest.mark.parametrize("augment", [plain(scale=[2.0, 2.0]), plain()])
def test_boxes_and_outlines_stay_on_the_digits(boxes, augment):
    """A digit's pixels are bright: its mask covers them, and its box is that of the mask."""
    whole_boxes = 0
    for epoch in range(4):
        batch = DenseTransform(boxes, *LOOKS, augment, 5)(epoch, EVERY)
        for b in EVERY:
            bright = shown(batch, b).mean(axis=2) > 0.45
            real = batch["labels"][b] >= 0  # the others fill the batch
            image_masks = batch["masks"][b][real].numpy()
            union = image_masks.any(axis=0)
            edge = np.abs(np.diff(np.pad(union, 1).astype(int), axis=0))[:, 1:-1].sum()
            # blurred edges, and what is left of a box below a pixel
            assert (bright ^ union).sum() <= 3 * edge + 6
            for box, mask in zip(batch["boxes"][b][real].numpy(), image_masks, strict=True):
                assert (0 <= box).all()
                assert (box <= SIDE).all()
                assert (box[2:] - box[:2] >= 1).all()
                rows = np.flatnonzero(mask.any(axis=1))
                columns = np.flatnonzero(mask.any(axis=0))
                if len(rows) and box.min() > 0 and box.max() < SIDE:  # not cut
                    tight = [
                        columns[0],
                        rows[0],
                        columns[-1] + 1,
                        rows[-1] + 1,
                    ]
                    np.testing.assert_allclose(box, tight, atol=1.01)
                    whole_boxes += 1
    assert whole_boxes > (3 if augment.scale[0] == 2 else 20)


def test_classes_stay_on_the_digits(masks):
    for epoch in range(3):
        batch = DenseTransform(masks, *LOOKS, plain(), 6)(epoch, EVERY)
        for b in EVERY:
            mask = batch["mask"][b].numpy()
            bright = shown(batch, b).mean(axis=2) > 0.45
            assert ((mask > 0) == bright)[mask != IGNORED].mean() > 0.95
            assert not batch["images"][b][:, (batch["images"][b] == 0).all(dim=0)].any()


def test_flips_happen_and_do_not(boxes):
    still, turned = (
        DenseTransform(boxes, *LOOKS, plain(scale=[1.0, 1.0], flip=share), 7)(0, EVERY)
        for share in (0.0, 1.0)
    )
    for b, target in enumerate(boxes.targets):
        w = letterboxed(target.size, SIDE)[1]
        for name in ("images", "masks"):
            torch.testing.assert_close(turned[name][b, :, :, :w], still[name][b, :, :, :w].flip(2))


def test_unusual_images(tmp_path):
    """Of 16 bits; with crowds or slivers; stored smaller than their files, whose pixels boxes and
    outlines count."""
    import cv2

    def change(part, content):
        content["annotations"][0]["iscrowd"] = 1
        content["annotations"][1]["bbox"] = [10, 10, 0.5, 20]

    canvases = coco_tree(tmp_path, change=change)["train"]
    data = of(tmp_path, range=[0, 65535])
    batch = DenseTransform(stored(read_detection, data), *LOOKS)(0, EVERY)
    missing = [len(scene.labels) for scene in canvases.values()]
    missing -= (batch["labels"] >= 0).sum(dim=1).numpy()
    assert missing.tolist() == [1, 1, 0, 0, 0, 0]

    scene = canvases["003.png"]
    small = DenseTransform(stored(read_detection, data, 40), 48, *LOOKS[1:])(0, np.array([3]))
    n = len(scene.labels)
    np.testing.assert_allclose(small["boxes"][0, :n], scene.boxes / 2)
    h = scene.image.shape[0] // 2
    bright = shown(small, 0)[:h].mean(axis=2) > 0.45
    assert (bright ^ small["masks"][0].numpy().any(axis=0)[:h]).mean() < 0.05

    for name, canvas in canvases.items():
        pixels = canvas.image[:, :, ::-1].astype(np.uint16) * 257
        cv2.imwrite(str(tmp_path / "train" / name), pixels)
    deep = DenseTransform(stored(read_detection, data), *LOOKS)(0, np.array([3]))
    h, w = scene.image.shape[:2]
    np.testing.assert_allclose(shown(deep, 0)[:h, :w] * 255, scene.image, atol=0.01)
