"""Any image made visible: its first channels as red, green and blue."""

import numpy as np

_ENDS = (1, 99)  # percentiles of a channel that black and full colour stand for


def composite(image: np.ndarray) -> np.ndarray:
    """Returns a picture of an image, for people alone: three channels as colours, two as red and green, one as grey.

    8-bit RGB and grey are shown as they are. All else is stretched, each channel between its 1st and 99th percentile.

    Args:
        image: [H, W, C], uint8, uint16 or floats.

    Returns:
        uint8 [H, W, 3]
    """
    seen = image[..., :3]  # [H, W, n]
    if image.dtype != np.uint8 or image.shape[2] not in (1, 3):
        low, high = np.percentile(seen, _ENDS, axis=(0, 1))  # [n]
        factor = 255 / np.where(high > low, high - low, np.inf)  # what is the same everywhere is black
        seen = np.clip(np.rint((seen - low) * factor), 0, 255).astype(np.uint8)  # [H, W, n]
    if seen.shape[2] == 2:
        return np.dstack([seen, np.zeros_like(seen[..., :1])])
    return np.ascontiguousarray(seen) if seen.shape[2] == 3 else np.repeat(seen, 3, axis=2)


def picture(store, i: int) -> np.ndarray:
    """Returns a picture of image ``i`` of an :class:`idmm.data.cache.ImageStore`, uint8 [H, W, 3]."""
    return composite(store.image(i).permute(1, 2, 0).numpy())
