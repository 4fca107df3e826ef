"""What identifies the images of a dataset: a digest of each one's content, and its label."""

import contextlib
import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from idmm.config import Data
from idmm.data.folder import PARTS, FilesMissing
from idmm.data.formats import BadImage
from idmm.data.images import digest, read
from idmm.data.parallel import parallel_map
from idmm.data.split import Listing, Pixels, Split
from idmm.errors import UserError
from idmm.files import WITHOUT, AnyPath, expand_home, reading
from idmm.text import listed, one_line

if TYPE_CHECKING:
    from idmm.data.image_store import ImageStore

Fingerprint = dict[str, Any]  # for JSON

_CLOCK = 2.0  # seconds by which a file system's times may be behind


def digests(split: Split) -> list[bytes]:
    """Return the BLAKE2b of each image's file, or of its pixels if it has none.

    A file is read once per process. One that cannot be read has the digest of its path.
    """
    results = parallel_map(lambda i: _digest(split.items[i]), split.places, "reading files")
    return cast(list[bytes], list(results))  # no BadImage reaches the map


def copies(train: Split, others: Iterable[Split]) -> NDArray[np.bool_]:
    """Return whether each image is the same as one of ``others`` or an earlier one, [N].

    Images with a label count as earlier than those without.
    """
    elsewhere = {content for split in others for content in digests(split)}
    contents = digests(train)
    first: dict[bytes, int] = {}
    for number in np.argsort(train.known_labels < 0, kind="stable").tolist():
        first.setdefault(contents[number], number)
    return np.array(
        [content in elsewhere or first[content] != i for i, content in enumerate(contents)],
        dtype=bool,
    )


def _digest(item: str | Pixels) -> bytes:
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
def fingerprint(images: "Split | ImageStore", contents: Sequence[str]) -> Fingerprint:
    """Return what identifies images.

    It is ``{"classes": [...] or None, "images": {name: "digest label"}}``. Digests are cut to 16
    hexadecimal digits. The label is the class, or that of boxes or a mask. Images without a label
    have none. The order counts.

    Args:
        images: A split or its store, with or without labels.
        contents: Digest of each, in hexadecimal digits.
    """
    labels = [""] * len(images)
    if images.targets is not None:
        labels = [target.digest for target in images.targets]
    elif images.labels is not None:
        names = [*(images.classes or []), ""]  # the last one, of number -1, is none
        labels = [names[number] for number in images.labels]
    rows = zip(images.names, contents, labels, strict=True)
    return {
        "classes": images.classes,
        "images": {name: f"{content[:16]} {label}" for name, content, label in rows},
    }


def listing_fingerprint(listing: Listing, saved: Fingerprint | None = None) -> Fingerprint:
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
        contents = []
        unknown = []
        for i, name in enumerate(split.names):
            if name in known and _is_older(split.items[i], saved["time"]):
                contents.append(known[name])
            else:
                contents.append("")
                unknown.append(i)
        for i, content in zip(unknown, digests(split.take(unknown)), strict=True):
            contents[i] = content.hex()
        result[part] = fingerprint(split, contents)
    return result


def _is_older(item: str | Pixels, time: float) -> bool:
    """Return whether a file, its folder and the one above last changed before a time (seconds)."""
    if not isinstance(item, str):
        return False
    folder = os.path.dirname(item)
    places = (item, folder, os.path.dirname(folder))
    with contextlib.suppress(OSError):
        return all(os.path.getctime(place) < time - _CLOCK for place in places)
    return False


def seen_in_training(run: AnyPath, paths: Sequence[str]) -> int:
    """Return how many files have the content of a training image of a run.

    0 if it has no list of these.
    """
    file = expand_home(run) / "last/images.json"
    if not file.exists():
        return 0
    with reading(file, WITHOUT):
        train = json.loads(file.read_bytes())["train"]
        known = {image[:16] for image in train["images"].values()}
    return sum(_digest(path).hex()[:16] in known for path in paths)


# ---------------------------------------------------------------------- differences
def _images_of(parts: Fingerprint) -> dict[str, str]:
    """Return ``digest label`` of the images of all splits by name. The digest has 16 letters."""
    images: dict[str, str] = {}
    for part in PARTS:
        images |= (parts.get(part) or {"images": {}})["images"]
    return images


def image_changes(old: Fingerprint, new: Fingerprint) -> str:
    """Return how two fingerprints by split differ, in words: counts, and some names.

    A file of another name with the same content is the same image. Moved between class folders it
    has another label. Empty: image i is still image i.
    """
    before = _images_of(old)
    now = _images_of(new)
    kinds = ("with another label", "new", "gone", "with other content", "renamed")
    changed: dict[str, list[str]] = {kind: [] for kind in kinds}
    added = defaultdict(list)  # names by content
    for name, image in now.items():
        if name not in before:
            added[image[:16]].append(name)
    for name, image in before.items():
        matches = [name] if name in now else added[image[:16]]
        if not matches:
            changed["gone"].append(name)
            continue
        match = matches.pop(0)
        if now[match][16:] != image[16:]:
            changed["with another label"].append(match)
        elif now[match] != image:
            changed["with other content"].append(match)
        elif match != name:
            changed["renamed"].append(match)
    changed["new"] = list(chain(*added.values()))
    if names := list(chain(*changed.values())):
        counts = ", ".join(f"{len(group)} {kind}" for kind, group in changed.items())
        return one_line(f"{counts} ({listed(names, 3)})")
    # as text, as the order of images counts
    splits = [json.dumps([parts.get(part) for part in PARTS]) for parts in (old, new)]
    if splits[0] == splits[1]:
        return ""
    return "their order, their splits or the list of classes is another"


def refuse_changes(changes: str, out: AnyPath) -> None:
    """Raise UserError if there are :func:`image_changes` since the run in ``out`` began."""
    if changes:
        raise UserError.of(
            "data.root",
            f"the images changed since this run: {changes}. '{out}' is of the old ones",
            "Restore them, or name a new --out",
        )


def listed_again(list_all: Callable[[], Listing], data: Data) -> Listing | None:
    """List the images of a finished run again. None: they are gone, and it needs them no longer."""
    paths = filter(None, (data.root, data.labels, data.exclude))
    if all(expand_home(path).exists() for path in paths):
        with contextlib.suppress(FilesMissing):
            return list_all()
    return None
