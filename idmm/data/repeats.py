"""Images to train on that are there twice, as one of the labelled images and as one of those without labels."""

from collections import defaultdict
from collections.abc import Callable, Sequence

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
    first = sum(name not in names for name in train.names)  # they stand behind the others
    twins = _alike(train.digests, first, lambda i, j: True)
    if not train.decodes:
        places = [_places(train.image(i)) for i in range(len(train))]
        twins = _alike(places, first, lambda i, j: torch.equal(train.image(i), train.image(j))) | twins
    if twins:
        shown = listed((f"'{train.names[i]}' is '{train.names[j]}'" for i, j in sorted(twins.items())), 3)
        what = f"{counted(len(twins), 'image')} without labels repeat{'s' * (len(twins) == 1)} other training images"
        how = "an image cannot be told from its copy: leave them out with --data.exclude ('idmm data check' lists them)"
        raise UserError(f"data.root: {what} ({shown}); {how}")


def _alike(keys: Sequence, first: int, same: Callable[[int, int], bool]) -> dict[int, int]:
    """Returns for images from the number ``first`` on one before that with the same key that is the same, if any."""
    known = defaultdict(list)
    for i in range(first):
        known[keys[i]].append(i)
    found = {i: next((j for j in known.get(keys[i], ()) if same(i, j)), None) for i in range(first, len(keys))}
    return {i: j for i, j in found.items() if j is not None}


def _places(image: torch.Tensor) -> bytes:
    """The pixels of a few places of an image [3, H, W], with its size."""
    rows, columns = (torch.linspace(0, side - 1, _PLACES).long() for side in image.shape[1:])
    return repr(image.shape).encode() + image[:, rows[:, None], columns].numpy().tobytes()
