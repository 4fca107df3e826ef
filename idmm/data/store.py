"""The decoded images of a run, their value range, mean and standard deviation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy import ndarray

from idmm import config, distributed
from idmm.data.fingerprint import fingerprint
from idmm.data.folder import PARTS
from idmm.data.image_store import ImageStore, store_split
from idmm.data.images import AUTO, LUMA, WHITE, StoredSize, ValueRange
from idmm.data.parallel import parallel_map
from idmm.data.split import Listing, Split
from idmm.errors import UserError


@dataclass(frozen=True)
class Stores:
    """The decoded images of a run: to train on, to evaluate between epochs, to report at the
    end."""

    train: ImageStore
    # ``val`` and ``test`` at each size (pixels), if there are any
    crops: dict[int, dict[str, ImageStore]]
    # of images of more than 8 bits. None: there are none and the run was given no range
    value_range: ValueRange
    mean: list[float]  # of each channel, on values in [0, 1]
    std: list[float]
    remarks: dict  # entries of ``result.json`` about the data
    val: ImageStore | None = None  # those of ``crops`` at one size, see :meth:`at`
    test: ImageStore | None = None

    @property
    def parts(self) -> dict[str, ImageStore]:
        """The stores that there are, by name."""
        return {part: store for part in PARTS if (store := getattr(self, part)) is not None}

    def at(self, size: int) -> "Stores":
        """Return the same with ``val`` and ``test`` at a size (pixels)."""
        return replace(self, **self.crops[size])

    def fingerprint(self) -> dict:
        """Return what a resumed run must find unchanged, for JSON: images, value range, mean and
        std."""
        images = {part: fingerprint(store, store.digests) for part, store in self.parts.items()}
        return {**images, "range": self.value_range, "mean": self.mean, "std": self.std}


def store_images(
    listing: Listing,
    data: config.Data,
    train_size: StoredSize,
    eval_sizes: Mapping[int, StoredSize],
    *,
    value_range: ValueRange = AUTO,
    mean: list[float] | None = None,
    std: list[float] | None = None,
) -> Stores:
    """Read every image, and decide value range, mean and standard deviation once. All processes
    must call together.

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
    evaluated = {part: split for part, split in listing.parts.items() if part in ("val", "test")}
    faults = []

    def store(split: Split, part: str, stored_size: StoredSize, **values) -> ImageStore | None:
        try:
            return store_split(split, stored_size=stored_size, data=data, part=part, **values)
        except UserError as error:
            faults.extend(fault for fault in error.faults if fault not in faults)

    train = store(listing.train, "train", train_size, value_range=value_range)
    values = {
        "value_range": (train and train.value_range) or value_range,
        "bands": train and train.bands,
    }
    if train and not train.high_bit and value_range == AUTO:
        # as predictions have it: the training images give no range
        values["value_range"] = [0, WHITE]
    crops = {
        size: {part: store(split, part, stored, **values) for part, split in evaluated.items()}
        for size, stored in eval_sizes.items()
    }
    if faults:
        raise UserError(*faults)
    if mean is None or std is None:
        grey = data.channels == 1 and train.bands is None  # of the brightness
        measured = None
        if distributed.rank() == 0:
            place = train.names.__getitem__
            count = len(train)
            results = parallel_map(
                lambda i: moments(train.image(i).numpy(), grey), count, place, "measuring mean"
            )
            measured = mean_and_std(sum(results))  # of [C, 3]
        measured = distributed.broadcast(measured)
        mean = mean or measured[0]
        std = std or measured[1]
    is_deep = any(
        one.high_bit
        for one in (train, *(one for at_size in crops.values() for one in at_size.values()))
    )
    if is_deep or value_range != AUTO:
        known_range = values["value_range"]
    else:
        known_range = None
    return Stores(train, crops, known_range, mean, std, listing.remarks)


# ---------------------------------------------------------------------- mean and standard deviation
def moments(pixels: ndarray, grey: bool) -> ndarray:
    """Return number of pixels, sum and sum of squares of each channel, values in [0, 1], float64
    [C, 3].

    Args:
        pixels: uint8 or uint16 [C, H, W].
        grey: Of the brightness of RGB instead of each channel.
    """
    values = pixels / np.iinfo(pixels.dtype).max
    if grey:
        values = np.rint(np.tensordot(LUMA, values, axes=1) * WHITE)[None] / WHITE
    else:
        values = values
    return np.stack(
        [np.full(len(values), values[0].size), values.sum((1, 2)), (values * values).sum((1, 2))],
        axis=1,
    )


def mean_and_std(total: ndarray) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation (of a constant 1) per channel from the sum of
    :func:`moments`."""
    mean = total[:, 1] / total[:, 0]
    square = total[:, 2] / total[:, 0]
    std = np.sqrt(np.maximum(square - mean * mean, 0))
    return [float(f"{m:.6g}") for m in mean], [float(f"{s:.6g}") if s > 1e-6 else 1.0 for s in std]
