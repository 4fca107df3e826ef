"""Labels for images without one: the maths against a dense solution, and ``idmm train`` with few
labels."""

import numpy as np
import pytest
from helpers import as_flags, call_ok, read
from numpy.random import default_rng

from idmm.evaluation import similarity

pytestmark = pytest.mark.usefixtures("own_cache")


def test_spread_labels_as_the_papers_have_it():
    """(I - a S)^-1 Y of a dense graph written out, with columns and rows divided by their sums."""
    rng = default_rng(0)
    features = similarity.unit_rows(rng.normal(size=(30, 6)) + 4 * np.eye(6)[np.arange(30) % 3])
    labels = np.where(np.arange(30) < 7, np.arange(30) % 3, -1)  # 3, 2 and 2 labels
    near = similarity.nearest(features, 4)
    weight = np.zeros((30, 30))
    for i in range(30):
        for j in near.index[i]:
            weight[i, j] = max(features[i].astype(float) @ features[j].astype(float), 0) ** 3
    weight = weight + weight.T
    degree = weight.sum(axis=1)
    smooth = weight / np.sqrt(degree[:, None] * degree[None])
    shares = np.linalg.inv(np.eye(30) - 0.9 * smooth) @ np.array(
        [[label == c for c in range(3)] for label in labels]
    )
    shares = shares / shares.sum(axis=0)
    shares = shares / shares.sum(axis=1, keepdims=True)
    actual = similarity.spread_labels(near, labels, 3)
    np.testing.assert_allclose(actual, shares, atol=2e-5)
    assert (actual[7:].argmax(axis=1) == np.arange(7, 30) % 3).mean() > 0.8, "the groups are found"


def test_spread_labels_where_none_reaches():
    """Two groups that no edge joins, one of them without a label; a class without a label is
    nobody's."""
    features = np.repeat(np.eye(2, dtype=np.float32), 4, axis=0)
    labels = np.array([1, -1, -1, -1, -1, -1, -1, -1])
    actual = similarity.spread_labels(similarity.nearest(features, 3), labels, 3)
    np.testing.assert_allclose(actual[:4], np.tile([0.0, 1, 0], (4, 1)))
    assert not actual[4:].any()


def test_spread_labels_over_many_hops():
    """A chain of 400 rows with a label at either end: each half is of the nearer one, however
    little reaches it."""
    index = np.clip(np.stack([np.arange(400) - 1, np.arange(400) + 1], axis=1), 0, 399)
    index[0], index[-1] = 1, 398
    near = similarity.Neighbours(index, np.ones((400, 2), dtype=np.float32))
    labels = np.array([0, *[-1] * 398, 1])
    assert (
        similarity.spread_labels(near, labels, 2).argmax(axis=1).tolist() == [0] * 200 + [1] * 200
    )


def test_few_labels_gain_by_images_without_one(tmp_path, capsys):
    """Five labels per class of digits, which are the same ones."""
    top1 = {}
    for key in ("labelled", "subset"):
        out = tmp_path / key
        flags = {"data.name": "digits", f"data.{key}": "{per_class: 5}", "out": out}
        call_ok(["train", *as_flags(flags | {"minutes": 5, "device": "cpu"}, {})])
        result = read(out / "result.json")
        assert result["train_size"] == 50
        top1[key] = result["top1"]
    assert capsys.readouterr().err.count("1387 images without a label get a guessed one") == 1
    assert top1["labelled"] > top1["subset"] + 2
    assert top1["labelled"] > 94
