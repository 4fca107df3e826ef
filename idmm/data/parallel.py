"""A function of images on several threads, with the results in order."""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from idmm.data.formats import BadImage, large_one_by_one
from idmm.errors import RunError
from idmm.progress import Bar

Result = TypeVar("Result")


def cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parallel_map(
    work: Callable[[int], Result],
    count: int,
    place: Callable[[int], str],
    label: str | None,
    ahead: int = 0,
) -> Generator[Result | BadImage, None, None]:
    """Yield ``work(i)`` for each of ``count`` images in order, or the BadImage that it raised.

    Threads work on a few images ahead of the caller, so memory stays bounded. Pillow decodes
    without Python's lock.

    Args:
        place: Returns the path of image ``i`` for messages.
        label: Of the progress bar, which the first process shows after a second. None: no bar.
        ahead: Results that may wait for the caller, in addition to four per thread.

    Raises:
        RunError: An image does not fit into memory.
    """
    from idmm import distributed  # torch, which lists of images do not need

    def attempt(i: int) -> Result | BadImage:
        try:
            with large_one_by_one():
                return work(i)
        except BadImage as error:
            return error
        except MemoryError as error:
            raise RunError(f"out of memory while decoding '{place(i)}'") from error

    threads = cores()
    waiting: deque[Future[Result | BadImage]] = deque()
    bar = Bar(
        total=count,
        desc=label,
        unit="img",
        delay=1,
        disable=label is None or distributed.rank() > 0,
    )
    with bar, ThreadPoolExecutor(threads) as pool:
        try:
            for i in range(count):
                waiting.append(pool.submit(attempt, i))
                if len(waiting) == 4 * threads + ahead:
                    yield waiting.popleft().result()
                    bar.update()
            while waiting:
                yield waiting.popleft().result()
                bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the queue
