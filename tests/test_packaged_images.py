"""Images that installed packages ship are read as Pillow, tifffile and numpy read them, or refused in one sentence."""

import importlib
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps

from idmm.data.formats import SUFFIXES, BadImage
from idmm.data.images import read_image

LEAST = {"matplotlib": 20, "scipy": 20, "skimage": 20, "sklearn": 2, "numpy": 2, "sphinx": 15}  # images of each
SECONDS = 5


def images(package):
    root = Path(importlib.import_module(package).__file__).parent
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)


def by_others(path):
    """Returns an image as Pillow, tifffile or numpy reads it, on white, [H, W, 3]; None: they cannot."""
    if path.suffix in (".npy", ".npz"):
        array = np.load(path)
        array = array if path.suffix == ".npy" else array[array.files[0]]
    elif path.suffix in (".tif", ".tiff"):
        array = tifffile.imread(path)
    else:
        with Image.open(path) as image:
            made = ImageOps.exif_transpose(image)
        if made.has_transparency_data:
            rgba = made.convert("RGBA")
            white = Image.new("RGBA", made.size, "white")
            made = Image.alpha_composite(white, rgba) if rgba.getextrema()[3][1] else rgba
        array = np.asarray(made if made.mode.startswith("I") else made.convert("RGB"))
    return np.repeat(array[:, :, None], 3, axis=2) if array.ndim == 2 else array


@pytest.mark.parametrize("package", LEAST)
def test_images_of_packages(package):
    read = 0
    for path in images(package):
        started = time.process_time()
        try:
            pixels = read_image(path, 10**8).pixels
        except BadImage as error:
            assert path.suffix in (".npy", ".npz", ".tif") and "\n" not in error.reason, (path, error.reason)
            read += 1
            continue
        finally:
            assert time.process_time() - started < SECONDS, path
        with warnings.catch_warnings(action="ignore"):
            expected = by_others(path)
        scale = 257 if pixels.dtype == np.uint16 and expected.dtype == np.uint8 else 1  # Pillow cuts colours to 8 bits
        assert pixels.shape == expected.shape, path
        assert np.abs(pixels / scale - expected).max() <= (scale > 1), path
        read += 1
    assert read >= LEAST[package]
