"""A list of images with their names and labels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Split:
    """Some images of a dataset.

    Args:
        items: A path for each image, or the images themselves: uint8 [N, H, W, 3].
        names: A name for each image that stays the same wherever the dataset lies, with '/' for separator.
        labels: int64 [N], or None.
        classes: Name of each label, or None.
    """

    items: list[str] | np.ndarray
    names: list[str]
    labels: np.ndarray | None
    classes: list[str] | None

    def __len__(self) -> int:
        return len(self.names)

    def take(self, indices: Sequence[int] | np.ndarray) -> "Split":
        """Returns the images at ``indices``, in that order, with all classes kept."""
        indices = np.asarray(indices, dtype=np.int64)
        in_memory = isinstance(self.items, np.ndarray)
        return Split(
            items=self.items[indices] if in_memory else [self.items[i] for i in indices],
            names=[self.names[i] for i in indices],
            labels=None if self.labels is None else self.labels[indices],
            classes=self.classes,
        )


def counted(n: int, what: str) -> str:
    """Returns ``1 image`` or ``2 images``."""
    return f"{n} {what}{'' if n == 1 else 's'}"


@dataclass(frozen=True)
class Splits:
    """The images of a dataset: ``val`` is evaluated while training, ``test`` at the end. A single one is ``test``."""

    train: Split
    val: Split | None
    test: Split | None
