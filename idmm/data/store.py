"""The decoded images of a run, their value range, mean and standard deviation."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idmm import distributed
from idmm.config import Data
from idmm.data.fingerprint import fingerprint
from idmm.data.formats import BadImage, Pixels
from idmm.data.image_store import ImageStore, store_split
from idmm.data.images import AUTO, LUMA, WHITE, StoredSize, ValueRange
from idmm.data.parallel import parallel_map
from idmm.data.split import Listing
from idmm.errors import Fault, UserError

Statistics = tuple[list[float], list[float]]  # mean and standard deviation of each channel
Crops = dict[int, dict[str, ImageStore]]  # ``val`` and ``test`` at each size (pixels)


@dataclass(frozen=True)
class Stores:
    """The decoded images of a run: to train on, to evaluate on, to report at the end."""

    train: ImageStore
    crops: Crops
    # of images of more than 8 bits. None: there are none and the run was given no range
    value_range: ValueRange
    mean: list[float]  # of each channel, on values in [0, 1]
    std: list[float]
    remarks: dict[str, Any]  # entries of ``result.json`` about the data
    val: ImageStore | None = None  # those of ``crops`` at one size, see :meth:`at`
    test: ImageStore | None = None

    @property
    def parts(self) -> dict[str, ImageStore]:
        """The stores that there are, by name."""
        stores = {"train": self.train, "val": self.val, "test": self.test}
        return {part: store for part, store in stores.items() if store is not None}

    @property
    def tested(self) -> ImageStore:
        """``test`` of a run that needs test images."""
        assert self.test is not None
        return self.test

    def at(self, size: int) -> "Stores":
        """Return the same with ``val`` and ``test`` at a size (pixels)."""
        crops = self.crops[size]
        return replace(self, val=crops.get("val"), test=crops.get("test"))

    def fingerprint(self) -> dict[str, Any]:
        """Return what a resumed run must find unchanged, for JSON: images, range, mean and std."""
        images = {part: fingerprint(store, store.digests) for part, store in self.parts.items()}
        return {**images, "range": self.value_range, "mean": self.mean, "std": self.std}


def store_images(
    listing: Listing,
    data: Data,
    train_size: StoredSize,
    eval_sizes: Mapping[int, StoredSize],
    *,
    value_range: ValueRange = AUTO,
    mean: list[float] | None = None,
    std: list[float] | None = None,
) -> Stores:
    """Read every image, and decide value range, mean and standard deviation once.

    All processes must call together.

    Args:
        train_size: What is stored of training images, see :class:`idmm.data.image_store.Reading`.
        eval_sizes: What is stored of ``val`` and ``test`` for each size (pixels) that they are
            evaluated at.
        value_range, mean, std: If they are known (from the config, the checkpoint or the run's
            saved state). AUTO and None: measured from the training images.

    Raises:
        UserError: Bad images of all splits in one.
        RunError: An image does not fit into memory.
    """
    store = functools.partial(store_split, data=data)
    faults: list[Fault] = []
    train = None
    eval_range = value_range
    bands = None
    try:
        train = store(listing.train, stored_size=train_size, value_range=value_range)
        bands = train.bands
        if train.high_bit:
            eval_range = train.value_range
        elif value_range == AUTO:
            eval_range = [0, WHITE]  # as predictions have it: training images give no range
    except UserError as error:
        faults += error.faults
    store = functools.partial(store, value_range=eval_range, bands=bands)
    crops = _crops(store, listing, eval_sizes, faults)
    if train is None or faults:
        raise UserError(*faults)
    if mean is None or std is None:
        measured_mean, measured_std = _measured(train, data.channels == 1 and bands is None)
        mean = mean or measured_mean
        std = std or measured_std
    high_bit = train.high_bit
    for stores in crops.values():
        high_bit += sum(store.high_bit for store in stores.values())
    if value_range == AUTO and not high_bit:
        eval_range = None
    return Stores(train, crops, eval_range, mean, std, listing.remarks)


def _crops(
    store: Callable[..., ImageStore],
    listing: Listing,
    eval_sizes: Mapping[int, StoredSize],
    faults: list[Fault],
) -> Crops:
    """Return ``val`` and ``test`` at each size, and add what is wrong with them to ``faults``."""
    crops: Crops = {}
    for size, stored_size in eval_sizes.items():
        crops[size] = {}
        for part, split in listing.parts.items():
            if part in ("val", "test"):
                try:
                    crops[size][part] = store(split, stored_size=stored_size, part=part)
                except UserError as error:
                    faults += error.faults
    return crops


# ---------------------------------------------------------------------- mean and standard deviation
def _measured(train: ImageStore, grey: bool) -> Statistics:
    """Return mean and standard deviation of the images, see :func:`moments`.

    The first process measures them for all.
    """
    measured = None
    if distributed.rank() == 0:
        total = np.zeros((1, 3))
        results = parallel_map(
            lambda i: moments(train.image(i).numpy(), grey), train.names, "measuring mean"
        )
        for result in results:
            if not isinstance(result, BadImage):  # a store has none
                total = total + result
        measured = mean_and_std(total)
    values: Statistics = distributed.broadcast(measured)
    return values


def moments(pixels: Pixels, grey: bool) -> NDArray[np.float64]:
    """Return number of pixels, sum and sum of squares of each channel, [C, 3].

    Values are in [0, 1].

    Args:
        pixels: uint8 or uint16 [C, H, W].
        grey: Of the brightness of RGB instead of each channel.
    """
    values = pixels / np.iinfo(pixels.dtype).max
    if grey:
        brightness = np.tensordot(LUMA, values, axes=1)
        values = np.rint(brightness * WHITE)[None] / WHITE
    count = np.full(len(values), values[0].size)
    total = values.sum((1, 2))
    squares = (values * values).sum((1, 2))
    return np.stack([count, total, squares], axis=1)


def mean_and_std(total: NDArray[np.float64]) -> Statistics:
    """Return mean and standard deviation per channel from the sum of :func:`moments`, [C, 3].

    The deviation of a constant is 1.
    """
    count, values, squares = total.T
    mean = values / count
    variance = squares / count - mean * mean
    std = np.sqrt(np.maximum(variance, 0))
    std = np.where(std > 1e-6, std, 1.0)
    return (
        [float(f"{value:.6g}") for value in mean],
        [float(f"{value:.6g}") for value in std],
    )
