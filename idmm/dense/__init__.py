"""Images with boxes, instance masks or a class for each pixel: reading, checking, and making batches of them."""

from idmm.dense.read import read_detection, read_segmentation
from idmm.dense.targets import IGNORED, BoxTarget, DenseSplits, MaskTarget, Target
from idmm.dense.transforms import DenseTransform, letterboxed, on_canvas, resized_to

__all__ = [
    "IGNORED",
    "BoxTarget",
    "DenseSplits",
    "DenseTransform",
    "MaskTarget",
    "Target",
    "letterboxed",
    "on_canvas",
    "read_detection",
    "read_segmentation",
    "resized_to",
]
