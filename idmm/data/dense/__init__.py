"""Images with boxes, instance masks or a class for each pixel: reading, checking, and making batches of them."""

from idmm.data.dense.read import read_detection, read_segmentation
from idmm.data.dense.targets import IGNORED, BoxTarget, DenseSplits, MaskTarget, Target
from idmm.data.dense.transforms import (
    DenseTransform,
    EvalDenseTransform,
    from_canvas,
    letterboxed,
    on_canvas,
    resized_to,
    short_side,
)

__all__ = [
    "IGNORED",
    "BoxTarget",
    "DenseSplits",
    "DenseTransform",
    "EvalDenseTransform",
    "MaskTarget",
    "Target",
    "from_canvas",
    "letterboxed",
    "on_canvas",
    "read_detection",
    "read_segmentation",
    "resized_to",
    "short_side",
]
