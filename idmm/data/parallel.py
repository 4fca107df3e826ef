"""A function of images on several threads, with the results in order."""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
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
    places: Sequence[str],
    label: str | None,
    ahead: int = 0,
) -> Generator[Result | BadImage, None, None]:
    """Yield ``work(i)`` for each image in order, or the BadImage that it raised.

    Threads work on a few images ahead of the caller, so memory stays bounded. Pillow decodes
    without Python's lock.

    Args:
        places: Path of each image for messages.
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
            raise RunError(f"out of memory while decoding '{places[i]}'") from error

    threads = cores()
    waiting: deque[Future[Result | BadImage]] = deque()
    bar = Bar(
        total=len(places),
        desc=label,
        unit="img",
        delay=1,
        disable=label is None or distributed.rank() > 0,
    )
    with bar, ThreadPoolExecutor(threads) as pool:
        try:
            for i in range(len(places)):
                waiting.append(pool.submit(attempt, i))
                if len(waiting) == 4 * threads + ahead:
                    yield waiting.popleft().result()
                    bar.update()
            while waiting:
                yield waiting.popleft().result()
                bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the queue
