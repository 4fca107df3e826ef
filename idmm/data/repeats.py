"""Images to train on that are there twice, as one of the labelled images and as one of those without labels."""

from collections import defaultdict
from collections.abc import Iterator

import torch

from idmm.data.cache import ImageStore
from idmm.data.split import Split, counted
from idmm.errors import UserError, listed

_PLACES = 8  # along a side, whose pixels are compared before all are


def refuse_repeats(train: ImageStore, unlabelled: Split) -> None:
    """Raises UserError where images of ``unlabelled``, which are in ``train``, are the same as others there.

    An image and its copy, each a class of its own, cannot be told apart. Files are compared by their digests, decoded
    pixels (where they are kept) in a few places and, where those agree, whole.
    """
    names = set(unlabelled.names)
    more = [i for i, name in enumerate(train.names) if name in names]
    others = [i for i, name in enumerate(train.names) if name not in names]
    twins = {}
    for look in [_files, *([_pixels] if train.cache != "off" else [])]:
        seen = defaultdict(list)
        for i, key in look(train, others):
            seen[key].append(i)
        for i, key in look(train, more):
            other = next((j for j in seen.get(key, ()) if look is _files or _same(train, i, j)), None)
            if other is not None:
                twins.setdefault(i, other)
    if twins:
        shown = listed((f"'{train.names[i]}' is '{train.names[j]}'" for i, j in sorted(twins.items())), 3)
        what = f"{counted(len(twins), 'image')} without labels repeat{'s' * (len(twins) == 1)} other training images"
        how = "an image cannot be told from its copy: leave them out with --data.exclude ('idmm data check' lists them)"
        raise UserError(f"data.root: {what} ({shown}); {how}")


def _files(store: ImageStore, numbers: list[int]) -> Iterator[tuple[int, str]]:
    digests = store.digests
    return ((i, digests[i]) for i in numbers)


def _pixels(store: ImageStore, numbers: list[int]) -> Iterator[tuple[int, bytes]]:
    """The pixels of a few places of each image, with its size."""
    for i in numbers:
        image = store.image(i)  # [3, H, W]
        rows, columns = (torch.linspace(0, side - 1, _PLACES).long() for side in image.shape[1:])
        yield i, repr(image.shape).encode() + image[:, rows[:, None], columns].numpy().tobytes()


def _same(store: ImageStore, i: int, j: int) -> bool:
    return torch.equal(store.image(i), store.image(j))
