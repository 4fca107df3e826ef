"""Images worked on side by side by threads, their results in order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from idmm.data.cores import cores
from idmm.data.formats import BadImage
from idmm.errors import RunError
from idmm.progress import Bar

Result = TypeVar("Result")


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
        place: Returns where image ``i`` is, for people.
        label: Of the bar.
        progress: Whether there is one.
        ahead: Results that may wait for the caller, beside four for each thread.

    Raises:
        RunError: An image does not fit into memory.
    """

    def attempt(i: int) -> Result | BadImage:
        try:
            return work(i)
        except BadImage as error:
            return error
        except MemoryError as error:
            why = f"out of memory while decoding '{place(i)}'; a lower data.max_pixels refuses it"
            raise RunError(why) from error

    threads = cores()
    waiting = deque()
    bar = Bar(total=count, desc=label, unit="img", delay=1, disable=not progress)
    with bar, ThreadPoolExecutor(threads) as pool:
        try:
            for i in range(count):
                waiting.append(pool.submit(attempt, i))
                while waiting and (len(waiting) >= 4 * threads + ahead or i == count - 1):
                    yield waiting.popleft().result()
                    bar.update()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for the queue
