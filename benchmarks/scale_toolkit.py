"""What this toolkit does once for each image in Python or in memory, on synthetic rows: time and memory over N.

Nothing is decoded: names, digests, sizes and labels are made up. Each part runs in a process of its own, which reports
its processor time and the peak of its memory beyond what it began with.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from idmm.data.disk import Index
from idmm.data.split import Split

FOLDER = tempfile.TemporaryDirectory(prefix="idmm-scale-")  # removed when this process ends


def split_of(n: int) -> Split:
    """A folder of N images in 1,000 classes."""
    names = [f"train/n{i % 1000:08}/n{i % 1000:08}_{i}.JPEG" for i in range(n)]
    items = [f"/data/imagenet/{name}" for name in names]
    return Split(items, names, np.arange(n) % 1000, [f"n{c:08}" for c in range(1000)])


def store_of(n: int):
    """Its images as if they were cached."""
    from idmm.data.cache import ImageStore
    from idmm.data.depth import FULL

    rng = np.random.default_rng(0)
    index = Index(
        sizes=np.full((n, 2), 400),
        digests=rng.integers(0, 256, (n, 16), dtype=np.uint8),
        good=np.arange(n),
        bad=np.empty(0, dtype=np.int64),
        reasons=np.empty(0, dtype=np.str_),
        kinds=np.zeros(n, dtype=np.str_),
        extremes=np.full((n, 2), np.nan),
        pixel_bytes=np.full(n, 3),
    )
    return ImageStore(split_of(n), index, None, 579, 10**8, FULL)


def _lists(n: int):
    return lambda: split_of(n)


def _tree(n: int):
    from idmm.data.readers import folder

    top = Path(FOLDER.name)
    for c in range(1000):
        (top / "train" / f"n{c:08}").mkdir(parents=True)
    for name in split_of(n).names:
        os.mknod(top / name)
    return lambda: folder.read_any(str(top))


def _signature(n: int):
    from idmm.data import disk

    split = split_of(n)
    split.items[:] = [__file__] * n
    return lambda: disk._signature(split, 579, 10**8)


def _fingerprint(n: int):
    from idmm.data.cache import fingerprint

    store = store_of(n)
    return lambda: fingerprint(store)


def _remembered(n: int):
    from idmm.data.cache import fingerprint

    kept, path = fingerprint(store_of(n)), Path(FOLDER.name) / "images.json"

    def write_and_read() -> int:
        path.write_text(json.dumps(kept))
        json.loads(path.read_text())
        return path.stat().st_size

    return write_and_read


def _compared(n: int):
    from idmm.data.cache import compare, fingerprint

    store = store_of(n)
    old, new = json.loads(json.dumps(fingerprint(store))), fingerprint(store)
    return lambda: compare(old, new)


def _instances(n: int):
    from idmm.stages.artifacts import about_rows

    store = store_of(n)
    return lambda: len(json.dumps(about_rows("linear", store)))


def _order(n: int):
    from idmm.seeding import permutation

    return lambda: permutation(0, "order", n, 0)


def _store(n: int):
    split_of(1)
    return lambda: store_of(n)


PARTS: dict[str, tuple[Callable, str]] = {
    "tree": (_tree, "listing a folder (empty files, in the page cache)"),
    "lists": (_lists, "lists of names and paths"),
    "store": (_store, "the store of images without pixels, its lists included"),
    "signature": (_signature, "signature of the cache (one stat a file)"),
    "fingerprint": (_fingerprint, "fingerprint of the images"),
    "remembered": (_remembered, "last/images.json, written and read"),
    "compared": (_compared, "comparing fingerprints at a resume"),
    "instances": (_instances, "instances.json at the end of a run"),
    "order": (_order, "order of an epoch"),
}


def resident() -> int:
    """Returns the memory that this process has (bytes)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(part: str, n: int) -> dict[str, float]:
    """Runs a part in this process."""
    import torch  # noqa: F401 (what it takes is not the part's)

    work = PARTS[part][0](n)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = resident()
    began = time.process_time()
    result = work()
    seconds, top = time.process_time() - began, _high_water()
    size = result if isinstance(result, int) else 0
    return {"seconds": seconds, "bytes": max(0, top - before), "file": size}


def _high_water() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def table(n: int) -> list[dict]:
    """Measures all parts at N, each in a process of its own."""
    found = []
    for part, (_, what) in PARTS.items():
        command = [sys.executable, __file__, "--part", part, "--images", str(n)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"{part}:\n{ran.stderr}")
        found.append({"part": part, "what": what, "images": n, **json.loads(ran.stdout)})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--images", type=int, default=1_000_000)
    given = parser.parse_args()
    print(json.dumps(measure(given.part, given.images)))
