"""Average precision by hand, intersection over union by a naive loop; predictions taken back to the images' files."""

import numpy as np
import pytest
import torch

from idmm.dense.evaluate import (
    Objects,
    class_scores,
    detection_scores,
    segmentation_scores,
)
from idmm.dense.targets import BoxTarget


def truth(boxes, labels, crowd=None, size=(100, 100), segments=None):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    crowd = np.zeros(len(boxes), dtype=bool) if crowd is None else np.array(crowd)
    return BoxTarget(boxes, np.array(labels, dtype=np.int64), segments, crowd, size, 0)


def objects(boxes, labels, scores, segments=None):
    boxes = np.array(boxes, dtype=np.float32).reshape(-1, 4)
    return Objects(boxes, np.array(labels, dtype=np.int64), np.array(scores, dtype=np.float32), segments)


# ---------------------------------------------------------------------- average precision, which pycocotools computes
def test_of_four_objects_three_found():
    """By hand: hit, miss, hit, hit. Precision is 1 up to recall 1/4 (26 of the 101), 3/4 up to 3/4 (50), then 0."""
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10], [40, 0, 50, 10], [60, 0, 70, 10]]
    crowd, mark = [80, 80, 90, 90], [0, 50, 20, 70]
    found = objects(
        [boxes[0], [80, 0, 90, 9], boxes[1], boxes[2], crowd, mark], [0] * 5 + [1], [0.9, 0.8, 0.7, 0.6, 1, 1]
    )
    true = truth([*boxes, crowd, mark], [0] * 5 + [1], crowd=[False] * 4 + [True, False])
    scores, each = detection_scores([found], [true], ["a", "b", "never seen"])
    ap = 100 * (26 + 0.75 * 50) / 101  # what meets a crowd counts neither for nor against
    for name in ("ap", "ap50", "ap75"):
        np.testing.assert_allclose(each[name], [ap, 100, np.nan])
    assert scores == pytest.approx(dict.fromkeys(("ap", "ap50", "ap75"), (ap + 100) / 2))


def test_nothing_found_and_nothing_there():
    nothing = objects([], [], [])
    assert detection_scores([nothing], [truth([[0, 0, 9, 9]], [0])], ["a"])[0] == {"ap": 0, "ap50": 0, "ap75": 0}
    assert detection_scores([nothing], [truth([], [])], ["a"])[0] == {"ap": 0, "ap50": 0, "ap75": 0}


# ---------------------------------------------------------------------- classes of pixels
def test_intersection_over_union():
    """By a naive loop over pixels; class 4 is only predicted, class 3 only true, class 5 neither."""
    rng = np.random.default_rng(0)
    true, said = rng.integers(0, 4, 500), rng.choice([0, 1, 2, 4], 500)
    confusion = np.zeros((6, 6), dtype=np.int64)
    for t, s in zip(true, said, strict=True):
        confusion[t, s] += 1
    iou, accuracy = class_scores(torch.from_numpy(confusion))
    wanted = []
    for k in range(6):
        both = sum(t == k and s == k for t, s in zip(true, said, strict=True))
        either = sum(t == k or s == k for t, s in zip(true, said, strict=True))
        wanted.append(100 * both / either if either else np.nan)
    np.testing.assert_allclose(iou, wanted)
    assert iou[3] == iou[4] == 0 and np.isnan(iou[5]) and accuracy[3] == 0 and np.isnan(accuracy[4:]).all()
    assert segmentation_scores(confusion) == pytest.approx(
        {
            "miou": np.mean(wanted[:5]),
            "macc": np.mean([100 * np.mean(said[true == k] == k) for k in range(4)]),
            "pixel_accuracy": 100 * np.mean(true == said),
        }
    )
    assert segmentation_scores(np.zeros((2, 2), int)) == {"miou": 0.0, "macc": 0.0, "pixel_accuracy": 0.0}
