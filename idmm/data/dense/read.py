"""From the ``data`` section of a config to images with boxes or masks, checked."""

from idmm import config
from idmm.data.dense.targets import DenseSplits


def read_detection(data: config.Data) -> DenseSplits:
    """Reads a folder in COCO's layout."""
    raise NotImplementedError


def read_segmentation(data: config.Data) -> DenseSplits:
    """Reads a folder of images and masks, or one in ADE20K's layout."""
    raise NotImplementedError
