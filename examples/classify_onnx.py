"""Print the class of each image by an exported classifier, with neither torch nor idmm.

python examples/classify_onnx.py MODEL.onnx IMAGE [IMAGE ...]

It needs numpy, onnxruntime and Pillow. Images of more than 8 bits or with other channels than RGB
and grey need imagecodecs and tifffile as well, HEIC needs pillow-heif. Images are turned upright,
and pictures are put on white.
"""

import contextlib
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

with contextlib.suppress(ImportError):
    import pillow_heif

    pillow_heif.register_heif_opener()

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
metadata = session.get_modelmeta().custom_metadata_map
prepare = json.loads(metadata["preprocessing"])
classes = json.loads(metadata["classes"])
PICTURE = prepare["channels"] in ("RGB", "L")
ORIENTATION = 0x0112  # the tag of EXIF and TIFF
LUMA = np.array([[0.299], [0.587], [0.114]], np.float32)  # of red, green and blue in grey
TIFF = (".tif", ".tiff")


def read(path: str) -> np.ndarray:
    """Return an upright image in the file's numbers, [H, W, C]. A picture may have its opacity as
    last channel."""
    if PICTURE and not path.lower().endswith(".npy"):
        with Image.open(path) as image:
            if "grey_range" not in prepare and image.mode[0] not in "IF":  # 8 bits
                colours = "RGBA" if image.has_transparency_data else "RGB"
                return np.asarray(ImageOps.exif_transpose(image).convert(colours))
    return read_numbers(path)


def read_numbers(path: str) -> np.ndarray:
    """Return an upright image of any bits and channels, [H, W, C]."""
    import imagecodecs
    import tifffile

    orientation = 1
    if path.lower().endswith(".npy"):
        image = np.load(path)
    elif path.lower().endswith(TIFF):
        with tifffile.TiffFile(path) as file:
            image = file.asarray()
            orientation = file.pages[0].tags.valueof(ORIENTATION, 1)
    else:
        image = imagecodecs.imread(path)
        with Image.open(path) as header:
            orientation = header.getexif().get(ORIENTATION, 1)
    image = np.atleast_3d(image)
    if image.shape[0] < image.shape[2]:
        image = np.moveaxis(image, 0, 2)  # [H, W, C]
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    down, right = (-1 if orientation in turned else 1 for turned in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return image[::down, ::right]


def on_white(image: np.ndarray) -> np.ndarray:
    """Return a picture [H, W, C] of integers without its opacity, if it has one, blended with
    white."""
    if image.shape[2] not in (2, 4):
        return image
    colours = image[..., :-1]
    opacity = image[..., -1:]
    white = np.iinfo(image.dtype).max
    if not opacity.any():  # all transparent
        return colours
    return np.rint(white - (white - colours.astype(np.float64)) * (opacity / white)).astype(
        image.dtype
    )


def unit_planes(path: str) -> list[Image.Image]:
    """Return one plane per channel, floats from 0 to 1 if the file has more than 8 bits, else from
    0 to 255."""
    image = on_white(read(path)) if PICTURE else read(path)[..., prepare.get("bands", slice(None))]
    if image.dtype != np.uint8:
        scale = prepare.get("range" if not PICTURE else "grey_range", "full")
        low, high = np.array([0, 65535] if scale in ("full", "auto") else scale, np.float64).T
        image = np.clip((image - low) / (high - low), 0, 1).astype(np.float32)
    return [Image.fromarray(plane) for plane in np.moveaxis(image, 2, 0)]


def resized_sides(size: tuple[int, int]) -> tuple[int, int]:
    """Return the width and height that an image of this size is resized to."""
    if prepare["crop"] == "squash":
        return prepare["resize"], prepare["resize"]
    if prepare["crop"] == "border":
        ratio = max(size) / prepare["resize"]
        return max(1, round(size[0] / ratio)), max(1, round(size[1] / ratio))
    shortest = min(size)
    return int(prepare["resize"] * size[0] / shortest), int(prepare["resize"] * size[1] / shortest)


def start(side: int, size: int) -> int:
    """Return the first pixel of the centre of a side. It is negative if the side is padded."""
    if side < size:
        return -((size - side) // 2)
    return round((side - size) / 2)


def prepared(path: str) -> np.ndarray:
    """Return an image as the network expects it, float32 [C, H, W]: resized, cropped or padded,
    normalised."""
    planes = unit_planes(path)
    height, width = prepare["size"]
    sides = resized_sides(planes[0].size)
    method = Image.Resampling[prepare["interpolation"].upper()]
    left = start(sides[0], width)
    top = start(sides[1], height)
    box = (left, top, left + width, top + height)
    # [H, W, C]
    pixels = np.dstack([np.asarray(plane.resize(sides, method).crop(box)) for plane in planes])
    pixels = pixels.clip(0, 1) if planes[0].mode == "F" else pixels / np.float32(255)
    if prepare["channels"] == "RGB" and pixels.shape[2] == 1:
        pixels = pixels.repeat(3, axis=2)
    if prepare["channels"] == "L" and pixels.shape[2] == 3:
        pixels = pixels @ LUMA
    mean = np.array(prepare["mean"], np.float32)
    white = 65535 if planes[0].mode == "F" else 255
    inside = np.asarray(Image.new("L", sides, 1).crop(box))[..., None]
    pixels = np.where(inside, pixels, np.rint(mean * white) / np.float32(white))
    normalised = (pixels - mean) / np.array(prepare["std"], np.float32)
    return normalised.transpose(2, 0, 1)


unreadable = 0
for path in sys.argv[2:]:
    try:
        image = prepared(path)
    except OSError as error:
        unreadable += 1
        print(f"{path}: {error}", file=sys.stderr)
        continue
    (logits,) = session.run(["logits"], {"images": image[None]})
    shares = np.exp(logits[0] - logits[0].max())
    shares /= shares.sum()
    print(f"{path},{classes[shares.argmax()]},{shares.max():.4f}")
sys.exit(2 if unreadable else 0)
