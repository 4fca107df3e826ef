"""What is known of an image beside its pixels: boxes with classes and outlines, or the file with its mask."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from idmm.data.formats import BadImage, check_pixels, unreadable
from idmm.data.images import digest, read
from idmm.data.split import Splits
from idmm.errors import RunError

IGNORED = 255  # in a mask: a pixel that is neither trained nor evaluated on


@dataclass(frozen=True)
class BoxTarget:
    """The objects of an image, n of them, none at all included."""

    boxes: np.ndarray  # float32 [n, 4]: x1, y1, x2, y2 (pixels of the file)
    labels: np.ndarray  # int64 [n], from 0
    segments: list | None  # of each object polygons (float32 [2 k]) or RLE, as in COCO's JSON; None: boxes alone
    crowd: np.ndarray  # bool [n]: a group of objects in one annotation
    size: tuple[int, int]  # height and width (pixels)
    image_id: int | str  # in the annotations' file

    def take(self, kept: np.ndarray) -> "BoxTarget":
        """Returns the objects where ``kept`` (bool [n]) is true."""
        segments = self.segments and [segment for segment, keep in zip(self.segments, kept, strict=True) if keep]
        arrays = {name: getattr(self, name)[kept] for name in ("boxes", "labels", "crowd")}
        return BoxTarget(**arrays, segments=segments, size=self.size, image_id=self.image_id)

    @property
    def digest(self) -> str:
        """Another for other objects, 16 hexadecimal digits."""
        segments = [
            [polygon.tolist() for polygon in segment] if isinstance(segment, list) else segment
            for segment in self.segments or ()
        ]
        arrays = [array.tolist() for array in (self.boxes, self.labels, self.crowd)]
        return short_digest(repr([self.size, arrays, segments]).encode())

    def masks(self, height: int, width: int) -> np.ndarray:
        """Draws each object's outline, scaled with the image to ``height`` x ``width`` pixels: uint8 [n, h, w]."""
        drawn = [rasterised(segment, self.size, (height, width)) for segment in self.segments]
        return np.stack(drawn) if drawn else np.zeros((0, height, width), dtype=np.uint8)


@dataclass(frozen=True)
class MaskTarget:
    """A mask's file."""

    path: str
    size: tuple[int, int]  # height and width (pixels)
    first: int  # value of class 0: 1 where 0 means none of the classes and is ignored
    digest: str  # another for another file, 16 hexadecimal digits
    values: list[int]  # those that it has pixels of, rising

    def mask(self) -> np.ndarray:
        """Returns the class of each pixel, uint8 [H, W], :data:`IGNORED` where there is none.

        Raises:
            RunError: The file is gone or cannot be read any more.
        """
        try:
            values = mask_values(read(self.path))
        except BadImage as error:
            raise RunError(f"data.root: '{self.path}' was fine when checked, but now: {error.reason}") from error
        return np.where(values == IGNORED, IGNORED, values.astype(np.int16) - self.first).astype(np.uint8)  # -1: 255


Target = BoxTarget | MaskTarget


@dataclass(frozen=True)
class DenseSplits:
    """Images and what is known of them: ``targets[part][i]`` belongs to image i of ``getattr(splits, part)``."""

    splits: Splits
    targets: dict[str, Sequence[Target]]
    classes: list[str]
    categories: list[int]  # number of each class in the dataset's own files

    def of(self, part: str, names: Sequence[str]) -> list[Target]:
        """Returns the targets of those images of a part, in their order: a store may have left some out."""
        found = dict(zip(getattr(self.splits, part).names, self.targets[part], strict=True))
        return [found[name] for name in names]

    @property
    def outlined(self) -> bool:
        """Whether the objects to train on have outlines, so that instance masks can be learnt."""
        return any(getattr(target, "segments", None) is not None for target in self.targets["train"])


def rasterised(segment: list | dict, size: tuple[int, int], shape: tuple[int, int]) -> np.ndarray:
    """Draws an object's outline into an image of another size.

    Args:
        segment: Polygons, [x1, y1, x2, y2, ...] each; or RLE; as in COCO's JSON.
        size: Height and width of the image that it belongs to (pixels).
        shape: Those of the result.

    Returns:
        uint8 of ``shape``, 1 inside.
    """
    from pycocotools import mask as coco

    if isinstance(segment, list):
        scale = np.array([shape[1] / size[1], shape[0] / size[0]])
        scaled = [(np.reshape(polygon, (-1, 2)) * scale).ravel().tolist() for polygon in segment]
        return coco.decode(coco.merge(coco.frPyObjects(scaled, *shape)))  # [h, w]
    whole = coco.decode(coco.frPyObjects(segment, *size) if isinstance(segment["counts"], list) else segment)
    return nearest(whole, shape)


def nearest(mask: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Resizes a mask, uint8 [H, W], to another height and width: of each pixel the nearest to its centre."""
    if mask.shape == shape:
        return mask
    return np.array(Image.fromarray(mask).resize(shape[::-1], Image.Resampling.NEAREST))


def short_digest(content: bytes) -> str:
    """Returns 16 hexadecimal digits that are others for other bytes."""
    return digest(content)[:8].hex()


def mask_values(content: bytes, max_pixels: int | None = None) -> np.ndarray:
    """Reads the numbers in a mask's file, uint8 [H, W]: of a palette the index, of grey the value.

    Raises:
        BadImage: It is no image, or one of colours, or has more than ``max_pixels``.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            check_pixels(*image.size, max_pixels or math.inf)
            mode, values = image.mode, np.asarray(image)
    except BadImage:
        raise
    except Exception as error:  # Pillow raises a dozen types on broken files
        raise unreadable(error) from error
    if mode not in ("L", "P", "1"):
        raise BadImage(f"of colours ({mode}); wanted a grey or palette PNG whose numbers are the classes")
    return values.astype(np.uint8)
