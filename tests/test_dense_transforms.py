"""Batches of boxes and masks: what belongs together stays together, and an image's draw is its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dense_trees import coco_tree, mask_tree
from folders import paint, section

from idmm.data.cache import load_split
from idmm.data.dense import (
    IGNORED,
    DenseTransform,
    EvalDenseTransform,
    letterboxed,
    read_detection,
    read_segmentation,
    short_side,
)
from idmm.errors import RunError

SIDE = 96  # the canvas, which is the long side of most images
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
AUGMENT = SimpleNamespace(scale=[0.5, 2.0], flip=0.5, photometric=True)
EVERY = np.arange(6)


def stored(found, data, largest=2.0):
    store = load_split(found.splits.train, bound=short_side(SIDE, largest), data=data)
    return store, found.of("train", store.names)


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """Canvases with a background of 0 to 59 and digits of 160 to 255, their store and targets."""
    root = tmp_path_factory.mktemp("boxes")
    made = coco_tree(root)
    data = section(root, cache="off")
    return SimpleNamespace(scenes=list(made["train"].values()), given=stored(read_detection(data), data))


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    root = tmp_path_factory.mktemp("masks")
    made = mask_tree(root)
    data = section(root, cache="off")
    return SimpleNamespace(scenes=list(made["train"].values()), given=stored(read_segmentation(data), data))


def shown(batch, b):
    """The pixels of an image of a batch, [S, S, 3] in [0, 1]."""
    return (batch["images"][b].permute(1, 2, 0) * torch.tensor(STD) + torch.tensor(MEAN)).numpy()


def plain(**changes):
    return SimpleNamespace(**{**vars(AUGMENT), "photometric": False, **changes})


# ------------------------------------------------------------------ letterboxing
def test_to_evaluate_an_image_is_scaled_alone(boxes):
    batch = EvalDenseTransform(*boxes.given, SIDE, MEAN, STD)(0, EVERY)
    assert batch["images"].shape == (6, 3, SIDE, SIDE) and batch["index"].tolist() == EVERY.tolist()
    most = max(len(scene.labels) for scene in boxes.scenes)
    assert batch["boxes"].shape == (6, most, 4) and batch["masks"].shape == (6, most, SIDE, SIDE)
    for b, scene in enumerate(boxes.scenes):
        (h, w), n = scene.image.shape[:2], len(scene.labels)
        scale = SIDE / max(h, w)
        np.testing.assert_allclose(batch["boxes"][b, :n], scene.boxes * scale, rtol=1e-6)
        assert batch["labels"][b].tolist() == [*scene.labels, *[-1] * (most - n)]
        assert not batch["boxes"][b, n:].any() and not batch["masks"][b, n:].any()
        right, below = round(w * scale), round(h * scale)
        assert not batch["images"][b, :, below:].any() and not batch["images"][b, :, :, right:].any()
        if scale == 1:
            np.testing.assert_allclose(shown(batch, b)[:h, :w] * 255, scene.image, atol=1e-3)
            np.testing.assert_array_equal(batch["masks"][b, :n, :h, :w], scene.masks)


def test_masks_to_evaluate_on(masks):
    batch = EvalDenseTransform(*masks.given, SIDE, MEAN, STD)(0, EVERY)
    assert batch["mask"].dtype == torch.int64 and batch.keys() == {"images", "mask", "index"}
    for mask, scene in zip(batch["mask"].numpy(), masks.scenes, strict=True):
        h, w = scene.image.shape[:2]
        if max(h, w) == SIDE:
            np.testing.assert_array_equal(mask[1 : h - 1, 1 : w - 1], scene.mask[1:-1, 1:-1])
        h, w = letterboxed((h, w), SIDE)
        assert (mask[h:] == IGNORED).all() and (mask[:, w:] == IGNORED).all() and (mask[2, 2 : w - 2] != IGNORED).all()


# ------------------------------------------------------------------ augmented
@pytest.mark.parametrize("augment", [plain(scale=[2.0, 2.0]), plain()])
def test_boxes_and_outlines_stay_on_the_digits(boxes, augment):
    """A digit's pixels are bright: its mask covers them, and its box is that of the mask."""
    seen = 0
    for epoch in range(4):
        batch = DenseTransform(*boxes.given, augment, SIDE, MEAN, STD, 5)(epoch, EVERY)
        for b in EVERY:
            bright = shown(batch, b).mean(axis=2) > 0.45
            kept = batch["labels"][b] >= 0
            union = batch["masks"][b][kept].numpy().any(axis=0) if kept.any() else np.zeros_like(bright)
            edge = np.abs(np.diff(np.pad(union, 1).astype(int), axis=0))[:, 1:-1].sum()
            assert (bright ^ union).sum() <= 3 * edge + 6  # blurred edges, and what is left of a box below a pixel
            for box, mask in zip(batch["boxes"][b][kept].numpy(), batch["masks"][b][kept].numpy(), strict=True):
                assert (0 <= box).all() and (box <= SIDE).all() and (box[2:] - box[:2] >= 1).all()
                rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
                if len(rows) and box.min() > 0 and box.max() < SIDE:  # not cut
                    tight = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
                    np.testing.assert_allclose(box, tight, atol=1.01)
                    seen += 1
    assert seen > (3 if augment.scale[0] == 2 else 20)


