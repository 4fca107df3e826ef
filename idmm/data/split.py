"""Lists of images with their names and labels."""

import logging
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idmm.errors import UserError
from idmm.text import listed, one_line

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]
Groups = NDArray[np.str_]
Numbers = Sequence[int] | NDArray[np.integer[Any]]


class LabelsMissing(UserError):
    """The images are enough for pretraining, but fine-tuning needs more labels.

    They may be missing in the images to train on, or in those to evaluate on.
    """


def composed(name: str) -> str:
    """Return a name with composed letters: macOS may write the same name in another form."""
    return unicodedata.normalize("NFC", name)


def class_of(folder: str) -> str:
    """Return the class whose images a folder holds, on one line without blanks around it."""
    return one_line(composed(folder).strip())


def spread(count: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` numbers below ``count``, evenly spread from the first to the last."""
    return np.unique(np.linspace(0, count - 1, most).astype(np.int64))


class Labelled:
    """Images that may have labels."""

    labels: Labels | None  # int64 [N]
    classes: list[str] | None  # name of each label

    @property
    def known_labels(self) -> Labels:
        """``labels`` of a split that was listed with labels, int64 [N]."""
        assert self.labels is not None
        return self.labels

    @property
    def class_names(self) -> list[str]:
        """``classes``, none without labels."""
        return self.classes or []


@dataclass(frozen=True)
class Split(Labelled):
    """Some images of a dataset."""

    items: list[str] | Pixels  # paths, or the images themselves: uint8 [N, H, W, 3]
    names: list[str]  # of the images, independent of the dataset's place, with '/' for separator
    labels: Labels | None  # int64 [N]. In training images of stage 1, -1 for none
    classes: list[str] | None  # name of each label
    # whether it is a part of the dataset as listed. False: some images were left out or added
    whole: bool = True
    groups: Groups | None = None  # name of each image's group, [N]. It lies in one split only
    targets: list[Any] | None = None  # boxes or mask of each image, see :mod:`idmm.dense.targets`

    def __len__(self) -> int:
        return len(self.names)

    def class_name(self, i: int) -> str | None:
        """Return the class of image ``i``. None: it has no label."""
        if self.labels is None or self.labels[i] < 0:
            return None
        return self.class_names[int(self.labels[i])]

    @property
    def places(self) -> list[str]:
        """Paths of the images for messages."""
        if isinstance(self.items, list):
            return self.items
        return self.names

    def sample(self) -> list[str] | Pixels:
        """Return at most 64 of ``items``, evenly spread over all of them."""
        return self.take(spread(len(self), 64)).items

    @property
    def empty_classes(self) -> list[str]:
        """Names of the classes without an image."""
        present = set(self.known_labels.tolist())
        return [name for number, name in enumerate(self.class_names) if number not in present]

    def take(self, indices: Numbers) -> "Split":
        """Return the images at ``indices``, in that order, with all classes."""
        numbers = np.asarray(indices, dtype=np.int64)
        return replace(
            self,
            items=_taken(self.items, numbers),
            names=_taken(self.names, numbers),
            labels=_taken(self.labels, numbers),
            groups=_taken(self.groups, numbers),
            targets=_taken(self.targets, numbers),
            whole=self.whole and len(numbers) == len(self),
        )


def _taken(values: Any, numbers: Labels) -> Any:
    """Return some values of a list or an array. None: there are no values."""
    if values is None:
        return None
    if isinstance(values, list):
        return [values[number] for number in numbers]
    return values[numbers]


def split_of(
    root: str | os.PathLike[str],
    names: list[str],
    labels: Numbers | None = None,
    classes: list[str] | None = None,
) -> Split:
    """Return the named files of a folder, '/' between, with their labels if they have some."""
    items = [os.path.join(root, *name.split("/")) for name in names]
    numbers = None if labels is None else np.array(labels, dtype=np.int64)
    return Split(items, names, numbers, classes)


@dataclass(frozen=True)
class Listing:
    """The images of a dataset.

    ``val`` is evaluated while training, ``test`` at the end. A single one is ``test``.
    """

    train: Split
    val: Split | None = None
    test: Split | None = None
    excluded: int = 0  # images that data.exclude left out
    unlabelled: Split | None = None  # for pretraining, not in train (yet)
    # names of images for val or test that have no class yet, or one that is not trained
    aside: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()  # classes that :meth:`trained` left out

    @property
    def remarks(self) -> dict[str, int]:
        """Entries of ``result.json`` about the data."""
        return {"excluded": self.excluded} if self.excluded else {}

    @property
    def parts(self) -> dict[str, Split]:
        """Those of ``train``, ``unlabelled``, ``val`` and ``test`` that there are."""
        parts = {
            "train": self.train,
            "unlabelled": self.unlabelled,
            "val": self.val,
            "test": self.test,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def evaluated(self) -> list[Split]:
        """Those of ``val`` and ``test`` that there are."""
        return [part for part in (self.val, self.test) if part is not None]

    def trained(self) -> "Listing":
        """Return it without classes of which no training image has a label, with a warning.

        Images of these classes in val and test are put ``aside``.

        Raises:
            UserError: Fewer than two classes are left, or no image to test on.
        """
        untrained = self.train.empty_classes
        if not untrained:
            return self
        classes = [name for name in self.train.class_names if name not in untrained]
        if len(classes) < 2:
            raise UserError.of(
                "data.root",
                f"only '{classes[0]}' has training images with a label",
                "A classifier needs two classes or more",
            )
        numbers = {name: number for number, name in enumerate(classes)}
        # the last one, of number -1, is none
        new = np.array([numbers.get(name, -1) for name in [*self.train.class_names, ""]])
        aside = list(self.aside)
        parts = self.parts
        for key in parts.keys() - {"unlabelled"}:
            split = parts[key]
            split = replace(split, labels=new[split.known_labels], classes=classes)
            if key != "train":
                is_tested = split.known_labels >= 0
                aside += split.take(np.flatnonzero(~is_tested)).names
                split = split.take(np.flatnonzero(is_tested))
                if not len(split):
                    raise UserError.of(
                        "data.root",
                        f"no image of {key} has a class with labelled training images",
                        "Label some",
                    )
            parts[key] = split
        log.warning(
            f"data: {len(untrained)} of {len(self.train.class_names)} classes have no training "
            "image with a label and are left out, with their images to test on: "
            f"{listed(untrained)}"
        )
        return replace(
            self.with_parts(parts),
            aside=tuple(aside),
            untrained=(*self.untrained, *untrained),
        )

    def with_parts(self, parts: Mapping[str, Split]) -> "Listing":
        """Return it with other :attr:`parts`. Unlabelled ones may have no image left."""
        return replace(
            self,
            train=parts["train"],
            val=parts.get("val"),
            test=parts.get("test"),
            unlabelled=parts.get("unlabelled") or None,
        )


def names_of(parts: Iterable[Split]) -> list[str]:
    """Return the names of all images of some splits."""
    return list(chain.from_iterable(part.names for part in parts))


def arranged(splits: Mapping[str, Split]) -> Listing:
    """Return the splits by their names. A single one to evaluate on is ``test``."""
    if "test" in splits:
        return Listing(splits["train"], splits.get("val"), splits["test"])
    return Listing(splits["train"], test=splits.get("val"))


def with_unlabelled(listing: Listing) -> Listing:
    """Return the splits with the unlabelled images appended to ``train``, with the label -1."""
    more = listing.unlabelled
    train = listing.train
    if more is None:
        return listing
    labels = train.labels
    if labels is not None:
        labels = np.append(labels, np.full(len(more), -1))
    groups = train.groups
    if groups is not None:
        # one without a group is its own
        groups = np.append(groups, more.names if more.groups is None else more.groups)
    joined = replace(
        train,
        items=[*train.items, *more.items],
        names=train.names + more.names,
        labels=labels,
        whole=False,
        groups=groups,
    )
    return replace(listing, train=joined, unlabelled=None)
