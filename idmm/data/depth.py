"""All images of a split side by side, and the one range of grey deeper than 8 bits that 0 to 255 stand for.

The range goes from the smallest to the largest value of all training images, each without its 1 in 10,000 most extreme
pixels at either end. So hot and dead pixels of a sensor do not set it, but whatever covers more of a single image than
that does: small bright objects are kept, which percentiles over all pixels would clip. It depends on no order and on no
sample, hence not on the number of threads or processes.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

import numpy as np

from idmm.data.images import AUTO, FULL, BadImage, Scale, ScaleUnknown, depth, quiet_pillow
from idmm.data.split import Split, counted
from idmm.errors import RunError
from idmm.progress import Bar

Result = TypeVar("Result")
FEW = 32  # grey levels of a typical image from which on they are not remarked on
_CEILINGS = {"16-bit grey": 65535.0, "12-bit grey": 4095.0}  # of FULL, where it is no image's own


def tidy(scale: Scale | list[float]) -> Scale:
    """Returns a range in one form, whole numbers as such; words as they are."""
    if isinstance(scale, str):
        return scale
    return tuple(int(value) if float(value).is_integer() else float(value) for value in scale)


def range_of(extremes: np.ndarray) -> Scale | None:
    """Returns the range that the smallest and largest values of images [N, 2] span; NaN stands for no deep grey.

    FULL where there is one value only, None where no image is deep grey.
    """
    ends = extremes[~np.isnan(extremes[:, 0])]
    if not len(ends):
        return None
    low, high = ends[:, 0].min(), ends[:, 1].max()
    return tidy((low, high)) if low < high else FULL


def each_scaled(
    work: Callable[[int, Scale], Result], split: Split, scale: Scale, max_pixels: int, label: str, progress: bool
) -> Iterator[Result | BadImage]:
    """Yields ``work(i, scale)`` of each image of a split in order, or the BadImage that it raised, with AUTO resolved.

    The range is measured from ``split`` when its first deep grey image turns up, so that others cost nothing. With
    ``progress`` a bar is shown on standard error.

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
                scale = _measured(split, max_pixels, progress) if scale == AUTO else scale
                result = _outcome(attempt, split.place, i)
            yield result


def _measured(split: Split, max_pixels: int, progress: bool) -> Scale:
    given = (len(split), split.place, "measuring grey values", progress)
    looks = in_order(lambda i: depth(split.items[i], max_pixels), *given)
    ends = [look[1:] for look in looks if not isinstance(look, BadImage)]
    return range_of(np.array(ends)) or FULL


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
    threads = os.cpu_count() or 1
    waiting = deque()
    bar = Bar(total=count, desc=label, unit="img", delay=1, disable=not progress)
    with quiet_pillow(), bar, ThreadPoolExecutor(threads) as pool:
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
    part: str, names: list[str], kinds: np.ndarray, extremes: np.ndarray, scale: Scale | None, origin: str
) -> tuple[list[str], list[str]]:
    """Says what images of more than 8 bits there are, and what becomes of them; then what of that is worth a warning.

    Args:
        part: The split's name.
        names: Of its images.
        kinds: Of each image, empty for 8 bits; text [N].
        extremes: Its smallest and largest value, NaN where it is not deep grey; [N, 2].
        scale: What they are scaled by; None: there is no deep grey.
        origin: Where that comes from.
    """
    lines, warnings = [], []
    for kind in np.unique(kinds[kinds != ""]).tolist():
        ends = extremes[kinds == kind]  # [n, 2]
        text = f"{len(ends):,} of {counted(len(kinds), f'{part} image')} {'is' if len(ends) == 1 else 'are'} {kind}"
        if np.isnan(ends).any():
            lines.append(f"{text}: only the upper 8 bits of each sample are read")
            continue
        values = f"values {_shown(ends[:, 0].min())} to {_shown(ends[:, 1].max())}"
        low, high = (0, _CEILINGS.get(kind)) if scale == FULL else scale
        if high is None:
            lines.append(f"{text}; {values}; each is scaled by a range of its own ({origin})")
            continue
        lines.append(f"{text}; {values}; [{_shown(low)}, {_shown(high)}] becomes 0 to 255 ({origin})")
        spread = np.median(np.clip(ends[:, 1], low, high) - np.clip(ends[:, 0], low, high))
        if (levels := spread / max(high - low, 1e-300) * 255 + 1) < FEW:
            better = ", ".join(map(_shown, np.median(ends, axis=0)))
            why = f"half of them use {levels:.0f} of 256 grey levels or fewer"
            if high == ends[:, 1].max():
                why += f", as '{names[np.flatnonzero(kinds == kind)[ends[:, 1].argmax()]]}' goes up to {_shown(high)}"
            warnings.append(f"{text}: {why}; --data.range '[{better}]' would suit a typical one")
    if lines and (others := int((kinds == "").sum())):
        lines.append(f"the other {counted(others, f'{part} image')} of 8 bits stay as they are")
    return lines, warnings


def _shown(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"
