"""Randomness as a function: every random choice derives from (seed, purpose, numbers).

No generator lives longer than the choice it makes, so none has to be saved: step 5,000 draws the same numbers in a
resumed run as in one that was never stopped, and the number of loader workers changes nothing.
"""

import contextlib
import hashlib
import random

import numpy as np


def derive(seed: int, purpose: str, *numbers: int) -> int:
    """Returns a 63-bit integer that depends on all arguments and nothing else."""
    text = "/".join([str(seed), purpose, *(str(int(n)) for n in numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def numpy_rng(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Returns a NumPy generator for one purpose; counter-based, so cheap to make."""
    return np.random.Generator(np.random.Philox(derive(seed, purpose, *numbers)))


def permutation(seed: int, purpose: str, n: int, *numbers: int) -> np.ndarray:
    """Returns a random order of ``range(n)``, int64 [n]."""
    return numpy_rng(seed, purpose, *numbers).permutation(n)


def uniforms(key: int, rows: np.ndarray, n: int) -> np.ndarray:
    """Draws ``n`` numbers in [0, 1) for each row number, each row independent of which others are asked for.

    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) as a hash of (key, row, column).

    Args:
        key: From :func:`derive`.
        rows: Integers >= 0, [R], for instance the indices of the images in a batch.

    Returns:
        float64 [R, n].
    """
    state = np.asarray(rows, dtype=np.uint64)[:, None]  # [R, 1]
    for word in (np.array([[key]], dtype=np.uint64), np.arange(n, dtype=np.uint64)[None, :]):
        state = _mix(state ^ _mix(word))  # [R, 1], then [R, n]
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # unsigned arrays wrap around 2**64, as wanted
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@contextlib.contextmanager
def seeded(key: int):
    """Seeds Python's, NumPy's and torch's global generators inside the block and puts them back after it.

    For library code (initialisers, dropout, torchvision's and timm's augmentations) that draws from global state.
    CUDA's generators are seeded too and left so: whatever draws from them next is seeded by its own block.
    """
    import torch

    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    if torch.cuda.is_initialized() or torch.backends.mps.is_available():
        torch.manual_seed(key)
    else:  # that formats a stack trace for each kind of device that is not there yet: half a millisecond
        torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
