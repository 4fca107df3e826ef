"""What identifies the images of a dataset: a digest of each one's content, and its label."""

import contextlib
import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from idmm import config
from idmm.data.folder import PARTS, FilesMissing
from idmm.data.formats import BadImage
from idmm.data.images import digest, read
from idmm.data.parallel import parallel_map
from idmm.data.split import Listing, Split
from idmm.errors import UserError
from idmm.files import WITHOUT, AnyPath, expand_home, reading
from idmm.text import listed, one_line

KINDS = ("with another label", "new", "gone", "with other content", "renamed")  # of changes
_CLOCK = 2.0  # seconds by which a file system's times may be behind


def digests(split: Split) -> list[bytes]:
    """Return the BLAKE2b of each image's file, or of its pixels if it has none. A file is read once
    per process.

    A file that cannot be read has the digest of its path.
    """
    return list(
        parallel_map(lambda i: _digest(split.items[i]), len(split), split.place, "reading files")
    )


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


# ---------------------------------------------------------------------- fingerprints
def fingerprint(images, contents: Sequence[str]) -> dict:
    """Return what identifies images, for JSON: ``{"classes": [...] or None, "images": {name:
    "digest label"}}``.

    Digests are cut to 16 hexadecimal digits. The label is the class, or that of boxes or a mask.
    Images without a label have none. The order counts.

    Args:
        images: A split or its store, with or without labels.
        contents: Digest of each, in hexadecimal digits.
    """
    labels = [""] * len(images)
    if images.targets is not None:
        labels = [target.digest for target in images.targets]
    elif images.labels is not None:
        labels = [images.classes[number] if number >= 0 else "" for number in images.labels]
    rows = zip(images.names, contents, labels, strict=True)
    return {
        "classes": images.classes,
        "images": {name: f"{text[:16]} {label}" for name, text, label in rows},
    }


def listing_fingerprint(listing: Listing, saved: dict | None = None) -> dict:
    """Return the :func:`fingerprint` of each split of a listing.

    Args:
        listing: Nothing of it is decoded.
        saved: An earlier result with ``time``, when none of its files had been read yet. Only files
            that were written to or moved since then are read.
    """
    saved = saved or {"time": 0.0}
    known = _images_of(saved)
    result = {}
    for part, split in listing.parts.items():
        images = list(zip(split.names, split.items, strict=True))
        is_known = [name in known and _is_older(item, saved["time"]) for name, item in images]
        read_now = iter(digests(split.take(np.flatnonzero(np.invert(is_known)))))
        pairs = zip(split.names, is_known, strict=True)
        contents = [known[name][0] if is_old else next(read_now).hex() for name, is_old in pairs]
        result[part] = fingerprint(split, contents)
    return result


def _is_older(item: str | np.ndarray, time: float) -> bool:
    """Return whether a file, its folder and the one above were last changed before a time
    (seconds)."""
    if not isinstance(item, str):
        return False
    folder = os.path.dirname(item)
    places = (item, folder, os.path.dirname(folder))
    with contextlib.suppress(OSError):
        return all(os.path.getctime(place) < time - _CLOCK for place in places)
    return False


def seen_in_training(run: AnyPath, paths: Sequence[str]) -> int:
    """Return how many files have the content of a training image of a run. 0 if it has no list of
    these."""
    file = expand_home(run) / "last/images.json"
    if not file.exists():
        return 0
    with reading(file, WITHOUT):
        known = {
            text.partition(" ")[0]
            for text in json.loads(file.read_bytes())["train"]["images"].values()
        }
    return sum(_digest(path).hex()[:16] in known for path in paths)


# ---------------------------------------------------------------------- differences
def _images_of(parts: dict) -> dict[str, tuple[str, str]]:
    """Return digest and label of each image by name, of all splits."""
    images = {}
    for part in PARTS:
        for name, text in (parts.get(part) or {"images": {}})["images"].items():
            content, _, label = text.partition(" ")
            images[name] = content, label
    return images


def image_changes(old: dict, new: dict) -> str:
    """Return how two fingerprints by split differ, in words: counts, and some names. Empty: image i
    is still image i.

    A file of another name with the same content is the same image. Moved between class folders it
    has another label.
    """
    before = _images_of(old)
    now = _images_of(new)
    added = defaultdict(list)  # names by content
    for name, (content, _) in now.items():
        if name not in before:
            added[content].append(name)
    label, new_ones, gone, other, renamed = KINDS
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name, image in before.items():
        matches = [name] if name in now else added[image[0]]
        if not matches:
            found[gone].append(name)
            continue
        match = matches.pop(0)
        if now[match][1] != image[1]:
            found[label].append(match)
        elif now[match] != image:
            found[other].append(match)
        elif match != name:
            found[renamed].append(match)
    found[new_ones] = [name for names in added.values() for name in names]
    names = [name for group in found.values() for name in group]
    if names:
        counts = ", ".join(f"{len(group)} {kind}" for kind, group in found.items())
        return one_line(f"{counts} ({listed(names, 3)})")
    is_same = json.dumps([old.get(part) for part in PARTS]) == json.dumps(
        [new.get(part) for part in PARTS]
    )
    if is_same:
        return ""
    return "their order, their splits or the list of classes is another"


def refuse_changes(changes: str, out: AnyPath) -> None:
    """Raise UserError if there are :func:`image_changes` since the run in ``out`` began."""
    if changes:
        raise UserError(
            f"data.root: the images changed since this run: {changes}. '{out}' is of the old ones. "
            "Restore them, or name a new --out"
        )


def listed_again(list_all: Callable[[], Listing], data: config.Data) -> Listing | None:
    """List the images of a finished run again. None: they are gone, and it needs them no longer."""
    paths = filter(None, (data.root, data.labels, data.exclude))
    if all(expand_home(path).exists() for path in paths):
        with contextlib.suppress(FilesMissing):
            return list_all()
    return None
