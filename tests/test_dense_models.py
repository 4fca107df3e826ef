"""Detector and segmenter: maps, losses, gradients, learning; average precision and intersection
over union."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dense_trees import CLASSES, run_lengths, scene

from idmm.dense.evaluate import (
    Objects,
    detection_scores,
    on_file,
    segmentation_scores,
    segmented,
)
from idmm.dense.network import Detector, Segmenter, pixel_cross_entropy
from idmm.dense.run import DenseMethod
from idmm.dense.targets import BoxTarget
from idmm.models import create_backbone, token_grid
from idmm.models.maps import STRIDES, MultiScaleBackbone
from idmm.seeding import seeded

SIDE = 64
VIT = (
    "vit_tiny_patch16_224",
    dict(patch_size=8, embed_dim=32, depth=2, num_heads=2),
)
PVT = (
    "pvt_v2_b0",
    dict(
        embed_dims=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
    ),
)
BACKBONES = {  # of each kind of maps a small one
    "vit": VIT,
    "vit without norm": (
        VIT[0],
        dict(VIT[1], global_pool="avg", class_token=False),
    ),
    "t2t": ("t2t_vit_7", dict(embed_dim=32, depth=2, num_heads=2)),
    "cvt": (
        "cvt_13",
        dict(embed_dims=(16, 24, 32), depths=(1, 1, 1), num_heads=(1, 1, 2)),
    ),
    "pvt": PVT,
    "swin": (
        "swin_tiny_patch4_window7_224",
        dict(embed_dim=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2)),
    ),
    "resnet": ("test_resnet", {}),
    "mobilenet": ("mobilenetv4_conv_small_050", {}),
}


def backbone(kind="vit", side=SIDE, **more):
    name, kwargs = BACKBONES[kind]
    with seeded(0):
        return create_backbone(name, side, **kwargs, **more)


def detection(kind="vit", masks=False, width=16):
    with seeded(1):
        return DenseMethod(Detector(backbone(kind), SIDE, len(CLASSES), width, masks)).train()


def segmentation(kind="vit", width=16):
    with seeded(1):
        return DenseMethod(Segmenter(backbone(kind), SIDE, 1 + len(CLASSES), width)).train()


def drawn(count, objects=2):
    """A batch of small canvases as the loader gives them, and what is true of them."""
    scenes = [scene(seed, size=(SIDE, SIDE), objects=objects) for seed in range(count)]

    def stacked(name, dtype):
        return torch.from_numpy(np.stack([getattr(one, name) for one in scenes]).astype(dtype))

    # [B, H, W, 3] -> [B, 3, H, W]
    images = stacked("image", np.float32).permute(0, 3, 1, 2) / 64 - 2
    batch = {
        "images": images,
        "index": torch.arange(count),
        "mask": stacked("mask", np.int64),
    }
    batch |= {
        "boxes": stacked("boxes", np.float32),
        "labels": stacked("labels", np.int64),
    }
    targets = []
    for one in scenes:
        outlines = [run_lengths(mask) for mask in one.masks]
        targets.append(truth(one.boxes, one.labels, size=(SIDE, SIDE), segments=outlines))
    return batch | {"masks": stacked("masks", np.uint8)}, targets


def loss_of(method, batch, key=3):
    with seeded(key):
        return method(batch, key, 0)


def without_gradient(method):
    trained = [(name, p) for name, p in method.named_parameters() if p.requires_grad]
    return [name for name, p in trained if p.grad is None]


@pytest.mark.parametrize("kind", BACKBONES)
def test_all_that_is_trained_has_a_gradient(kind):
    """Of both networks, else processes that train together would wait for it; the weights of the
    backbone fit it."""
    batch, _ = drawn(2)
    for method in (detection(kind, masks=True), segmentation(kind)):
        network = method.backbone
        maps = network.forward_features(batch["images"])
        for level, channels, stride in zip(maps, network.channels, STRIDES, strict=True):
            assert level.shape == (
                2,
                channels,
                SIDE // stride,
                SIDE // stride,
            )
        out = loss_of(method, batch)
        out["loss"].backward()
        assert all(bool(torch.isfinite(value)) for value in out.values())
        assert not without_gradient(method)
        assert any(p.requires_grad for p in network.backbone.parameters())
        assert list(network.backbone.state_dict()) == list(backbone(kind).state_dict())


def test_maps_of_a_plain_transformer():
    """Of stride 8: pooled from the normalised tokens, and enlarged by a transposed convolution."""
    network = backbone().eval()
    images = torch.randn(2, 3, SIDE, SIDE)
    maps = MultiScaleBackbone(network, SIDE)
    grid = token_grid(network, images)  # [2, 32, 8, 8]
    pooled = [F.max_pool2d(grid, size) for size in (2, 4)]
    torch.testing.assert_close(
        list(maps.forward_features(images)),
        [maps.levels[0][0](grid), grid, *pooled],
    )
    assert maps.channels == [16, 32, 32, 32]


def test_maps_of_several_strides():
    """The deepest of each, as timm gives them; the last from where the features leave the
    backbone."""
    network = backbone("pvt").eval()
    images = torch.randn(2, 3, SIDE, SIDE)
    maps = MultiScaleBackbone(network, SIDE)
    final, levels = network.forward_intermediates(images)
    torch.testing.assert_close(list(maps.forward_features(images)), [*levels[:3], final])
    assert maps.channels == [8, 16, 24, 32]


def test_loss_of_pixels():
    """The mean over an image's pixels with a class, then over images; a naive loop, values and
    gradients."""
    logits = torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.randint(0, 4, (3, 5, 5))
    mask[0, :2], mask[2] = 255, 255
    expected = 0.0
    for image in range(3):
        pixels = (mask[image] != 255).nonzero().tolist()
        for y, x in pixels:
            log_shares = logits[image, :, y, x].log_softmax(0)
            expected = expected - log_shares[mask[image, y, x]] / len(pixels) / 3
    loss = pixel_cross_entropy(logits, mask)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (loss, expected)))
    assert pixel_cross_entropy(logits, torch.full_like(mask, 255)) == 0


@pytest.mark.parametrize("make", [detection, segmentation])
def test_one_image_and_half_precision(make):
    """A batch of one, as a run's last may be, though UPerNet normalises maps of one place; in bf16
    the loss is float32."""
    batch, _ = drawn(1)
    method = make("resnet")
    loss_of(method, batch)["loss"].backward()
    with torch.autocast("cpu", torch.bfloat16):
        out = loss_of(method, batch)
    assert {value.dtype for value in out.values()} == {torch.float32}
    assert bool(torch.isfinite(out["loss"]))


def test_boxes_are_computed_in_fp32(monkeypatch):
    """Not in bf16, which beyond 256 pixels has but every second one: neither proposals and
    predictions nor the true boxes that they are compared with."""
    with seeded(1):
        network = Detector(backbone(side=512), 512, len(CLASSES), 16, masks=True)
    true = torch.tensor([[[301.0, 303, 407, 501]]])
    encoded = []
    for part in (network.rpn, network.roi_heads):
        encode = part.box_coder.encode

        def recorded(true_boxes, boxes, encode=encode):
            encoded.extend([*true_boxes, *boxes])
            return encode(true_boxes, boxes)

        monkeypatch.setattr(part.box_coder, "encode", recorded)
    batch = {
        "images": torch.randn(1, 3, 512, 512),
        "boxes": true,
        "labels": torch.zeros(1, 1, dtype=torch.long),
        "masks": torch.ones(1, 1, 512, 512, dtype=torch.uint8),
    }
    with torch.autocast("cpu", torch.bfloat16):
        network.train().loss(batch)
        with torch.no_grad():
            (output,) = network.eval()(batch["images"])
    # true ones and anchors, true ones and proposals
    assert [boxes.dtype for boxes in encoded] == [torch.float32] * 4
    assert all(bool((boxes == true[0, 0]).all(1).any()) for boxes in encoded[::2])
    boxes = output["boxes"]
    assert boxes.dtype == output["scores"].dtype == torch.float32
    assert len(boxes)
    assert not torch.equal(boxes, boxes.bfloat16().float())


def test_a_detector_learns_two_images():
    batch, truth = drawn(2)
    method = detection(width=32)
    optimizer = torch.optim.AdamW(method.parameters(), lr=2e-3)
    for step in range(40):
        loss = loss_of(method, batch, step)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        outputs = method.backbone.eval()(batch["images"])
    detections = [on_file(output, (SIDE, SIDE), SIDE) for output in outputs]
    scores, _ = detection_scores(detections, truth, CLASSES)
    assert scores["ap50"] > 90


def test_several_scales():
    """The mean of what is said of each enlarged or reduced image, by a naive loop."""
    with seeded(1):
        network = Segmenter(backbone("vit", dynamic_size=True), SIDE, 3, 16).eval()
    images = torch.randn(2, 3, SIDE, SIDE)
    resized = dict(mode="bilinear", antialias=True)
    with torch.no_grad():
        plain = network(images).softmax(1)
        large = network(F.interpolate(images, (96, 96), **resized)).softmax(1)
        large = F.interpolate(large, (SIDE, SIDE), **resized)
        torch.testing.assert_close(segmented(network, images, [1.0, 1.5]), (plain + large) / 2)
        torch.testing.assert_close(segmented(network, images), plain)


def truth(boxes, labels, crowd=None, size=(100, 100), segments=None):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    crowd = np.zeros(len(boxes), dtype=bool) if crowd is None else np.array(crowd)
    return BoxTarget(boxes, np.array(labels, dtype=np.int64), segments, crowd, size, 0)


def objects(boxes, labels, scores, segments=None):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    return Objects(
        boxes,
        np.array(labels, dtype=np.int64),
        np.array(scores, dtype=np.float32),
        segments,
    )


def test_of_four_objects_three_found():
    """By hand: hit, miss, hit, hit. Precision is 1 up to recall 1/4 (26 of the 101), 3/4 up to 3/4
    (50), then 0."""
    boxes = [
        [0, 0, 10, 10],
        [20, 0, 30, 10],
        [40, 0, 50, 10],
        [60, 0, 70, 10],
    ]
    crowd = [80, 80, 90, 90]
    mark = [0, 50, 20, 70]
    labels = [0] * 5 + [1]
    detections = [boxes[0], [80, 0, 90, 9], boxes[1], boxes[2], crowd, mark]
    output = objects(detections, labels, [0.9, 0.8, 0.7, 0.6, 1, 1])
    true = truth([*boxes, crowd, mark], labels, crowd=[False] * 4 + [True, False])
    scores, each = detection_scores([output], [true], ["a", "b", "never seen"])
    ap = 100 * (26 + 0.75 * 50) / 101  # what meets a crowd counts neither for nor against
    for name in ("ap", "ap50", "ap75"):
        np.testing.assert_allclose(each[name], [ap, 100, np.nan])
    assert scores == pytest.approx(dict.fromkeys(("ap", "ap50", "ap75"), (ap + 100) / 2))


def test_nothing_found_and_nothing_there():
    for true, score in (
        (truth([[0, 0, 9, 9]], [0]), 0),
        (truth([], []), None),
    ):
        scores, _ = detection_scores([objects([], [], [])], [true], ["a"])
        assert scores == dict.fromkeys(("ap", "ap50", "ap75"), score)


def test_intersection_over_union():
    """By a naive loop over pixels; class 4 is only predicted, class 3 only true, class 5
    neither."""
    rng = np.random.default_rng(0)
    true = rng.integers(0, 4, 500)
    predicted = rng.choice([0, 1, 2, 4], 500)
    confusion = np.zeros((6, 6), dtype=np.int64)
    pixels = list(zip(true, predicted, strict=True))
    for one, other in pixels:
        confusion[one, other] += 1
    scores, per_class = segmentation_scores(confusion)
    ious = []
    for k in range(5):
        both = sum(pixel == (k, k) for pixel in pixels)
        either = sum(k in pixel for pixel in pixels)
        ious.append(100 * both / either)
    accuracies = [100 * np.mean(predicted[true == k] == k) for k in range(4)]
    np.testing.assert_allclose(per_class["iou"], [*ious, np.nan])
    np.testing.assert_allclose(per_class["accuracy"], [*accuracies, np.nan, np.nan])
    assert scores == pytest.approx(
        {
            "miou": np.mean(ious),
            "macc": np.mean(accuracies),
            "pixel_accuracy": 100 * np.mean(true == predicted),
        }
    )
    scores, _ = segmentation_scores(np.zeros((2, 2), int))
    assert scores == dict.fromkeys(("miou", "macc", "pixel_accuracy"))
