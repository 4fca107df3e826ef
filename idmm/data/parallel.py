"""Work on many images at once, in order, with a bar."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from idmm.data.images import quiet_pillow
from idmm.progress import Bar

Result = TypeVar("Result")


def in_order(work: Callable[[int], Result], count: int, label: str, progress: bool) -> Iterator[Result]:
    """Yields ``work(i)`` for i from 0 to ``count``; a few are under way at a time, so that memory stays bounded.

    Threads, not processes: Pillow decodes without Python's lock.

    Args:
        work: Called in threads; what it raises is raised here.
        count: How many.
        label: Of the bar.
        progress: Show a bar on standard error if this takes longer than a second.
    """
    threads = os.cpu_count() or 1
    waiting = deque()
    bar = Bar(total=count, desc=label, unit="img", delay=1, disable=not progress)
    with quiet_pillow(), bar, ThreadPoolExecutor(threads) as pool:
        try:
            for i in range(count):
                waiting.append(pool.submit(work, i))
                if len(waiting) >= 4 * threads:
                    yield waiting.popleft().result()
                    bar.update()
            while waiting:
                yield waiting.popleft().result()
                bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the queue
