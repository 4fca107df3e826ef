"""The range of values that 0 and 1 stand for in images of more than 8 bits, measured over all training images."""

from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from idmm.data.formats import BadImage, Range, RangeUnknown
from idmm.data.images import AUTO, Bands, Scale, read_image
from idmm.data.parallel import Result, in_order
from idmm.data.split import Split, counted


def tidy(scale: Scale | list) -> Scale:
    """Returns a range, or those of channels, in one form, whole numbers as such; AUTO and None as they are."""
    if scale is None or isinstance(scale, str):
        return scale
    if isinstance(scale[0], (list, tuple)):
        return tuple(tidy(pair) for pair in scale)
    return tuple(int(value) if float(value).is_integer() else float(value) for value in scale)


def ends_of(ends: list[tuple[Range, ...]], bands: Bands | None) -> np.ndarray:
    """Returns smallest and largest values of images, [N, 2] of pictures and [N, C, 2] of bands; NaN for 8 bits."""
    shape = (2,) if bands is None else (bands.used or 0, 2)
    rows = [(pairs[0] if bands is None else pairs) if pairs else np.full(shape, np.nan) for pairs in ends]
    return np.array(rows, dtype=np.float64).reshape(len(ends), *shape)


def is_deep(extremes: np.ndarray) -> np.ndarray:
    """Returns which images have more than 8 bits, bool [N], by what :func:`ends_of` returns."""
    return ~np.isnan(extremes.reshape(len(extremes), -1)[:, :1]).any(axis=1) if extremes.size else np.zeros(0, bool)


def range_of(extremes: np.ndarray) -> Scale:
    """Returns the range that the smallest and largest values of images [N, 2] span, or those of channels [N, C, 2]; NaN
    stands for 8 bits. None: no image is deep."""
    ends = extremes[is_deep(extremes)]
    if not len(ends):
        return None
    return tidy(np.stack([ends[..., 0].min(axis=0), ends[..., 1].max(axis=0)], axis=-1).tolist())


def each_scaled(
    work: Callable[[int, Scale], Result],
    split: Split,
    scale: Scale,
    bands: Bands | None,
    max_pixels: int,
    label: str,
    progress: bool,
) -> Iterator[Result | BadImage]:
    """Yields ``work(i, scale)`` of each image of a split in order, or the BadImage that it raised, with AUTO resolved.

    The range is measured from ``split`` when its first image of more than 8 bits turns up, so that others cost nothing.
    With ``progress`` a bar is shown on standard error.

    Raises:
        RunError: An image does not fit into memory.
    """

    def attempt(i: int) -> Result | None:
        try:
            return work(i, scale)
        except RangeUnknown:
            return None

    def ends(i: int) -> tuple[Range, ...]:
        return read_image(split.items[i], max_pixels, (0, 1), bands).ends

    with closing(in_order(attempt, len(split), split.place, label, progress)) as results:
        for i, result in enumerate(results):
            if result is None:  # begun before the range was known
                if scale == AUTO:
                    found = in_order(ends, len(split), split.place, "measuring values", progress)
                    scale = range_of(ends_of([pairs for pairs in found if not isinstance(pairs, BadImage)], bands))
                try:
                    result = attempt(i)
                except BadImage as error:
                    result = error
            yield result


def described(part: str, extremes: np.ndarray, scale: Scale, origin: str) -> str | None:
    """Returns a line on images of more than 8 bits and what becomes of them; None: there are none.

    Args:
        part: The split's name.
        extremes: Smallest and largest value of its images, NaN for 8 bits; [N, 2], of bands [N, C, 2].
        scale: Their range.
        origin: Where that comes from.
    """
    deep = int(is_deep(extremes).sum())
    if not deep:
        return None
    pairs = ", ".join(f"[{low:g}, {high:g}]" for low, high in np.reshape(scale, (-1, 2)).tolist())
    some = f"{deep:,} of {counted(len(extremes), f'{part} image')} {'has' if deep == 1 else 'have'} more than 8 bits"
    return f"{some}; their values {pairs} become 0 to 1 ({origin})"
