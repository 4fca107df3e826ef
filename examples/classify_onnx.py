"""Print the class of each image by an exported classifier, with neither torch nor idmm.

python examples/classify_onnx.py MODEL.onnx IMAGE [IMAGE ...]

It needs numpy, onnxruntime and Pillow. Images of more than 8 bits or with other channels than RGB and grey need
imagecodecs and tifffile as well. Pictures are taken as opaque and upright.
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
metadata = session.get_modelmeta().custom_metadata_map
prepare, classes = json.loads(metadata["preprocessing"]), json.loads(metadata["classes"])
PICTURE = prepare["channels"] in ("RGB", "L")


def read_picture(path: str) -> list[Image.Image]:
    """Return an 8-bit picture as its only plane."""
    return [Image.open(path).convert(prepare["channels"])]


def read_planes(path: str) -> list[Image.Image]:
    """Return one plane per channel, floats from 0 to 1 if the file has more than 8 bits, else from 0 to 255."""
    import imagecodecs
    import tifffile

    if path.lower().endswith(".npy"):
        image = np.load(path)
    else:
        image = tifffile.imread(path) if path.lower().endswith((".tif", ".tiff")) else imagecodecs.imread(path)
    image = np.atleast_3d(image)
    if image.shape[0] < image.shape[2]:
        image = np.moveaxis(image, 0, 2)  # [H, W, C]
    if PICTURE:
        image = image[..., : 3 if image.shape[2] > 2 else 1]  # no opacity
    image = image[..., prepare.get("bands", slice(None))]
    if image.dtype != np.uint8:
        scale = prepare.get("range") or prepare["grey_range"]
        low, high = np.array([0, 65535] if scale == "full" else scale, np.float64).T
        image = np.clip((image - low) / (high - low), 0, 1).astype(np.float32)
    return [Image.fromarray(plane) for plane in np.moveaxis(image, 2, 0)]


def prepared(path: str) -> np.ndarray:
    """Return an image as the network expects it, float32 [C, H, W]: resized, cropped, normalised."""
    planes = read_planes(path) if "grey_range" in prepare or not PICTURE else read_picture(path)
    (height, width), (across, down) = prepare["size"], planes[0].size
    sides = [int(prepare["resize"] * side / min(across, down)) for side in (across, down)]
    method = Image.Resampling[prepare["interpolation"].upper()]
    left, top = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
    box = (left, top, left + width, top + height)
    pixels = np.dstack([np.asarray(plane.resize(sides, method).crop(box)) for plane in planes])  # [H, W, C]
    pixels = pixels.clip(0, 1) if planes[0].mode == "F" else pixels / np.float32(255)
    if prepare["channels"] == "L" and pixels.shape[2] == 3:  # colours to brightness
        pixels = pixels @ np.array([[0.299], [0.587], [0.114]], np.float32)
    normalised = (pixels - np.array(prepare["mean"], np.float32)) / np.array(prepare["std"], np.float32)
    return normalised.transpose(2, 0, 1)


for path in sys.argv[2:]:
    (logits,) = session.run(["logits"], {"images": prepared(path)[None]})
    shares = np.exp(logits[0] - logits[0].max())
    shares /= shares.sum()
    print(f"{path},{classes[shares.argmax()]},{shares.max():.4f}")
