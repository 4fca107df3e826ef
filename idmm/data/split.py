"""Lists of images with their names and labels."""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from idmm.errors import UserError
from idmm.text import one_line


class LabelsMissing(UserError):
    """The images are enough for pretraining, but fine-tuning needs labels, or labelled images to
    evaluate on."""


def composed(name: str) -> str:
    """Return a name with composed letters: macOS may write the same name in another form."""
    return unicodedata.normalize("NFC", name)


def class_of(folder: str) -> str:
    """Return the name of the class whose images a folder holds, on one line without blanks around
    it."""
    return one_line(composed(folder).strip())


@dataclass(frozen=True)
class Split:
    """Some images of a dataset."""

    items: list[str] | ndarray  # paths, or the images themselves: uint8 [N, H, W, 3]
    names: list[str]  # of the images, independent of the dataset's place, with '/' for separator
    labels: ndarray | None  # int64 [N]. In training images of stage 1, -1 for none
    classes: list[str] | None  # name of each label
    # whether it is a part of the dataset as listed. False: some images were left out or added
    whole: bool = True
    # name of each image's group, [N]. A group is never divided between splits
    groups: ndarray | None = None
    targets: list | None = None  # boxes or mask of each image, see :mod:`idmm.dense.targets`

    def __len__(self) -> int:
        return len(self.names)

    def place(self, i: int) -> str:
        """Return the path of image ``i`` for messages."""
        if isinstance(self.items, list):
            return self.items[i]
        return self.names[i]

    def sample(self) -> list[str] | ndarray:
        """Return at most 64 of ``items``, evenly spread over all of them."""
        return self.take(np.unique(np.linspace(0, len(self) - 1, 64).astype(int))).items

    def take(self, indices: Sequence[int] | ndarray) -> "Split":
        """Return the images at ``indices``, in that order, with all classes."""
        indices = np.asarray(indices, dtype=np.int64)
        taken = {"whole": self.whole and len(indices) == len(self)}
        for name in ("items", "names", "labels", "groups", "targets"):
            values = getattr(self, name)
            if isinstance(values, list):
                taken[name] = [values[i] for i in indices]
            elif values is not None:
                taken[name] = values[indices]
        return replace(self, **taken)


def split_of(
    root: str | os.PathLike,
    names: list[str],
    labels: Sequence[int] | None = None,
    classes: list[str] | None = None,
) -> Split:
    """Return the named files of a folder, '/' between, with their labels if they have some."""
    items = [os.path.join(root, *name.split("/")) for name in names]
    return Split(
        items, names, None if labels is None else np.array(labels, dtype=np.int64), classes
    )


@dataclass(frozen=True)
class Listing:
    """The images of a dataset. ``val`` is evaluated while training, ``test`` at the end. A single
    one is ``test``."""

    train: Split
    val: Split | None = None
    test: Split | None = None
    excluded: int = 0  # images that data.exclude left out
    # images without labels, for pretraining, that are not in train (yet)
    unlabelled: Split | None = None

    @property
    def remarks(self) -> dict:
        """Entries of ``result.json`` about the data."""
        if self.excluded:
            return {"excluded": self.excluded}
        return {}

    @property
    def parts(self) -> dict[str, Split]:
        """Those of ``train``, ``unlabelled``, ``val`` and ``test`` that there are."""
        names = ("train", "unlabelled", "val", "test")
        return {name: part for name in names if (part := getattr(self, name)) is not None}


def arranged(splits: dict[str, Split | None]) -> Listing:
    """Return ``train``, ``val`` and ``test`` by these names. A single one to evaluate on is
    ``test``."""
    val = splits.get("val")
    test = splits.get("test")
    if test is None:
        return Listing(splits["train"], test=val)
    return Listing(splits["train"], val, test)


def with_unlabelled(listing: Listing) -> Listing:
    """Return the splits with the images without labels appended to those to train on, with the
    label -1."""
    more = listing.unlabelled
    train = listing.train
    if more is None:
        return listing
    # one without a group is its own
    if more.groups is None:
        more_groups = more.names
    else:
        more_groups = more.groups
    joined = replace(
        train,
        items=[*train.items, *more.items],
        names=train.names + more.names,
        labels=None if train.labels is None else np.append(train.labels, np.full(len(more), -1)),
        whole=False,
        groups=None if train.groups is None else np.append(train.groups, more_groups),
    )
    return replace(listing, train=joined, unlabelled=None)
