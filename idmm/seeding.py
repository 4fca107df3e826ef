"""Randomness as a function: every random choice derives from (seed, purpose, numbers).

No generator outlives its choice, so none has to be saved. Step 5,000 of a resumed run draws the
same numbers as without a stop, and the number of loader workers changes nothing.
"""

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """Return a 63-bit integer that depends only on the arguments."""
    text = "/".join([str(seed), purpose, *(str(int(n)) for n in numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Return a NumPy generator for one purpose. It is counter-based, so it is cheap."""
    return np.random.Generator(np.random.Philox(derive(seed, purpose, *numbers)))


def uniforms(key: int, rows: NDArray[np.integer[Any]], n: int) -> NDArray[np.float64]:
    """Return ``n`` numbers in [0, 1) per row number, independent of which other rows are drawn.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) as a hash of (key, row, column).

    Args:
        key: From :func:`derive`.
        rows: Integers >= 0, [R], e.g. the image indices of a batch.

    Returns:
        float64 [R, n].
    """
    state: Words = np.asarray(rows, dtype=np.uint64)[:, None]  # [R, 1]
    for word in (np.array([key], dtype=np.uint64), np.arange(n, dtype=np.uint64)):
        state = _mix(state ^ _mix(word))  # [R, 1], then [R, n]
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _mix(x: Words) -> Words:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # unsigned arrays wrap around at 2**64, as intended
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def reseed(key: int) -> None:
    """Seed the global generators of Python and NumPy, inside :func:`seeded` once more."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


@contextlib.contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch inside the block, then restore them.

    For library code that draws from global state (initialisers, dropout, augmentations of
    torchvision and timm). CUDA's generators are seeded but not restored. Each later use seeds them
    again.
    """
    import torch

    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    reseed(key)
    if torch.cuda.is_initialized() or torch.backends.mps.is_available():
        torch.manual_seed(key)
    else:  # manual_seed formats a stack trace per missing kind of device, half a millisecond
        torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
