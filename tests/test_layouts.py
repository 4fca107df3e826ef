"""Every dataset opens from its official layout with the right images, labels and names, in the order of the lists."""

import os
import re

import numpy as np
import official_trees
import pytest
from official_trees import BUILD, CMC, IMAGES, opened, resize

from idmm.data.images import read_image
from idmm.data.registry import DATASETS

pytestmark = pytest.mark.usefixtures("any_checksum")


def is_as(split, images, classes):
    assert split.labels.dtype == np.int64
    assert list(zip(split.names, split.labels.tolist(), strict=True)) == list(images.items())
    if isinstance(classes, dict):
        assert len(split.classes) == 102 and {i: split.classes[i] for i in classes} == classes
    else:
        assert split.classes == classes


@pytest.mark.parametrize("name", [name for name, spec in DATASETS.items() if not spec.embedded])
def test_opens_from_its_official_layout(name, tmp_path, monkeypatch):
    train, test, classes = IMAGES[name]
    base = BUILD[name](tmp_path)
    count = {"flowers": 102, "folder": None}.get(name, len(classes))
    resize(monkeypatch, name, len(train), len(test), count)
    splits = opened(name, tmp_path)
    is_as(splits.train, train, classes)
    is_as(splits.test, test, classes)
    assert splits.val is None
    for split in (splits.train, splits.test):
        if isinstance(split.items, list):
            assert split.items == [os.path.join(base, *name.split("/")) for name in split.names]
            assert all(read_image(item, 10**6).pixels.shape == (9, 12, 3) for item in split.items)
        else:
            np.testing.assert_array_equal(split.items, official_trees.squares(50 * (split is splits.test), len(split)))
            assert split.items.dtype == np.uint8


def test_all_datasets_are_covered():
    assert {*IMAGES, "digits"} == set(DATASETS)
    assert len(set(CMC)) == 100 and all(re.fullmatch(r"n\d{8}", wnid) for wnid in CMC)


ODD = "real/axe/eine Axt, größer (1).jpg"


def test_a_list_that_was_edited_elsewhere(tmp_path, monkeypatch):
    """A byte order mark, blank lines, Windows' line ends, spaces and other alphabets in names."""
    train, test, classes = IMAGES["domainnet-real"]
    resize(monkeypatch, "domainnet-real", len(train) + 1, len(test), len(classes))
    base = BUILD["domainnet-real"](tmp_path)
    official_trees.images(base, [ODD])
    path = base / "real_train.txt"
    path.write_bytes(b"\xef\xbb\xbf" + f"{path.read_text()}\n{ODD} 2\n".replace("\n", " \r\n").encode())
    is_as(opened("domainnet-real", tmp_path).train, {**train, ODD: 2}, classes)
