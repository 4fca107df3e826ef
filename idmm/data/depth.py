"""The range of values that 0 and 1 stand for in images of more than 8 bits, measured over all training images."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing

import numpy as np

from idmm.data.formats import BadImage, Range, RangeUnknown
from idmm.data.images import AUTO, Bands, Scale, read_image
from idmm.data.parallel import Result, in_order
from idmm.data.split import Split


def tidy(scale: Scale | list) -> Scale:
    """Returns a range, or those of channels, in one form, whole numbers as such; AUTO and None as they are."""
    if scale is None or isinstance(scale, str):
        return scale
    if isinstance(scale[0], (list, tuple)):
        return tuple(tidy(pair) for pair in scale)
    return tuple(int(value) if float(value).is_integer() else float(value) for value in scale)


def range_of(ends: Iterable[tuple[Range, ...]], bands: Bands | None) -> Scale:
    """Returns the range that smallest and largest values of images span, of bands each channel's; None: no image has
    more than 8 bits."""
    deep = np.array([pairs for pairs in ends if pairs])  # [D, 1, 2], of bands [D, C, 2]
    if not len(deep):
        return None
    pairs = tidy(np.stack([deep[..., 0].min(axis=0), deep[..., 1].max(axis=0)], axis=-1).tolist())
    return pairs[0] if bands is None else pairs


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
                    scale = range_of([pairs for pairs in found if not isinstance(pairs, BadImage)], bands)
                try:
                    result = attempt(i)
                except BadImage as error:
                    result = error
            yield result
