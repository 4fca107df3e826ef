"""Batches of boxes and masks: what belongs together stays together, and an image's draw is its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dense_trees import coco_tree, mask_tree
from folders import paint, section

from idmm.data.image_store import store_split
from idmm.dense.read import read_detection, read_segmentation
from idmm.dense.targets import IGNORED
from idmm.dense.transforms import DenseTransform, letterboxed

SIDE = 96  # the canvas, which is the long side of most images
LOOKS = (SIDE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))  # with mean and std
AUGMENT = SimpleNamespace(scale=[0.5, 2.0], flip=0.5, photometric=True)
EVERY = np.arange(6)


def stored(found, data, bound=2 * SIDE):
    store = store_split(found.splits.train, stored_size=bound, data=data)
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
    return (batch["images"][b].permute(1, 2, 0) * torch.tensor(LOOKS[2]) + torch.tensor(LOOKS[1])).numpy()


def plain(**changes):
    return SimpleNamespace(**{**vars(AUGMENT), "photometric": False, **changes})


@pytest.mark.parametrize("augment", [plain(scale=[2.0, 2.0]), plain()])
def test_boxes_and_outlines_stay_on_the_digits(boxes, augment):
    """A digit's pixels are bright: its mask covers them, and its box is that of the mask."""
    seen = 0
    for epoch in range(4):
        batch = DenseTransform(*boxes.given, *LOOKS, augment, 5)(epoch, EVERY)
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
    for epoch in range(3):
        batch = DenseTransform(*masks.given, *LOOKS, plain(), 6)(epoch, EVERY)
        for b in EVERY:
            mask, bright = batch["mask"][b].numpy(), shown(batch, b).mean(axis=2) > 0.45
            assert ((mask > 0) == bright)[mask != IGNORED].mean() > 0.95
            assert not batch["images"][b][:, (batch["images"][b] == 0).all(dim=0)].any()


def test_a_draw_is_of_key_epoch_and_image(boxes):
    transform = DenseTransform(*boxes.given, *LOOKS, AUGMENT, 7)
    whole, state = transform(2, EVERY), torch.get_rng_state()
    alone = transform(2, np.array([4, 1]))
    assert torch.equal(state, torch.get_rng_state())
    for place, i in enumerate([4, 1]):
        assert torch.equal(alone["images"][place], whole["images"][i])
        n = int((alone["labels"][place] >= 0).sum())
        assert all(torch.equal(alone[name][place, :n], whole[name][i, :n]) for name in ("boxes", "masks"))
    for again in (transform(3, EVERY), DenseTransform(*boxes.given, *LOOKS, AUGMENT, 8)(2, EVERY)):
        assert all(not torch.equal(again["images"][i], whole["images"][i]) for i in EVERY)


def test_flips_happen_and_do_not(boxes):
    still = DenseTransform(*boxes.given, *LOOKS, plain(scale=[1.0, 1.0], flip=0.0), 7)(0, EVERY)
    turned = DenseTransform(*boxes.given, *LOOKS, plain(scale=[1.0, 1.0], flip=1.0), 7)(0, EVERY)
    torch.testing.assert_close(still["images"], DenseTransform(*boxes.given, *LOOKS)(0, EVERY)["images"])
    for b, scene in enumerate(boxes.scenes):
        w = letterboxed(scene.image.shape[:2], SIDE)[1]
        for name in ("images", "masks"):
            torch.testing.assert_close(turned[name][b, :, :, :w], still[name][b, :, :, :w].flip(2))


def test_unusual_images(tmp_path):
    """Of 16 bits; with crowds, slivers or no object; that cannot be read; stored smaller than their files, whose pixels
    boxes and outlines count."""
    import cv2

    def change(part, content):
        content["annotations"][0]["iscrowd"] = 1
        content["annotations"][1]["bbox"] = [10, 10, 0.5, 20]
        content["images"].append({"id": 900, "file_name": "empty.png", "height": 20, "width": 30})
        paint(tmp_path / part / "empty.png", size=(30, 20))

    made = coco_tree(tmp_path, change=change)
    (tmp_path / "train" / "005.png").write_bytes(b"no image")
    data = section(tmp_path, cache="off", on_error="skip", range=[0, 65535])
    found = read_detection(data)
    given = stored(found, data)
    batch = DenseTransform(*given, *LOOKS)(0, EVERY)
    counts = [len(scene.labels) for scene in made["train"].values()]
    assert (batch["labels"] >= 0).sum(dim=1).tolist() == [counts[0] - 1, counts[1] - 1, *counts[2:5], 0]
    alone = DenseTransform(*given, *LOOKS)(0, np.array([5]))
    assert alone["boxes"].shape == (1, 0, 4) and alone["masks"].shape == (1, 0, SIDE, SIDE)

    scene = made["train"]["003.png"]
    small = DenseTransform(*stored(found, data, 40), 48, *LOOKS[1:])(0, np.array([3]))
    n = len(scene.labels)
    np.testing.assert_allclose(small["boxes"][0, :n], scene.boxes / 2)
    h = scene.image.shape[0] // 2
    bright = shown(small, 0)[:h].mean(axis=2) > 0.45
    assert (bright ^ small["masks"][0].numpy().any(axis=0)[:h]).mean() < 0.05

    for name, one in made["train"].items():
        cv2.imwrite(str(tmp_path / "train" / name), one.image[:, :, ::-1].astype(np.uint16) * 257)
    deep = DenseTransform(*stored(read_detection(data), data), *LOOKS)(0, np.array([3]))
    h, w = scene.image.shape[:2]
    np.testing.assert_allclose(shown(deep, 0)[:h, :w] * 255, scene.image, atol=0.01)
