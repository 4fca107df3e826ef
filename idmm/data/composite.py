"""Any image made visible: which of its channels are red, green and blue, and between which values."""

from collections.abc import Sequence

import numpy as np

from idmm.data.images import Bands

_ENDS = (1, 99)  # percentiles of a channel that black and full colour stand for


def composite(image: np.ndarray, bands: Sequence[int] | None = None, ends: np.ndarray | None = None) -> np.ndarray:
    """Returns a picture of an image, for people alone.

    8-bit RGB and grey are shown as they are. All else is stretched, each channel between its 1st and 99th percentile,
    pixels at the low end of the range left out, as those without data are.

    Args:
        image: [H, W, C], uint8, uint16 or floats.
        bands: The channels that are red, green and blue (two: red and green; one: grey); None: the first three.
        ends: The values that are black and full colour, of each of them [n, 2] or of all [1, 2]; None: by
            :func:`ends_of`.

    Returns:
        uint8 [H, W, 3]
    """
    chosen = _chosen(image, bands)  # [H, W, n]
    low, high = (ends_of(image, bands) if ends is None else ends).T  # [n]
    seen = chosen
    if image.dtype != np.uint8 or low.any() or (high != 255).any():
        factor = 255 / np.where(high > low, high - low, np.inf)  # what is the same everywhere is black
        seen = np.clip(np.rint((chosen - low) * factor), 0, 255).astype(np.uint8)  # [H, W, n]
    if seen.shape[2] == 2:
        return np.dstack([seen, np.zeros_like(seen[..., :1])])
    return np.ascontiguousarray(seen) if seen.shape[2] == 3 else np.repeat(seen, 3, axis=2)


def ends_of(image: np.ndarray, bands: Sequence[int] | None = None) -> np.ndarray:
    """Returns the values of an image's shown channels that are black and full colour, float64 [n, 2]."""
    chosen = _chosen(image, bands)
    if image.dtype == np.uint8 and image.shape[2] in (1, 3):
        return np.array([[0.0, 255.0]] * chosen.shape[2])
    planes = [plane[plane > 0] if plane.any() else plane for plane in np.moveaxis(chosen, 2, 0)]
    return np.array([np.percentile(plane, _ENDS) for plane in planes])


def explained(bands: Bands | None, composite: Sequence[int] | None, deep: bool) -> str:
    """Says what of an image a picture shows; nothing of 8-bit RGB and grey as they are.

    Args:
        bands: Which channels are used; None: pictures.
        composite: Those of them that are shown; None: the first three.
        deep: Whether the images have more than 8 bits.
    """
    if bands is None:
        return "more than 8 bits, each image stretched" if deep else ""
    used = bands.chosen or range(bands.used)
    shown = [str(used[c]) for c in composite or range(min(3, len(used)))]
    colours = "grey" if len(shown) == 1 else ", ".join(("red", "green", "blue")[: len(shown)])
    stretched = ", each stretched" if deep or len(used) not in (1, 3) else ""
    return f"channel{'s' if len(shown) > 1 else ''} {', '.join(shown)} as {colours}{stretched}"


def shown_of(store) -> str:
    """:func:`explained` of an :class:`idmm.data.cache.ImageStore`."""
    return explained(store.bands, store.composite, store.scale is not None)


def picture(store, i: int) -> np.ndarray:
    """Returns a picture of image ``i`` of an :class:`idmm.data.cache.ImageStore`, uint8 [H, W, 3]."""
    return composite(store.image(i).permute(1, 2, 0).numpy(), store.composite)


def _chosen(image: np.ndarray, bands: Sequence[int] | None) -> np.ndarray:
    return image[..., :3] if bands is None else image[..., list(bands)]
