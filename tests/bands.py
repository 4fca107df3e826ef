"""Folders of images of many channels and more than 8 bits, whose classes a channel tells apart."""

import numpy as np
import tifffile

CLASSES = ("crypts", "lumen", "stroma")
CHANNELS = 5


def bands(number, seed, shape=(24, 28), channels=CHANNELS):
    """An image of a class, uint16 [H, W, C] of values up to 4095, as sensors of 12 bits have them."""
    rng = np.random.default_rng([number, seed])
    image = rng.integers(100, 900, (*shape, channels))
    top, left = rng.integers(0, np.array(shape) // 2)
    image[top : top + shape[0] // 2, left : left + shape[1] // 2, number % channels] += 2500
    return (image * np.linspace(1, 0.4, channels)).astype(np.uint16)  # some channels are darker


def write(path, image):
    """Writes an image as a TIFF whose channels are pages or samples, by turns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if int(path.stem) % 2:
        tifffile.imwrite(path, np.moveaxis(image, 2, 0), photometric="minisblack")
    else:
        tifffile.imwrite(path, image, photometric="minisblack", planarconfig="contig")
    return path


def tree(root, train=8, test=5, **how):
    """Makes ROOT/SPLIT/CLASS/*.tif."""
    for split, first, count in (("train", 0, train), ("test", 1000, test)):
        for number, name in enumerate(CLASSES):
            for i in range(count):
                write(root / split / name / f"{i}.tif", bands(number, first + i, **how))
    return root
