"""Real images that packages ship: photographs in tiles, and faces."""

import builtins

import numpy as np
import pytest

from idmm import config
from idmm.data.datasets import open_splits
from idmm.data.readers import pictures
from idmm.data.registry import DATASETS
from idmm.errors import UserError


@pytest.mark.parametrize(("name", "side"), [("photos", 32), ("faces", 25)])
def test_sizes_classes_and_balance(name, side):
    splits, spec = open_splits(config.Data(name=name), labelled=True), DATASETS[name]
    for split, size in ((splits.train, spec.train_size), (splits.test, spec.test_size)):
        assert split.items.shape == (size, side, side, 3) and split.items.dtype == np.uint8
        assert (np.bincount(split.labels) == size // spec.num_classes).all() and len(split.classes) == spec.num_classes
        assert len(set(split.names)) == size
    assert not set(splits.train.names) & set(splits.test.names)
    again = open_splits(config.Data(name=name), labelled=True)
    assert np.array_equal(again.train.items, splits.train.items)


def test_tiles_of_train_and_test_lie_apart(monkeypatch):
    """Pixels that say where they are: no column of a picture is in both splits."""
    places = np.arange(400, dtype=np.uint16)
    picture = np.zeros((320, 400, 3), np.uint8)
    picture[..., 0], picture[..., 1] = places % 256, places // 256
    monkeypatch.setattr(pictures, "_pictures", lambda: iter([("a", picture), ("b", picture)]))
    splits = pictures.read_photos(None, True)

    def columns(split):
        return set((split.items[..., 0] + 256 * split.items[..., 1].astype(int)).ravel().tolist())

    assert max(columns(splits.train)) < min(columns(splits.test))
    assert splits.train.labels.tolist() == [0] * 48 + [1] * 48 and splits.train.classes == ["a", "b"]


def test_faces_are_the_first_hundred():
    splits = pictures.read_faces(None, True)
    assert splits.train.labels.tolist() == [0] * 70 + [1] * 70 and splits.train.classes == ["face", "other"]
    from skimage.data import lfw_subset

    patches = np.rint(lfw_subset() * 255)
    assert np.array_equal(splits.train.items[70, :, :, 0], patches[100])
    assert np.array_equal(splits.test.items[0, :, :, 2], patches[70])


def test_without_scikit_image(monkeypatch):
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name.startswith("skimage"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(UserError, match="need scikit-image: pip install"):
        open_splits(config.Data(name="photos"), labelled=True)
