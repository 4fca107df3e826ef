"""All images of a split side by side, and the range of values that 0 and 1 stand for where they have more than 8 bits.

Pictures have one range for all, bands one for each channel. It goes from the smallest to the largest value of all
training images, each without its 1 in 10,000 most extreme pixels at either end. So hot and dead pixels of a sensor do
not set it, but whatever covers more of a single image than that does: small bright objects are kept, which percentiles
over all pixels would clip. It depends on no order and on no sample, hence not on the number of threads or processes.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from idmm.data.cores import cores
from idmm.data.images import AUTO, FULL, BadImage, Bands, Depth, Scale, ScaleUnknown, depth, header
from idmm.data.raw import quiet_readers
from idmm.data.split import Split, counted
from idmm.errors import RunError, listed
from idmm.progress import Bar

Result = TypeVar("Result")
FILLED, FAR, LEVELS = 0.002, 1 / 4, 16  # of a no-data value, see no_data
NARROW = 1 / 8  # share of the range that a typical image spans, under which that is remarked on


def tidy(scale: Scale | list) -> Scale:
    """Returns a range, or those of channels, in one form, whole numbers as such; words as they are."""
    if isinstance(scale, str):
        return scale
    if isinstance(scale[0], (list, tuple)):
        return tuple(tidy(pair) for pair in scale)
    return tuple(int(value) if float(value).is_integer() else float(value) for value in scale)


def ends_of(depths: list[Depth], bands: Bands | None) -> np.ndarray:
    """Returns smallest and largest values of images, [N, 2] of pictures and [N, C, 2] of bands; NaN for 8 bits."""
    shape = (2,) if bands is None else (bands.used or 0, 2)
    ends = np.full((len(depths), *shape), np.nan)
    for row, found in zip(ends, depths, strict=True):
        if found.ends:
            row[:] = found.ends[0] if bands is None else found.ends
    return ends


def no_data(depths: list[Depth], bands: Bands | None) -> str | None:
    """Says which values look like marks of pixels without data, and what range leaves them out; None: there are none.

    Such a value is an end of the range, fills at least :data:`FILLED` of the pixels of the images that have it, and is
    as far from all other values as :data:`FAR` of what these span or more. The others are at least :data:`LEVELS`, lest
    masks have some. So neither black nor saturated pixels are meant, next to which there are others.
    """
    depths = [found for found in depths if found.ends]
    if not depths:
        return None
    ends, edges = np.array([found.ends for found in depths]), np.array([found.edges for found in depths])  # [N, C, ...]
    ranges = np.stack([ends[..., 0].min(axis=0), ends[..., 1].max(axis=0)], axis=1)  # [C, 2]
    values, channels, images, share = [], set(), np.zeros(len(depths), dtype=bool), 0.0
    for side, sign in ((0, 1), (1, -1)):
        at = ends[..., side] == ranges[:, side]  # [N, C]
        filled = np.where(at, edges[..., 2 * side], 0).sum(axis=0) / at.sum(axis=0)  # [C]
        nearest = np.where(at, edges[..., 2 * side + 1], ends[..., side])
        nearest = sign * (sign * nearest).min(axis=0)  # [C]
        span, gap = sign * (ranges[:, 1 - side] - nearest), sign * (nearest - ranges[:, side])
        marks = (filled >= FILLED) & (span > 0) & (gap >= FAR * span) & (edges[..., 4].max(axis=0) >= LEVELS)
        for c in np.flatnonzero(marks).tolist():
            values.append(_shown(ranges[c, side]))
            channels.add((bands and bands.chosen or range(len(ranges)))[c])
            images |= at[:, c]
            share = max(share, filled[c])
            ranges[c, side] = nearest[c]
    if not values:
        return None
    some = len(channels) < len(ranges)
    where = "" if bands is None else f" in channel {listed(map(str, sorted(channels)))}" if some else " in each channel"
    pixels = f"on {100 * share:.2g} % of the pixels of {counted(int(images.sum()), 'image')}"
    pairs = [f"[{', '.join(map(_shown, pair))}]" for pair in ranges]
    better = pairs[0] if bands is None else f"[{', '.join(pairs)}]"
    which = f"{listed(dict.fromkeys(values))}{where}, {pixels} and far from all other values,"
    return f"{which} looks like a no-data value: --data.range '{better}'"


def is_deep(extremes: np.ndarray) -> np.ndarray:
    """Returns which images have more than 8 bits, bool [N], by what :func:`ends_of` returns."""
    return ~np.isnan(extremes.reshape(len(extremes), -1)[:, :1]).any(axis=1) if extremes.size else np.zeros(0, bool)


def range_of(extremes: np.ndarray) -> Scale | None:
    """Returns the range that the smallest and largest values of images [N, 2] span, or those of channels [N, C, 2]; NaN
    stands for 8 bits.

    FULL where pictures have one value only, None where no image is deep.
    """
    ends = extremes[is_deep(extremes)]
    if not len(ends):
        return None
    low, high = ends[..., 0].min(axis=0), ends[..., 1].max(axis=0)  # [] or [C]
    if ends.ndim == 3:
        return tidy(np.stack([low, high], axis=1).tolist())
    return tidy((low, high)) if low < high else FULL


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
        except ScaleUnknown:
            return None

    with closing(in_order(attempt, len(split), split.place, label, progress)) as results:
        for i, result in enumerate(results):
            if result is None:  # begun before the range was known
                scale = _measured(split, bands, max_pixels, progress) if scale == AUTO else scale
                result = _outcome(attempt, split.place, i)
            yield result


def _measured(split: Split, bands: Bands | None, max_pixels: int, progress: bool) -> Scale:
    given = (len(split), split.place, "measuring values", progress)
    looks = in_order(lambda i: depth(split.items[i], max_pixels, bands), *given)
    return range_of(ends_of([look for look in looks if not isinstance(look, BadImage)], bands)) or FULL


def common_channels(split: Split, max_pixels: int, progress: bool) -> int | None:
    """Returns how many channels most files of a split have, by their headers; None: none can be read."""
    given = (len(split), split.place, "reading headers", progress)
    counts = in_order(lambda i: header(split.items[i], max_pixels).channels, *given)
    found = Counter(count for count in counts if not isinstance(count, BadImage)).most_common(1)
    return found[0][0] if found else None


def in_order(
    work: Callable[[int], Result], count: int, place: Callable[[int], str], label: str, progress: bool, ahead: int = 0
) -> Iterator[Result | BadImage]:
    """Yields ``work(i)`` for each of ``count`` images in order, or the BadImage that it raised.

    Threads work on a few images at a time, so that memory stays bounded, and go on while the caller does something
    else. Threads, not processes, as Pillow decodes without Python's lock. With ``progress`` a bar is shown if this
    takes longer than a second.

    Args:
        work: What is done with image ``i``.
        count: Images.
        place: Says where image ``i`` is, for people.
        label: Of the bar.
        progress: Whether there is one.
        ahead: Results that may wait for the caller, beside four for each thread.

    Raises:
        RunError: An image does not fit into memory.
    """
    threads = cores()
    waiting = deque()
    bar = Bar(total=count, desc=label, unit="img", delay=1, disable=not progress)
    with quiet_readers(), bar, ThreadPoolExecutor(threads) as pool:
        try:
            for i in range(count):
                waiting.append(pool.submit(_outcome, work, place, i))
                while waiting and (len(waiting) >= 4 * threads + ahead or i == count - 1):
                    yield waiting.popleft().result()
                    bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the queue


def _outcome(work: Callable[[int], Result], place: Callable[[int], str], i: int) -> Result | BadImage:
    """Returns ``work(i)``, or the BadImage that it raised; RunError: memory runs out."""
    try:
        return work(i)
    except BadImage as error:
        return error
    except MemoryError as error:
        why = f"out of memory while decoding '{place(i)}'; a lower data.max_pixels refuses it"
        raise RunError(why) from error


def described(
    part: str,
    names: list[str],
    kinds: np.ndarray,
    extremes: np.ndarray,
    scale: Scale | None,
    origin: str,
    bands: Bands | None = None,
) -> tuple[list[str], list[str]]:
    """Says what images of more than 8 bits there are, and what becomes of them; then what of that is worth a warning.

    Args:
        part: The split's name.
        names: Of its images.
        kinds: Of each image, empty for 8 bits; text [N].
        extremes: Its smallest and largest value, NaN where it has 8 bits; [N, 2], of bands [N, C, 2].
        scale: What they are scaled by; None: all have 8 bits.
        origin: Where that comes from.
        bands: Which channels are used; None: pictures.
    """
    numbers = [f"{number}: " for number in (bands and bands.chosen) or ()]
    lines, warnings = [], []
    for kind in np.unique(kinds[kinds != ""]).tolist():
        of = np.flatnonzero(kinds == kind)
        ends = extremes[of].reshape(len(of), -1, 2)  # [n, C, 2], of pictures [n, 1, 2]
        text = f"{len(of):,} of {counted(len(kinds), f'{part} image')} {'is' if len(of) == 1 else 'are'} {kind}"
        spans = np.stack([ends[..., 0].min(axis=0), ends[..., 1].max(axis=0)], axis=1)  # [C, 2]
        values = f"values {', '.join(f'{_shown(low)} to {_shown(high)}' for low, high in spans)}"
        bits = int(found[1]) if (found := re.match(r"(\d+)-bit", kind)) else 64
        top = 2**bits - 1 if bits <= 16 else None  # of FULL, where it is no image's own
        if scale == FULL and top is None:
            lines.append(f"{text}; {values}; each is scaled by a range of its own, in 65,536 levels ({origin})")
            continue
        ranges = np.array((0, top) if scale == FULL else scale, dtype=np.float64).reshape(-1, 2)  # [1 or C, 2]
        whole = top is not None and (ranges[:, 1] - ranges[:, 0]).max() <= 65535
        kept = "as 16 bits" if whole else "in 65,536 levels"
        pairs = [f"[{_shown(low)}, {_shown(high)}]" for low, high in ranges]
        each = ", ".join(f"{number}{pair}" for number, pair in zip_longest(numbers, pairs, fillvalue=""))
        if len(ranges) > 1:
            each = f"of its channels {each}"
            values = "" if np.array_equal(ranges, spans) else f" {values};"
        else:
            values = f" {values};"
        lines.append(f"{text};{values} {each} becomes 0 to 1, kept {kept} ({origin})")
        warnings += _narrow(text, ends, ranges, [names[i] for i in of]) if extremes.ndim == 2 else []
    if lines and (others := int((kinds == "").sum())):
        lines.append(f"the other {counted(others, f'{part} image')} of 8 bits stay as they are")
    return lines, warnings


def _narrow(text: str, ends: np.ndarray, ranges: np.ndarray, names: list[str]) -> list[str]:
    """Says so where most pictures span little of the range."""
    ends, (low, high) = ends[:, 0], ranges[0]  # [n, 2]
    share = np.median(np.clip(ends[:, 1], low, high) - np.clip(ends[:, 0], low, high)) / max(high - low, 1e-300)
    if share >= NARROW:
        return []
    why = f"half of them span {100 * share:.2g} % of that range or less"
    if high == ends[:, 1].max():
        why += f", as '{names[ends[:, 1].argmax()]}' goes up to {_shown(high)}"
    better = ", ".join(map(_shown, np.median(ends, axis=0)))
    return [f"{text}: {why}; --data.range '[{better}]' would suit a typical one"]


def _shown(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
