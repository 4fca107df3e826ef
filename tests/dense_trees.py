"""Small images with exact boxes, outlines and masks: scikit-learn's digits on canvases, written in
each layout.

An image shows one to four digits of three classes in cells of its own, so that none hides another;
the outline of a digit is that of its pixels to the last one.
"""

import json
from dataclasses import dataclass

import numpy as np
from PIL import Image
from pycocotools import mask as coco
from sklearn.datasets import load_digits

CLASSES = ["zero", "one", "seven"]
DIGITS = (0, 1, 7)
IDS = (3, 7, 11)  # COCO's category numbers need not be 0, 1, 2
SIZES = (
    (64, 96),
    (96, 64),
    (80, 80),
)  # height and width of the canvases (pixels)
CELL = 32  # side of the place of one digit (pixels)
ADE_CLASSES = 150


@dataclass
class Scene:
    """A canvas: ``image`` uint8 [H, W, 3]; of its n digits ``boxes`` [n, 4] (x1, y1, x2, y2),
    ``labels`` [n] and ``masks`` bool [n, H, W]."""

    image: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    masks: np.ndarray

    @property
    def mask(self):
        """Class of each pixel from 1, 0 for the background: uint8 [H, W]."""
        classes = np.zeros(self.image.shape[:2], dtype=np.uint8)
        for label, mask in zip(self.labels, self.masks, strict=True):
            classes[mask] = label + 1
        return classes


