"""Which images a dataset has: a digest of each one's content, its label, and how they differ from those of before."""

import functools
import os

import numpy as np

from idmm.data.formats import BadImage
from idmm.data.images import digest, read
from idmm.data.parallel import parallel_map
from idmm.data.split import Split


def digests(split: Split) -> list[bytes]:
    """Return the BLAKE2b of each image's file, or of its pixels if it has none. A file is read once per process.

    A file that cannot be read has the digest of its path.
    """
    return list(parallel_map(lambda i: _digest(split.items[i]), len(split), split.place, "reading files"))


def _digest(item: str | np.ndarray) -> bytes:
    if not isinstance(item, str):
        return digest(item.tobytes())
    try:
        status = os.stat(item)
        return _file_digest(item, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except (OSError, BadImage):
        return digest(os.fsencode(item))


@functools.lru_cache(maxsize=1 << 18)
def _file_digest(path: str, size: int, modified_at: int, changed_at: int) -> bytes:
    """Return a file's digest. The other arguments change if the file does."""
    return digest(read(path))
