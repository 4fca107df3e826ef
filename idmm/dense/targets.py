"""Targets of an image: boxes with classes and outlines, or a file with a mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from idmm.data.formats import BadImage, exif_orientation, pillow_image, reporting
from idmm.data.images import digest, read
from idmm.data.split import Listing
from idmm.errors import RunError

Size = tuple[int, int]  # height and width (pixels)
GREYS = {"L;2": 85, "L;4": 17}  # factors by which Pillow brightens grey values of 2 and 4 bits
IGNORED = 255  # mask value of pixels that are neither trained nor evaluated on


@dataclass(frozen=True)
class BoxTarget:
    """The n objects of an image. n may be 0."""

    boxes: np.ndarray  # float32 [n, 4]: x1, y1, x2, y2 (pixels of the file)
    labels: np.ndarray  # int64 [n], from 0
    # per object polygons (float32 [2 k]) or COCO's compressed RLE. None: only boxes
    segments: list | None
    crowd: np.ndarray  # bool [n]: a group of objects in one annotation
    size: Size  # height and width (pixels)
    image_id: int | str  # in the annotation file

    @property
    def classes(self) -> set[int]:
        """Classes that have a box, which is no crowd."""
        return set(self.labels[~self.crowd].tolist())

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that differ between targets."""
        segments = [
            s if isinstance(s, dict) else [polygon.tolist() for polygon in s]
            for s in self.segments or ()
        ]
        arrays = [array.tolist() for array in (self.boxes, self.labels, self.crowd)]
        return digest(repr([self.size, arrays, segments]).encode())[:8].hex()

    def masks(self, height: int, width: int) -> np.ndarray:
        """Return each object's outline drawn at ``height`` x ``width`` pixels, uint8 [n, h, w]."""
        from pycocotools import mask as coco

        scale = np.array([width / self.size[1], height / self.size[0]])
        masks = np.zeros((len(self.segments), height, width), dtype=np.uint8)
        for number, segment in enumerate(self.segments):
            if isinstance(segment, list):
                scaled = [
                    (np.reshape(polygon, (-1, 2)) * scale).ravel().tolist() for polygon in segment
                ]
                masks[number] = coco.decode(coco.merge(coco.frPyObjects(scaled, height, width)))
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

    def mask(self) -> np.ndarray:
        """Return the class of each pixel, uint8 [H, W], :data:`IGNORED` if none. RunError: the file
        changed by now."""
        try:
            values, found = read_mask(self.path)
        except BadImage as error:
            raise RunError(
                f"data.root: '{self.path}' was fine when checked, but now: {error.reason}"
            ) from error
        if found != self.digest:
            raise RunError(f"data.root: '{self.path}' was changed while in use")
        # -1: 255
        return np.where(values == IGNORED, IGNORED, values.astype(np.int16) - self.first).astype(
            np.uint8
        )


@dataclass(frozen=True)
class DenseListing(Listing):
    """Images with their targets and the names of classes, as ``targets`` and ``classes`` of each
    split."""

    categories: Sequence[int] = ()  # number of each class in the dataset's own files


def outlined(targets: Sequence[BoxTarget | MaskTarget]) -> bool:
    """Return whether objects have outlines, so that instance masks can be learned."""
    return any(getattr(target, "segments", None) is not None for target in targets)


def nearest(mask: np.ndarray, shape: Size) -> np.ndarray:
    """Return a mask, uint8 [H, W], resized to ``shape`` by the nearest pixel."""
    if mask.shape == shape:
        return mask
    return np.array(Image.fromarray(mask).resize(shape[::-1], Image.Resampling.NEAREST))


def read_mask(path: str) -> tuple[np.ndarray, str]:
    """Return the :func:`mask_values` and the digest of a file."""
    content = read(path)
    return mask_values(content), digest(content)[:8].hex()


def mask_values(content: bytes) -> np.ndarray:
    """Return the numbers in a mask file, uint8 [H, W]: palette indices or grey values.

    Raises:
        BadImage: It is another file, would be turned, or has larger numbers.
    """
    with reporting(), pillow_image(content) as image:
        mode = image.mode
        form = image.tile[0][3] if image.tile else None
        values = np.asarray(image) // GREYS.get(form, 1)
        if exif_orientation(image) > 1:
            raise BadImage(
                "has an EXIF orientation, expected upright pixels without it (exiftool -Orientation= FILE)"
            )
    if mode not in ("L", "P", "1", "I") and not mode.startswith("I;16"):
        kind = "an image" if mode in ("F", "LA") else "a colour image"
        raise BadImage(
            f"{kind} ({mode}), expected a grey or palette PNG whose numbers are the classes"
        )
    if values.min() < 0 or values.max() > IGNORED:
        raise BadImage(f"values from {values.min()} to {values.max()}, expected 0 to {IGNORED}")
    return values.astype(np.uint8)
