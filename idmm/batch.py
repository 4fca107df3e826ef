"""The type of a batch, which loaders make and methods take."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:  # help texts need neither
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class Batch(TypedDict, total=False):
    """Some images with what is known of them. A batch has the keys that its method needs."""

    images: "Tensor"  # float [B, C, S, S]
    views: "list[Tensor]"  # the crops of each group, float [B, count, C, S, S]
    index: "Tensor"  # numbers of the images, int64 [B]
    label: "Tensor"  # classes, -1 for none, int64 [B]
    boxes: "Tensor"  # corners of boxes (pixels), float [B, n, 4]. n is the most of an image
    labels: "Tensor"  # classes of boxes, -1 for none, int64 [B, n]
    masks: "Tensor"  # outlines of boxes, uint8 [B, n, H, W]
    mask: "Tensor"  # class of each pixel, int64 [B, H, W]
    weight: float  # factor of the mean loss, see :class:`idmm.data.loaders.Request`
    failed: str  # why a worker could not make the batch


BatchFn = Callable[[int, "NDArray[np.int64]"], Batch]  # (epoch, image numbers [B]) -> a batch
