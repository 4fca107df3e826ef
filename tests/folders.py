"""Folders of random images for tests, and what is kept of them in a cache beside them."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import VIT, inside, read
from PIL import Image
from sklearn.datasets import load_sample_image

from idmm import config
from idmm.data import images
from idmm.data.fingerprint import fingerprint
from idmm.data.image_store import store_split
from idmm.data.listing import list_images
from idmm.errors import UserError

TINY = {  # flags of runs on such folders
    "data__name": "folder",
    "data__subset": None,
    "model__kwargs": VIT,
    "train__epochs": 1,
    "train__warmup_epochs": 0,
    "train__ema": None,
    "train__batch_size": 8,
}
# what to do about images that cannot be used
HOW = (
    "('idmm data check --root DIR --out runs/check' writes a file for --data.exclude "
    "that leaves them out)"
)


def tuned(out, root, **changes):
    """Runs fine-tuning of a tiny network; returns the exit code."""
    settings = {
        **TINY,
        "stages": [{"size": 16}],
        "data__root": root,
        **changes,
    }
    return inside("finetune", out, **settings)


def tuned_ok(out, root, **changes):
    assert tuned(out, root, **changes) == 0


def result(out):
    return read(out / "result.json")


def paint(path, seed=0, size=(12, 9)):
    """Writes an image of random pixels; its size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def tree(root, **splits):
    """Makes ROOT/SPLIT/CLASS/*.png: tree(root, train={"cat": 3})."""
    for split, classes in splits.items():
        for name, count in classes.items():
            for i in range(count):
                seed = zlib.crc32(f"{split}/{name}/{i}".encode())
                paint(root / split / name / f"{i}.png", seed)
    return root


def tiles(folder, numbers, across, down, side):
    """Cuts numbered squares out of the photograph of a folder's name, five or six in a row."""
    photo = Image.fromarray(load_sample_image(f"{folder.name}.jpg"))
    folder.mkdir(parents=True)
    columns = (photo.width - side) // across + 1
    for i in numbers:
        left = across * (i % columns)
        top = down * (i // columns)
        photo.crop((left, top, left + side, top + side)).save(folder / f"{i:02d}.png")


def section(root=None, name="folder", **fields):
    return config.Data(name=name, root=None if root is None else str(root), **fields)


def faults(call, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return list(str(caught.value).splitlines())


def opened(root, bound=None, part="train", keep="auto", labelled=False, **fields):
    """A part's store; the cache lies beside the images' folder."""
    data = section(root, cache=keep, cache_dir=str(Path(root).parent / "cache"), **fields)
    split = list_images(data, labelled).parts[part]
    return store_split(split, stored_size=bound, data=data, part=part)


def same(a, b):
    """Whether two stores hold the same images."""
    np.testing.assert_array_equal(a.sizes, b.sizes)
    assert json.dumps(fingerprint(a, a.digests)) == json.dumps(fingerprint(b, b.digests))
    assert a.names == b.names
    assert (a.labels is b.labels is None) or a.labels.tolist() == b.labels.tolist()
    return len(a) == len(b) and all(torch.equal(a.image(i), b.image(i)) for i in range(len(a)))


def sums(store):
    return [int(store.image(i).sum()) for i in range(len(store))]


def entry_of(root):
    """The only entry of the cache beside a folder."""
    (entry,) = (path for path in (root.parent / "cache").iterdir() if path.is_dir())
    return entry


@pytest.fixture
def decoded(monkeypatch):
    """A list that grows by what is decoded."""
    seen = []
    load = images.read_image

    def read_image(item, *rest, **named):
        seen.append(item)
        return load(item, *rest, **named)

    monkeypatch.setattr(images, "read_image", read_image)
    return seen
