"""The drloc supplement's networks by the command line: Cascade R-CNN, images without squares, the
auxiliary head."""

import numpy as np
import pytest
import torch
from dense_trees import coco_tree, mask_tree
from helpers import as_flags, call_ok, metrics, read
from test_dense_models import SIDE, backbone, drawn
from test_dense_runs import TINY

from idmm.config.dense import DenseData, DetectAugment
from idmm.data.image_store import store_split
from idmm.dense.network import Segmenter, pixel_cross_entropy, saved_network
from idmm.dense.read import read_images
from idmm.dense.transforms import DenseTransform
from idmm.models.weights import read_checkpoint
from idmm.seeding import seeded

SWIN = {
    "model.name": "swin_tiny_patch4_window7_224",
    "model.kwargs": "{embed_dim: 8, depths: [1, 1, 1, 1], num_heads: [1, 1, 2, 2]}",
}
EPOCH = {
    "train.epochs": 1,
    "train.batch_size": 2,
    "train.device": "cpu",
    "data.workers": 0,
}


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """Images of 64 x 96, 96 x 64 and 80 x 80 pixels, with boxes and outlines."""
    root = tmp_path_factory.mktemp("boxes")
    coco_tree(root, train=4, val=3)
    return root


def run(command, root, out, **flags):
    call_ok([command, "--data.root", root, "--out", out, *as_flags(flags, {})])
    return read(out / "result.json")


def test_cascade_without_squares_from_training_to_prediction(boxes, tmp_path):
    changes = {
        "model.cascade": True,
        "augment.short_side": [48, 80],
        "train.size": 100,
    }
    result = run("detect", boxes, tmp_path / "run", **TINY | SWIN | changes)
    assert {"ap", "mask_ap"} <= result.keys()
    saved = read_checkpoint(tmp_path / "run", "init", "model")
    assert len(saved_network(saved).roi_heads.heads) == 3
    answers = read(tmp_path / "run/predictions.json")
    predict = f"predict --init {tmp_path}/run --min_score 0.05 --out {tmp_path}/p"
    call_ok(f"{predict} {boxes}/val")
    predicted = read(tmp_path / "p/predictions.json")["annotations"]
    scores, again = (
        sorted(round(one["score"], 4) for one in rows if one["score"] >= 0.0501)
        for rows in (answers, predicted)
    )
    assert scores == again != []


def test_short_sides_are_drawn_and_canvases_hold_the_batch(boxes):
    data = DenseData(root=str(boxes), cache="off")
    store = store_split(
        read_images("detect", data).train,
        stored_size=80,
        data=data,
        part="train",
    )
    augment = DetectAugment(short_side=[40, 80], flip=0.0, photometric=False)
    shapes = set()
    for epoch in range(6):
        transform = DenseTransform(store, 100, (0.5,) * 3, (0.5,) * 3, augment, 1)
        for number in range(4):
            sample = transform._sample(epoch, number)
            height, width = sample["image"].shape[1:]
            assert 40 <= min(height, width) <= 80
            assert max(height, width) <= 100
            shapes.add((height, width))
            original = store.targets[number].size
            assert height / width == pytest.approx(original[0] / original[1], rel=0.03)
    assert len(shapes) > 8
    evaluated = DenseTransform(store, 100, (0.5,) * 3, (0.5,) * 3, short=64)
    batch = evaluated(0, np.arange(3))
    assert batch["images"].shape[-2:] == batch["masks"].shape[-2:] == (96, 96)
    alone = evaluated(0, np.arange(1))
    assert alone["images"].shape[-2:] == store.targets[0].size == (64, 96)
    assert torch.equal(alone["boxes"][0], torch.from_numpy(store.targets[0].boxes))


def test_recipe_trains_at_the_papers_sizes(tmp_path):
    coco_tree(tmp_path / "images", train=4, val=2)
    small = {
        "model.pyramid_width": 16,
        "train.schedule": "cosine",
        "train.eval_every": 1,
    }
    flags = EPOCH | SWIN | small
    run(
        "detect",
        tmp_path / "images",
        tmp_path / "run",
        config="maskrcnn_1x",
        **flags,
    )
    (record,) = metrics(tmp_path / "run")
    assert record["step"] == 2
    config = read(tmp_path / "run/config.yaml")
    assert config["train"]["size"] == 1333
    assert config["augment"]["short_side"] == [480, 800]


def test_auxiliary_head_adds_its_share_and_is_saved(tmp_path):
    batch, _ = drawn(2)
    with seeded(1):
        network = Segmenter(backbone("pvt"), SIDE, 4, 16, auxiliary=0.4).train()
    with seeded(2):
        out = network.loss(batch)
    with seeded(2):
        main = pixel_cross_entropy(network(batch["images"]), batch["mask"])
    torch.testing.assert_close(out["loss"], main + 0.4 * out["auxiliary"])
    out["loss"].backward()
    assert all(p.grad is not None for p in network.auxiliary.parameters())
    mask_tree(tmp_path / "masks", train=4, val=2)
    flags = EPOCH | SWIN | {"train.size": 64, "train.eval_every": 1, "model.pyramid_width": 16}
    run(
        "segment",
        tmp_path / "masks",
        tmp_path / "run",
        config="upernet_160k",
        **flags,
    )
    saved = saved_network(read_checkpoint(tmp_path / "run", "init", "model"))
    assert saved.auxiliary is not None