def scene(seed, size=None, objects=None):
    """A canvas of ``size`` (else one of three) with ``objects`` digits (else one to four)."""
    rng = np.random.default_rng(seed)
    digits = load_digits()
    h, w = size or SIZES[seed % len(SIZES)]
    image = rng.integers(0, 60, (h, w, 3), dtype=np.uint8)
    cells = [(y, x) for y in range(0, h - CELL + 1, CELL) for x in range(0, w - CELL + 1, CELL)]
    count = int(rng.integers(1, 5)) if objects is None else objects
    boxes = []
    labels = []
    masks = []
    for n, cell in enumerate(rng.permutation(len(cells))[:count]):
        label = (seed + n) % len(DIGITS)
        chosen = rng.choice(np.flatnonzero(digits.target == DIGITS[label]))
        scale = int(rng.integers(2, CELL // 8 + 1))
        stamp = np.kron(digits.images[chosen] > 4, np.ones((scale, scale), dtype=bool))
        free = CELL - len(stamp)
        y, x = np.array(cells[cell]) + rng.integers(0, free + 1, 2)
        mask = np.zeros((h, w), dtype=bool)
        mask[y : y + len(stamp), x : x + len(stamp)] = stamp
        image[mask] = rng.integers(160, 256, 3, dtype=np.uint8)
        rows = np.flatnonzero(mask.any(axis=1))
        columns = np.flatnonzero(mask.any(axis=0))
        boxes.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        labels.append(label)
        masks.append(mask)
    masks = np.array(masks) if masks else np.zeros((0, h, w), dtype=bool)
    return Scene(
        image,
        np.array(boxes, float).reshape(-1, 4),
        np.array(labels, int),
        masks,
    )


def scenes(part, count, **options):
    """The canvases of a split; every third one of another shape, none in two splits."""
    first = {"train": 0, "val": 1000, "test": 2000}[part]
    return [scene(first + i, **options) for i in range(count)]


def polygons(mask):
    """Exact outline of a mask as COCO's polygons: a rectangle for each run of pixels in a row."""
    rectangles = []
    for y, row in enumerate(mask.astype(int)):
        edges = np.flatnonzero(np.diff(row, prepend=0, append=0))
        for x1, x2 in edges.reshape(-1, 2).tolist():
            rectangles.append([x1, y, x2, y, x2, y + 1, x1, y + 1])
    return rectangles


def packed(mask):
    """A mask as COCO's compressed RLE."""
    encoded = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


def run_lengths(mask):
    """A mask as COCO's uncompressed RLE: lengths of runs down the columns, background first."""
    flat = mask.T.ravel().astype(int)
    edges = np.flatnonzero(np.diff(flat, prepend=0))
    return {
        "size": list(mask.shape),
        "counts": np.diff([0, *edges, len(flat)]).tolist(),
    }


OUTLINES = {"polygons": polygons, "rle": run_lengths, "packed": packed}
COUNTS = {"train": 6, "val": 3}


def coco_tree(root, form="polygons", official=False, change=None, **counts):
    """Writes ROOT/annotations/PART.json over ROOT/PART: ``coco_tree(root, train=6, val=3)``.

    ``form``: one of OUTLINES, or boxes, without outlines; ``official``: under COCO's own names;
    ``change(part, content)`` may spoil what is written. Returns the canvases by part and name.
    """
    written = {}
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    for part, count in (counts or COUNTS).items():
        folder = root / (f"{part}2017" if official else part)
        folder.mkdir(exist_ok=True)
        content = {"images": [], "annotations": [], "categories": []}
        for number, name in zip(IDS, CLASSES, strict=True):
            content["categories"].append({"id": number, "name": name})
        written[part] = {}
        for i, canvas in enumerate(scenes(part, count)):
            name = f"{i:03d}.png"
            written[part][name] = canvas
            Image.fromarray(canvas.image).save(folder / name)
            height, width = canvas.image.shape[:2]
            row = {
                "id": 100 + i,
                "file_name": name,
                "height": height,
                "width": width,
            }
            content["images"].append(row)
            for box, label, mask in zip(canvas.boxes, canvas.labels, canvas.masks, strict=True):
                x1, y1, x2, y2 = box.tolist()
                row = {
                    "id": 1 + len(content["annotations"]),
                    "image_id": 100 + i,
                    "category_id": IDS[label],
                    "iscrowd": 0,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": int(mask.sum()),
                }
                if form in OUTLINES:
                    row["segmentation"] = OUTLINES[form](mask)
                content["annotations"].append(row)
        if change is not None:
            change(part, content)
        name = f"instances_{part}2017.json" if official else f"{part}.json"
        (root / "annotations" / name).write_text(json.dumps(content))
    return written


def mask_tree(root, **counts):
    """Writes ROOT/images/PART/*.png, ROOT/masks/PART/*.png with a palette (0 the background, 1 to 3
    the digits; a frame of 255 around every image) and ROOT/classes.txt; returns the canvases by
    part and name."""
    written = {}
    palette = np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes()
    for part, count in (counts or COUNTS).items():
        written[part] = {f"{i:03d}.png": canvas for i, canvas in enumerate(scenes(part, count))}
        for name, canvas in written[part].items():
            values = canvas.mask
            values[[0, -1]] = 255
            values[:, [0, -1]] = 255
            mask = Image.fromarray(values)
            mask.putpalette(palette)
            _save(Image.fromarray(canvas.image), root / "images" / part / name)
            _save(mask, root / "masks" / part / name)
    (root / "classes.txt").write_text("\n".join(["background", *CLASSES]) + "\n")
    return written


def ade_tree(root, **counts):
    """Writes ADE20K's layout: 0 is other, 1 to 3 the digits, 4 to 150 are classes without a
    pixel."""
    for part, count in counts.items():
        folder = {"train": "training", "val": "validation"}[part]
        for i, canvas in enumerate(scenes(part, count)):
            name = f"ADE_{part}_{i:08d}.png"
            _save(Image.fromarray(canvas.image), root / "images" / folder / name)
            _save(
                Image.fromarray(canvas.mask),
                root / "annotations" / folder / name,
            )
    rows = ["Idx\tRatio\tTrain\tVal\tName"]
    for i in range(1, ADE_CLASSES + 1):
        name = CLASSES[i - 1] if i <= len(CLASSES) else f"thing {i}"
        rows.append(f"{i}\t0.1\t1\t1\t{name}")
    (root / "objectInfo150.txt").write_text("\n".join(rows) + "\n")


def _save(image, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


TURNS = {  # what a camera stores, given the upright image, by EXIF's orientation
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}


def store_turned(path, orientation):
    """Writes an image as a camera would that was held in another way."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.ascontiguousarray(TURNS[orientation](np.asarray(Image.open(path))))
    Image.fromarray(stored).save(path, exif=exif)
