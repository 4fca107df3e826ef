"""Cascade R-CNN: matching and losses of the three heads against plain loops, and what they find
after training."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_dense_models import CLASSES, SIDE, backbone, drawn, without_gradient

from idmm.dense.network import Detector
from idmm.dense.run import DenseMethod
from idmm.seeding import seeded

IOUS = (0.5, 0.6, 0.7)
LOSS_WEIGHTS = (1, 0.5, 0.25)
BOX_WEIGHTS = ((10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15))


def cascade(masks=False):
    with seeded(1):
        detector = Detector(backbone("pvt"), SIDE, len(CLASSES), 16, masks, cascade=True)
    return DenseMethod(detector).train()


def overlap(one, other):
    """Intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    both = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / (sum(areas) - both)


def offsets_between(box, true, weights):
    """The four numbers that move a box to the true one (Girshick et al., CVPR 2014), times their
    weights."""
    width = box[2] - box[0]
    height = box[3] - box[1]
    true_width = true[2] - true[0]
    true_height = true[3] - true[1]
    return [
        weights[0] * ((true[0] + true_width / 2) - (box[0] + width / 2)) / width,
        weights[1] * ((true[1] + true_height / 2) - (box[1] + height / 2)) / height,
        weights[2] * math.log(true_width / width),
        weights[3] * math.log(true_height / height),
    ]


def moved(box, offsets, weights):
    """A box after it was moved, within the image."""
    width = box[2] - box[0]
    height = box[3] - box[1]
    x = box[0] + width / 2 + offsets[0] / weights[0] * width
    y = box[1] + height / 2 + offsets[1] / weights[1] * height
    new_width = width * math.exp(offsets[2] / weights[2])
    new_height = height * math.exp(offsets[3] / weights[3])
    corners = [
        x - new_width / 2,
        y - new_height / 2,
        x + new_width / 2,
        y + new_height / 2,
    ]
    return [min(max(corner, 0.0), float(SIDE)) for corner in corners]


@pytest.fixture
def scene():
    """A detector whose heads train on every box, maps of two images, boxes near the true ones, and
    these."""
    detector = cascade().backbone
    for head in detector.roi_heads.heads:
        head.fg_bg_sampler.batch_size_per_image = 10_000
        head.fg_bg_sampler.positive_fraction = 0.5
    batch, _ = drawn(2)
    generator = torch.Generator().manual_seed(0)
    targets = []
    proposals = []
    for boxes, labels in zip(batch["boxes"], batch["labels"], strict=True):
        targets.append({"boxes": boxes, "labels": labels + 1})
        shifted = boxes.repeat(12, 1) + 4 * torch.randn(24, 4, generator=generator)
        proposals.append(shifted.clamp(0, SIDE))
    maps = {}
    for i, side in enumerate((SIDE // 4, SIDE // 8, SIDE // 16, SIDE // 32)):
        maps[str(i)] = torch.randn(2, 16, side, side, generator=generator)
    return detector, maps, proposals, targets


def test_losses_are_those_of_a_plain_loop(scene):
    detector, maps, proposals, targets = scene
    sizes = [(SIDE, SIDE)] * 2
    _, losses = detector.roi_heads(maps, proposals, sizes, targets)
    classifier = 0.0
    box_loss = 0.0
    positives = []
    for head, iou, weights, share in zip(
        detector.roi_heads.heads, IOUS, BOX_WEIGHTS, LOSS_WEIGHTS, strict=True
    ):
        rows = []  # box, class and offsets of each, in the order of the images
        per_image = []
        for own, target in zip(proposals, targets, strict=True):
            boxes = torch.cat([own, target["boxes"]]).tolist()
            per_image.append(boxes)
            for box in boxes:
                overlaps = [overlap(box, true) for true in target["boxes"].tolist()]
                best = max(range(len(overlaps)), key=overlaps.__getitem__)
                label = int(target["labels"][best]) if overlaps[best] >= iou else 0
                rows.append(
                    (
                        label,
                        offsets_between(box, target["boxes"][best].tolist(), weights),
                    )
                )
        pooled = head.box_roi_pool(maps, [torch.tensor(boxes) for boxes in per_image], sizes)
        logits, offsets = head.box_predictor(head.box_head(pooled))
        for n, (label, true) in enumerate(rows):
            classifier += share * -torch.log_softmax(logits[n], 0)[label] / len(rows)
            if label:
                true = torch.tensor(true)
                error = F.smooth_l1_loss(offsets[n, :4], true, beta=1 / 9, reduction="sum")
                box_loss += share * error / len(rows)
        positives.append(sum(label > 0 for label, _ in rows))
        numbers = iter(offsets[:, :4].tolist())
        proposals = []
        for boxes, target in zip(per_image, targets, strict=True):
            all_moved = [moved(box, next(numbers), weights) for box in boxes]
            # the last ones are the true boxes
            proposals.append(torch.tensor(all_moved[: -len(target["boxes"])]))
    assert positives[0] > positives[2] > 0  # the thresholds matter here
    torch.testing.assert_close(losses["loss_classifier"], classifier, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(losses["loss_box_reg"], box_loss, rtol=1e-4, atol=1e-5)


def test_every_head_learns_and_all_agree_on_the_masks():
    method = cascade(masks=True)
    batch, truth = drawn(2)
    optimizer = torch.optim.AdamW(method.parameters(), lr=2e-3)
    first = None
    for step in range(60):
        with seeded(step):
            out = method(batch, step, 0)
        optimizer.zero_grad()
        out["loss"].backward()
        if first is None:
            first = float(out["loss"].detach())
            assert not without_gradient(method)
        optimizer.step()
    assert float(out["loss"].detach()) < first / 3
    method.eval()
    with torch.no_grad():
        detections = method.backbone(batch["images"])
    for detection, target in zip(detections, truth, strict=True):
        for box, label in zip(target.boxes.tolist(), target.labels.tolist(), strict=True):
            overlaps = torch.tensor([overlap(one, box) for one in detection["boxes"].tolist()])
            matches = (overlaps > 0.5) & (detection["labels"] == label)
            assert detection["scores"][matches].max() > 0.3
        assert detection["masks"].shape == (
            len(detection["boxes"]),
            1,
            28,
            28,
        )