def test_classes_stay_on_the_digits(masks):
    augment = plain(scale=[0.5, 2.0])
    for epoch in range(3):
        batch = DenseTransform(*masks.given, augment, SIDE, MEAN, STD, 6)(epoch, EVERY)
        for b in EVERY:
            mask, bright = batch["mask"][b].numpy(), shown(batch, b).mean(axis=2) > 0.45
            right = (mask > 0) == bright
            assert right[mask != IGNORED].mean() > 0.95
            assert not batch["images"][b][:, (batch["images"][b] == 0).all(dim=0)].any()


def test_a_draw_is_of_key_epoch_and_image(boxes):
    transform = DenseTransform(*boxes.given, AUGMENT, SIDE, MEAN, STD, 7)
    whole, alone = transform(2, EVERY), transform(2, np.array([4, 1]))
    state = torch.get_rng_state()
    for place, i in enumerate([4, 1]):
        torch.testing.assert_close(alone["images"][place], whole["images"][i], rtol=0, atol=0)
        n = int((alone["labels"][place] >= 0).sum())
        torch.testing.assert_close(alone["boxes"][place, :n], whole["boxes"][i, :n], rtol=0, atol=0)
        torch.testing.assert_close(alone["masks"][place, :n], whole["masks"][i, :n], rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    other = DenseTransform(*boxes.given, AUGMENT, SIDE, MEAN, STD, 8)
    for again in (transform(3, EVERY), other(2, EVERY)):
        assert all(not torch.equal(again["images"][i], whole["images"][i]) for i in EVERY)


def test_flips_happen_and_do_not(boxes):
    still = DenseTransform(*boxes.given, plain(scale=[1.0, 1.0], flip=0.0), SIDE, MEAN, STD, 7)(0, EVERY)
    turned = DenseTransform(*boxes.given, plain(scale=[1.0, 1.0], flip=1.0), SIDE, MEAN, STD, 7)(0, EVERY)
    plainly = EvalDenseTransform(*boxes.given, SIDE, MEAN, STD)(0, EVERY)
    torch.testing.assert_close(still["images"], plainly["images"])
    torch.testing.assert_close(still["boxes"], plainly["boxes"])
    for b, scene in enumerate(boxes.scenes):
        w, n = letterboxed(scene.image.shape[:2], SIDE)[1], len(scene.labels)
        torch.testing.assert_close(turned["images"][b, :, :, :w], still["images"][b, :, :, :w].flip(2))
        torch.testing.assert_close(turned["masks"][b, :, :, :w], still["masks"][b, :, :, :w].flip(2))
        torch.testing.assert_close(turned["boxes"][b, :n, 0], w - still["boxes"][b, :n, 2])


# ------------------------------------------------------------------ edges
def test_crowds_slivers_and_images_without_objects(tmp_path):
    def change(part, content):
        content["annotations"][0]["iscrowd"] = 1
        content["annotations"][1]["bbox"] = [10, 10, 0.5, 20]
        content["images"].append({"id": 900, "file_name": "empty.png", "height": 20, "width": 30})
        paint(tmp_path / part / "empty.png", size=(30, 20))

    made = coco_tree(tmp_path, change=change)
    data = section(tmp_path, cache="off")
    given = stored(read_detection(data), data)
    batch = EvalDenseTransform(*given, SIDE, MEAN, STD)(0, np.arange(7))
    counts = [len(scene.labels) for scene in made["train"].values()]
    assert (batch["labels"] >= 0).sum(dim=1).tolist() == [counts[0] - 1, counts[1] - 1, *counts[2:], 0]
    alone = EvalDenseTransform(*given, SIDE, MEAN, STD)(0, np.array([6]))
    assert alone["boxes"].shape == (1, 0, 4) and alone["masks"].shape == (1, 0, SIDE, SIDE)


def test_deep_images(tmp_path):
    """Images of 16 bits are scaled as in the other stages."""
    import cv2

    made = coco_tree(tmp_path)
    for part, scenes in made.items():
        for name, scene in scenes.items():
            cv2.imwrite(str(tmp_path / part / name), scene.image[:, :, ::-1].astype(np.uint16) * 257)
    data = section(tmp_path, cache="off", range=[0, 65535])
    given = stored(read_detection(data), data)
    batch = EvalDenseTransform(*given, SIDE, MEAN, STD)(0, EVERY)
    np.testing.assert_allclose(shown(batch, 0)[:64] * 255, made["train"]["000.png"].image, atol=0.01)


def test_images_stored_smaller_than_their_files(tmp_path):
    """Boxes and outlines are of the file's pixels, wherever the image was shrunk to."""
    made = coco_tree(tmp_path)
    data = section(tmp_path, cache="off")
    found = read_detection(data)
    small = load_split(found.splits.train, bound=40, data=data)
    scene = made["train"]["000.png"]
    batch = EvalDenseTransform(small, found.of("train", small.names), 48, MEAN, STD)(0, EVERY)
    n = len(scene.labels)
    np.testing.assert_allclose(batch["boxes"][0, :n], scene.boxes / 2)
    bright = shown(batch, 0)[:32].mean(axis=2) > 0.45
    assert (bright ^ batch["masks"][0].numpy().any(axis=0)[:32]).mean() < 0.05


def test_images_that_were_left_out(tmp_path):
    made = coco_tree(tmp_path)
    (tmp_path / "train" / "002.png").write_bytes(b"no image")
    data = section(tmp_path, cache="off", on_error="skip")
    store, targets = stored(read_detection(data), data)
    assert len(store) == len(targets) == 5
    np.testing.assert_array_equal(targets[2].boxes, made["train"]["003.png"].boxes)


def test_a_mask_that_was_changed(tmp_path):
    mask_tree(tmp_path)
    data = section(tmp_path, cache="off")
    transform = EvalDenseTransform(*stored(read_segmentation(data), data), SIDE, MEAN, STD)
    path = tmp_path / "masks" / "train" / "001.png"
    path.write_bytes((tmp_path / "masks" / "train" / "002.png").read_bytes())
    with pytest.raises(RunError, match="001.png' was changed while in use"):
        transform(0, EVERY)
    path.unlink()
    with pytest.raises(RunError, match="was fine when checked, but now: no such file"):
        transform(0, EVERY)
