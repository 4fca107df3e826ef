"""What identifies the images of a dataset: a digest of each one's content, and its label."""

import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from idmm import config
from idmm.data.folder import PARTS, FilesMissing
from idmm.data.formats import BadImage
from idmm.data.images import digest, read
from idmm.data.parallel import parallel_map
from idmm.data.split import Listing, Split
from idmm.errors import UserError, listed, one_line
from idmm.files import expand_home

if TYPE_CHECKING:
    from idmm.data.image_store import ImageStore

_CLOCK = 2.0  # seconds by which a file system's times may be behind


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


# ---------------------------------------------------------------------- fingerprints
def fingerprint(images: "Split | ImageStore", contents: Sequence[str]) -> dict:
    """Return what identifies images, for JSON: ``{"classes": [...] or None, "images": {name: "digest label"}}``.

    Digests are cut to 16 hexadecimal digits. The label is the class, or that of boxes or a mask. Images without a label
    have none. The order counts.

    Args:
        images: With or without labels.
        contents: Digest of each, in hexadecimal digits.
    """
    labels = [""] * len(images)
    if images.targets is not None:
        labels = [target.digest for target in images.targets]
    elif images.labels is not None:
        labels = [images.classes[number] if number >= 0 else "" for number in images.labels]
    rows = zip(images.names, contents, labels, strict=True)
    return {"classes": images.classes, "images": {name: f"{text[:16]} {label}" for name, text, label in rows}}


def listing_fingerprint(listing: Listing, saved: dict | None = None) -> dict:
    """Return the :func:`fingerprint` of each split of a listing.

    Args:
        listing: Nothing of it is decoded.
        saved: An earlier result with ``time``, when none of its files had been read yet. Only files that were written
            to or moved since then are read.
    """
    known = {name: content for name, (content, _) in _images_of(saved or {}).items()}
    result = {}
    for part, split in listing.parts.items():
        contents = [known.get(name) for name in split.names]
        is_old = _old_files(split, saved["time"] if saved else 0.0)
        unknown = [i for i, content in enumerate(contents) if content is None or not is_old[i]]
        for i, content in zip(unknown, digests(split.take(unknown)), strict=True):
            contents[i] = content.hex()
        result[part] = fingerprint(split, contents)
    return result


def _old_files(split: Split, time: float) -> list[bool]:
    """Return whether each file, its folder and the one above were last changed before a time (seconds)."""

    @functools.cache
    def is_old(path: str) -> bool:
        try:
            status = os.stat(path)
        except OSError:
            return False
        return max(status.st_mtime, status.st_ctime) < time - _CLOCK

    def is_old_file(path: str) -> bool:
        folder = os.path.dirname(path)
        return is_old(path) and is_old(folder) and is_old(os.path.dirname(folder))

    return [isinstance(item, str) and is_old_file(item) for item in split.items]


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
    """Return how two fingerprints by split differ, in words: counts, and some names. Empty: image i is still image i.

    A file of another name with the same content is the same image. Moved between class folders it has another label.
    """
    before, now = _images_of(old), _images_of(new)
    added = defaultdict(list)  # names by content
    for name, (content, _) in now.items():
        if name not in before:
            added[content].append(name)
    changes = {"with another label": [], "new": [], "gone": []}
    more = {"with other content": [], "renamed": []}
    for name, (content, label) in before.items():
        name_now = name
        if name not in now:
            name_now = added[content].pop(0) if added[content] else None
        if name_now is None:
            changes["gone"].append(name)
        elif now[name_now][1] != label:
            changes["with another label"].append(name_now)
        elif now[name_now][0] != content:
            more["with other content"].append(name_now)
        elif name_now != name:
            more["renamed"].append(name_now)
    changes["new"] = [name for names in added.values() for name in names]
    changes |= {what: names for what, names in more.items() if names}
    names = [name for group in changes.values() for name in group]
    if names:
        counts = ", ".join(f"{len(group)} {what}" for what, group in changes.items())
        return one_line(f"{counts} ({listed(names, 3)})")
    is_same = json.dumps([old.get(part) for part in PARTS]) == json.dumps([new.get(part) for part in PARTS])
    return "" if is_same else "their order, their splits or the list of classes is another"


def check_unchanged(saved: dict, now: dict, out: str | os.PathLike) -> None:
    """Raise UserError if two fingerprints by split differ. ``out`` is the folder of the run."""
    if changes := image_changes(saved, now):
        raise UserError(_changed(out, changes))


def _changed(out: str | os.PathLike, changes: str) -> str:
    advice = "Restore them, or name a new --out"
    return f"data.root: the images changed since this run: {changes}. '{out}' is of the old ones. {advice}"


def listed_again(list_all: Callable[[], Listing], data: config.Data, out: str | os.PathLike) -> Listing | None:
    """List the images of a finished run. None: they are gone, and it needs them no longer.

    Raises:
        UserError: They can no longer be listed.
    """
    paths = filter(None, (data.root, data.labels, data.exclude))
    if not all(expand_home(path).exists() for path in paths):
        return None
    try:
        return list_all()
    except FilesMissing:
        return None
    except UserError as error:
        raise UserError(*error.faults, _changed(out, "they cannot be listed any more")) from None
