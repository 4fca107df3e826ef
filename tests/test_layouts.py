"""Every dataset opens from its official layout in the order of the lists. A line tells what is
wrong with it."""

import os

import numpy as np
import official_trees
import pytest
from folders import faults, paint, section
from official_trees import BUILD, IMAGES, advice, append, opened, resize

from idmm.data.images import read_image
from idmm.data.listing import list_images
from idmm.data.registry import DATASETS


def is_as(split, images, classes):
    assert split.labels.dtype == np.int64
    assert list(zip(split.names, split.labels.tolist(), strict=True)) == list(images.items())
    if isinstance(classes, dict):
        assert len(split.classes) == 102
        assert {i: split.classes[i] for i in classes} == classes
    else:
        assert split.classes == classes


@pytest.mark.usefixtures("any_checksum")
@pytest.mark.parametrize("name", [name for name, spec in DATASETS.items() if spec.layout])
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
            for item in split.items:
                assert read_image(item).pixels.shape == (9, 12, 3)
        else:
            np.testing.assert_array_equal(
                split.items, official_trees.squares(50 * (split is splits.test), len(split))
            )
            assert split.items.dtype == np.uint8


ODD = "real/axe/eine Axt, größer (1).jpg"


def test_a_list_that_was_edited_elsewhere(tmp_path, monkeypatch):
    """A byte order mark, blank lines, Windows' line ends, spaces and other alphabets in names."""
    train, test, classes = IMAGES["domainnet-real"]
    resize(monkeypatch, "domainnet-real", len(train) + 1, len(test), len(classes))
    base = BUILD["domainnet-real"](tmp_path)
    official_trees.images(base, [ODD])
    path = base / "real_train.txt"
    path.write_bytes(
        b"\xef\xbb\xbf" + f"{path.read_text()}\n{ODD} 2\n".replace("\n", " \r\n").encode()
    )
    is_as(opened("domainnet-real", tmp_path).train, {**train, ODD: 2}, classes)


def layout_faults(name, root):
    return faults(opened, name, root)


@pytest.mark.parametrize("name", ["flowers", "cars"])
def test_roots_that_are_none(name, tmp_path):
    expected = f"data.name '{name}' expects its folder ('idmm data info {name}' shows it)"
    assert layout_faults(name, None) == [f"data.root: missing, {expected}", advice(name, "DIR")]
    line = f"data.root: '{tmp_path / 'x'}' does not exist, expected the folder that holds {name}"
    assert layout_faults(name, tmp_path / "x") == [line, advice(name, tmp_path / "x")]


@pytest.mark.parametrize(
    "name, pattern",
    {"flowers": "flowers-102/setid.mat", "cub200": "CUB_200_2011/images/*/*.jpg"}.items(),
)
def test_what_a_folder_lacks_is_named(name, pattern, tmp_path):
    BUILD[name](tmp_path)
    [path.unlink() for path in list(tmp_path.glob(pattern))]
    line = (
        f"data.root: '{tmp_path}' lacks {pattern}. 'idmm data info {name}' shows the expected files"
    )
    assert layout_faults(name, tmp_path) == [line, advice(name, tmp_path)]


SPOILT = [  # dataset, what is done to the base, the line
    (
        "pets",
        lambda b: (b / "images/Abyssinian_201.jpg").unlink(),
        "'BASE' lacks 1 listed images: images/Abyssinian_201.jpg",
    ),
    (
        "indoor67",
        lambda b: append(b / "TestImages.txt", "\nImages/gameroom/1.jpg"),
        "'BASE' lacks 1 listed images: Images/Images/gameroom/1.jpg",
    ),
    (
        "cub200",
        lambda b: append(b / "images.txt", "6 x.jpg"),
        "a list in 'BASE/..' is damaged (KeyError: '6')",
    ),
    (
        "imagenet",
        lambda b: paint(b / "train/n00000001/1.JPEG"),
        "'BASE/val' lacks classes of 'BASE/train': n00000001",
    ),
]


@pytest.mark.parametrize(
    "name, spoil, text", SPOILT, ids=[f"{i}-{r[0]}" for i, r in enumerate(SPOILT)]
)
def test_what_is_wrong_is_named(name, spoil, text, tmp_path):
    base = BUILD[name](tmp_path)
    spoil(base)
    for labelled in (True, False):
        line, more = faults(list_images, section(tmp_path, name=name), labelled)
        line = line.replace(str(base), "BASE").replace(str(base.parent), "BASE/..")
        assert line.startswith(f"data.root: {text}")
        assert more == advice(name, tmp_path)


def test_sizes_other_than_the_protocols(tmp_path, monkeypatch):
    official_trees.dtd(tmp_path)
    resize(monkeypatch, "dtd", 7, 4, 47)
    for labelled in (True, False):
        assert faults(list_images, section(tmp_path, name="dtd"), labelled) == [
            "data.root: dtd: 6 training images, its protocol has 7",
            "data.root: dtd: 3 test images, its protocol has 4",
            "data.root: dtd: 3 classes, its protocol has 47",
        ]
