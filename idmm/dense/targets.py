"""Targets of an image: boxes with classes and outlines, or a file with a mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile

from idmm.data.formats import BadImage, exif_orientation, pillow_image, reporting
from idmm.data.images import digest, read
from idmm.data.split import Listing
from idmm.errors import RunError

Floats = NDArray[np.floating]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
RunLengths = dict[str, Any]  # COCO's compressed RLE: size and counts
Segment = RunLengths | list[Floats]  # an outline: RLE, or polygons, float32 [2 k]
Size = tuple[int, int]  # height and width (pixels)
GREYS = {"L;2": 85, "L;4": 17}  # factors by which Pillow brightens grey values of 2 and 4 bits
IGNORED = 255  # mask value of pixels that are neither trained nor evaluated on


@dataclass(frozen=True)
class BoxTarget:
    """The n objects of an image. n may be 0."""

    boxes: Floats  # float32 [n, 4]: x1, y1, x2, y2 (pixels of the file)
    labels: Integers  # [n], from 0
    segments: list[Segment] | None  # None: only boxes
    crowd: NDArray[np.bool_]  # [n]: a group of objects in one annotation
    size: Size  # height and width (pixels)
    image_id: int | str  # in the annotation file

    @property
    def classes(self) -> set[int]:
        """Classes that have a box, which is no crowd."""
        return set(self.labels[~self.crowd].tolist())

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ between targets."""
        segments: list[Any] = []
        for segment in self.segments or ():
            if isinstance(segment, list):
                segments.append([polygon.tolist() for polygon in segment])
            else:
                segments.append(segment)
        arrays = [array.tolist() for array in (self.boxes, self.labels, self.crowd)]
        return digest(repr([self.size, arrays, segments]).encode())[:8].hex()

    def masks(self, height: int, width: int) -> Bytes:
        """Return each object's outline drawn at ``height`` x ``width`` pixels, [n, h, w]."""
        from pycocotools import mask as coco

        segments = self.segments or []
        scale = np.array([width / self.size[1], height / self.size[0]])
        masks = np.zeros((len(segments), height, width), dtype=np.uint8)
        for number, segment in enumerate(segments):
            if isinstance(segment, list):
                scaled = [polygon.reshape(-1, 2) * scale for polygon in segment]
                polygons = [points.ravel().tolist() for points in scaled]
                masks[number] = coco.decode(coco.merge(coco.frPyObjects(polygons, height, width)))
            else:
                masks[number] = nearest(coco.decode(segment), (height, width))
        return masks


@dataclass(frozen=True)
class MaskTarget:
    """The file of a mask."""

    path: str
    size: Size  # height and width (pixels)
    first: int  # value of class 0. If it is 1, the value 0 means "no class" and is ignored
    digest: str  # 16 hexadecimal digits that differ between files
    values: list[int]  # values that occur, ascending

    @property
    def classes(self) -> set[int]:
        """Classes that have a pixel."""
        return {value - self.first for value in self.values if self.first <= value != IGNORED}

    def mask(self) -> Bytes:
        """Return the class of each pixel, [H, W], :data:`IGNORED` if none.

        Raises:
            RunError: The file changed by now.
        """
        try:
            values, digest_now = read_mask(self.path)
        except BadImage as error:
            raise RunError(
                f"data.root: '{self.path}' was fine when checked, but now: {error.reason}"
            ) from error
        if digest_now != self.digest:
            raise RunError(f"data.root: '{self.path}' was changed while in use")
        classes = values.astype(np.int16) - self.first
        return np.where(values == IGNORED, IGNORED, classes).astype(np.uint8)  # -1 becomes 255


@dataclass(frozen=True)
class DenseListing(Listing):
    """Images whose splits have ``targets``, and the names of these as ``classes``."""

    categories: Sequence[int] = ()  # number of each class in the dataset's own files


def outlined(targets: Sequence[BoxTarget | MaskTarget]) -> bool:
    """Return whether objects have outlines, so that instance masks can be learned."""
    boxes = [target for target in targets if isinstance(target, BoxTarget)]
    return any(target.segments is not None for target in boxes)


def nearest(mask: Bytes, shape: Size) -> Bytes:
    """Return a mask [H, W] resized to ``shape`` by the nearest pixel."""
    if mask.shape == shape:
        return mask
    return np.array(Image.fromarray(mask).resize(shape[::-1], Image.Resampling.NEAREST))


def read_mask(path: str) -> tuple[Bytes, str]:
    """Return the :func:`mask_values` and the digest of a file."""
    content = read(path)
    return mask_values(content), digest(content)[:8].hex()


def mask_values(content: bytes) -> Bytes:
    """Return the numbers in a mask file, [H, W]: palette indices or grey values.

    Raises:
        BadImage: It is another file, would be turned, or has larger numbers.
    """
    with reporting(), pillow_image(content) as image:
        mode = image.mode
        form = image.tile[0].args if isinstance(image, ImageFile.ImageFile) and image.tile else None
        values = np.asarray(image) // GREYS.get(str(form), 1)
        if exif_orientation(image) > 1:
            raise BadImage(
                "has an EXIF orientation, "
                "expected upright pixels without it (exiftool -Orientation= FILE)"
            )
    if mode not in ("L", "P", "1", "I") and not mode.startswith("I;16"):
        kind = "an image" if mode in ("F", "LA") else "a colour image"
        raise BadImage(
            f"{kind} ({mode}), expected a grey or palette PNG whose numbers are the classes"
        )
    if values.min() < 0 or values.max() > IGNORED:
        raise BadImage(f"values from {values.min()} to {values.max()}, expected 0 to {IGNORED}")
    return values.astype(np.uint8)
