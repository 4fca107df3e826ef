"""Reading all images of a split: their pixels, facts about them, and what is wrong with them."""

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
from numpy.typing import NDArray

from idmm.data import images
from idmm.data.formats import BadImage, Pixels
from idmm.data.images import Bands, Decoded, RangeUnknown, StoredSize, ValueRange
from idmm.data.parallel import parallel_map
from idmm.data.split import Split
from idmm.errors import Fault, UserError
from idmm.text import by_reason, capped, counted

log = logging.getLogger(__name__)


class BadImages(UserError):
    """Images that cannot be used, with the reason of each by its name."""

    def __init__(self, reasons: dict[str, str], *faults: Fault):
        super().__init__(*faults)
        self.reasons = reasons


@dataclass(frozen=True)
class Reading:
    """How the images of a split are read."""

    stored_size: StoredSize  # longest short side (pixels), or the centre crop. None: whole images
    value_range: ValueRange  # of images of more than 8 bits. AUTO: the range of these images
    bands: Bands | None  # channels of the files. None: pictures

    @property
    def channels(self) -> int:
        """Channels of a stored image."""
        if self.bands:
            return self.bands.used
        return 3

    def read(self, item: str | Pixels) -> Decoded:
        """Decode an image to its stored size. Errors as of :func:`idmm.data.images.read_image`."""
        decoded = images.read_image(item, self.value_range, self.bands)
        return decoded._replace(pixels=images.fitted(decoded.pixels, self.stored_size))


@dataclass(frozen=True)
class Index:
    """Facts about the decoded images of a split, without their pixels."""

    sizes: NDArray[np.int64]  # height and width of each image, [N, 2] (pixels)
    digests: NDArray[np.uint8]  # BLAKE2b of each image's file, [N, 16]
    pixel_bytes: NDArray[np.int64]  # bytes per pixel of each image, all channels, [N]
    range: NDArray[np.float64]  # value range if it was measured, [2], of bands [C, 2]. Else [0]

    @property
    def ends(self) -> NDArray[np.int64]:
        """End of each image in the file of pixels, [N] (bytes)."""
        return np.cumsum(self.sizes.prod(axis=1) * self.pixel_bytes)


def decode_split(split: Split, reading: Reading, file: IO[bytes] | None) -> Index:
    """Read all images of a split and append their pixels to ``file``, if there is one.

    The first image of more than 8 bits under AUTO starts the measuring of all values, then
    everything again.
    """
    try:
        return _decode_images(split, reading, file)
    except RangeUnknown:
        value_range = measure_range(split, reading.bands)
    if file is not None:
        file.seek(0)
        file.truncate()
    index = _decode_images(split, replace(reading, value_range=value_range), file)
    return replace(index, range=np.array(value_range, dtype=np.float64))


def _decode_images(
    split: Split,
    reading: Reading,
    file: IO[bytes] | None,
) -> Index:
    sizes = []
    digests = []
    pixel_bytes = []
    reasons: dict[int, str] = {}  # of bad images, by number
    results = parallel_map(lambda i: reading.read(split.items[i]), split.places, "reading images")
    with closing(results):
        for i, result in enumerate(results):
            if isinstance(result, BadImage):
                reasons[i] = result.reason
                continue
            if file is not None:
                file.write(result.pixels.data)
            sizes.append(result.pixels.shape[:2])
            pixel_bytes.append(result.pixels.shape[2] * result.pixels.itemsize)
            digests.append(result.digest)
    if reasons:
        raise _bad_images(split, reasons)
    digest_bytes = np.frombuffer(b"".join(digests), np.uint8)
    return Index(
        sizes=np.array(sizes, dtype=np.int64).reshape(-1, 2),
        digests=digest_bytes.reshape(-1, 16),
        pixel_bytes=np.array(pixel_bytes, dtype=np.int64),
        range=np.zeros(0),
    )


def _bad_images(split: Split, reasons: dict[int, str]) -> BadImages:
    """Return the error for the images with these numbers."""
    summary = Fault(
        "data.root",
        f"{len(reasons)} of {counted(len(split), 'image')} cannot be used "
        "('idmm data check --root DIR --out runs/check' writes a file for --data.exclude "
        "that leaves them out):",
    )
    rows = by_reason(map(split.places.__getitem__, reasons), reasons.values())
    faults = [Fault("", row) for row in capped([f"  {row}" for row in rows])]
    by_name = {split.names[i]: reason for i, reason in reasons.items()}
    return BadImages(by_name, summary, *faults)


def measure_range(split: Split, bands: Bands | None) -> list[float] | list[list[float]]:
    """Return the value range of a split's images of more than 8 bits, of bands one per channel."""
    results = parallel_map(
        lambda i: images.min_max_of(split.items[i], bands), split.places, "measuring values"
    )
    measured = []
    for result in results:
        if result and not isinstance(result, BadImage):
            measured.append(result)
    pairs = np.array(measured)  # [images, 1 or C, 2]
    lowest = pairs[..., 0].min(axis=0)  # [1 or C]
    highest = pairs[..., 1].max(axis=0)
    ends = np.stack([lowest, highest], axis=-1)
    ranges: list[list[float]] = ends.tolist()
    value_range = ranges if bands else ranges[0]
    tops = pairs[..., 1].max(axis=1)
    log.info(
        f"data.range: {value_range} is 0 to 1, {(tops < tops.max() / 8).sum()} of {len(pairs)} "
        "images stay in its lowest eighth. Set it by --data.range '[LOW, HIGH]'"
    )
    return value_range
