"""All images of a split decoded once, on several threads."""

from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO

import numpy as np

from idmm.data.formats import BadImage
from idmm.data.images import Bands, Decoded, StoredSize, fitted, min_max_of, read_image
from idmm.data.parallel import parallel_map
from idmm.data.split import Split, counted
from idmm.data.values import RangeUnknown, ValueRange, as_range
from idmm.errors import UserError, by_reason, capped


@dataclass(frozen=True)
class Reading:
    """How the images of a split are read."""

    stored_size: StoredSize  # longest short side (pixels), or the centre crop. None: whole images
    value_range: ValueRange  # of images of more than 8 bits. AUTO: the range of these images
    bands: Bands | None  # channels of the files. None: pictures

    @property
    def channels(self) -> int:
        """Channels of a stored image."""
        return self.bands.used if self.bands else 3

    def read(self, item: str | np.ndarray) -> Decoded:
        """Decode an image to its stored size. Errors as of :func:`idmm.data.images.read_image`."""
        decoded = read_image(item, self.value_range, self.bands)
        return decoded._replace(pixels=fitted(decoded.pixels, self.stored_size))


@dataclass(frozen=True)
class Index:
    """Facts about the decoded images of a split, without their pixels."""

    sizes: np.ndarray  # height and width of each image, int64 [N, 2] (pixels)
    digests: np.ndarray  # BLAKE2b of each image's file, uint8 [N, 16]
    range: np.ndarray  # value range if it was measured, float64 [1, 2], of bands [C, 2]. Else [0, 2]
    pixel_bytes: np.ndarray  # bytes per pixel of each image, all channels, int64 [N]

    @property
    def ends(self) -> np.ndarray:
        """End of each image in the file of pixels, int64 [N] (bytes)."""
        return np.cumsum(self.sizes.prod(axis=1) * self.pixel_bytes)


def decode_split(split: Split, reading: Reading, file: IO[bytes] | None) -> Index:
    """Read all images of a split and append them to ``file``, if there is one.

    The first image of more than 8 bits under AUTO starts the measuring of all values, then everything again.

    Raises:
        UserError: Images that cannot be used, all of them in one.
        RunError: An image does not fit into memory.
    """
    try:
        return _decode(split, reading, file)
    except RangeUnknown:
        value_range = measure_range(split, reading.bands)
    if file is not None:
        file.seek(0)
        file.truncate()
    index = _decode(split, replace(reading, value_range=value_range), file)
    return replace(index, range=np.array(value_range or (), dtype=np.float64).reshape(-1, 2))


def _decode(split: Split, reading: Reading, file: IO[bytes] | None) -> Index:
    sizes, digests, pixel_bytes = [], [], []
    bad: dict[str, str] = {}  # path -> reason
    results = parallel_map(lambda i: reading.read(split.items[i]), len(split), split.place, "reading images")
    with closing(results):
        for i, result in enumerate(results):
            if isinstance(result, BadImage):
                bad[split.place(i)] = result.reason
                continue
            if file is not None:
                file.write(np.ascontiguousarray(result.pixels).data)
            sizes.append(result.pixels.shape[:2])
            pixel_bytes.append(result.pixels.shape[2] * result.pixels.itemsize)
            digests.append(result.digest)
    if bad:
        count = f"{len(bad)} of {counted(len(split), 'image')}"
        lines = capped([f"  {line}" for line in by_reason(bad, bad.values())])
        how = "'idmm data check --root DIR --out runs/check' writes a file for --data.exclude that leaves them out"
        raise UserError(f"data.root: {count} cannot be used ({how}):", *lines)
    return Index(
        sizes=np.array(sizes, dtype=np.int64).reshape(-1, 2),
        digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16),
        range=np.zeros((0, 2)),
        pixel_bytes=np.array(pixel_bytes, dtype=np.int64),
    )


def measure_range(split: Split, bands: Bands | None) -> ValueRange:
    """Return the value range of a split's images of more than 8 bits, of bands one per channel."""
    results = parallel_map(lambda i: min_max_of(split.items[i], bands), len(split), split.place, "measuring values")
    pairs = np.array([one for one in results if one and not isinstance(one, BadImage)])  # [D, 1 or C, 2]
    ranges = as_range(np.stack([pairs[..., 0].min(axis=0), pairs[..., 1].max(axis=0)], axis=-1).tolist())
    return ranges if bands else ranges[0]
