"""Folders of random images for tests."""

import zlib

import numpy as np
import pytest
from PIL import Image

from idmm import config
from idmm.errors import UserError


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
                paint(root / split / name / f"{i}.png", seed=zlib.crc32(f"{split}/{name}/{i}".encode()))
    return root


def section(root=None, name="folder", **fields):
    return config.Data(name=name, root=None if root is None else str(root), **fields)


def faults(call, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return list(caught.value.faults)
