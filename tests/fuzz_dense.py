"""Malformed COCO files and masks, read by ``idmm detect`` and ``idmm segment``.

The commands stop before training. By then all targets were read, drawn at two sizes and compared
with themselves.
"""

import contextlib
import io
import json
import os
import shutil
from unittest import mock

import numpy as np
from dense_trees import coco_tree, mask_tree
from fuzz import (
    Case,
    Done,
    damaged,
    family,
    pick,
    replace,
    spoil,
    strange,
    strange_place,
)
from helpers import VIT, as_flags
from PIL import Image

SIDE = 64  # of the canvas
FLAGS = {
    "model.name": "vit_tiny_patch16_224",
    "model.kwargs": VIT,
    "data.workers": 0,
    "data.cache": "off",
    "train.size": SIDE,
    "train.epochs": 1,
    "train.device": "cpu",
    "train.precision": "fp32",
}


@contextlib.contextmanager
def until_training():
    """Stop the command when its images are stored. Its targets are used once before."""
    from idmm.dense import run as dense_run
    from idmm.dense.evaluate import Objects, detection_scores
    from idmm.dense.transforms import DenseTransform
    from idmm.training.run import Run

    store = Run.store

    def use(run, listing, folder):
        stores = store(run, listing, folder)
        for split in stores.parts.values():
            numbers = np.arange(len(split))
            for augment in (None, run.config.augment):
                DenseTransform(split, SIDE, (0.5,) * 3, (0.5,) * 3, augment)(0, numbers)
            if run.config.COMMAND == "detect":
                objects = [
                    Objects(t.boxes, t.labels, np.ones(len(t.boxes)), None) for t in split.targets
                ]
                detection_scores(objects, split.targets, split.classes)
        raise Done

    with (
        mock.patch.object(Run, "store", use),
        mock.patch.object(dense_run, "try_sizes"),
    ):
        yield


def dense_case(command, root):
    out = root / "out"
    flags = as_flags(FLAGS, {})
    return Case(
        [command, "--data.root", root, "--out", out, *flags],
        [out],
        until_training,
    )


def template(kind, folder):
    """A tree that is good, next to ``folder``, made once: 3 training images and 2 others."""
    root = folder.parent / f"template-{kind}"
    if root.exists():
        return root
    if kind == "masks":
        mask_tree(root, train=3, val=2)
    else:
        coco_tree(root, form=kind, train=3, val=2)
    return root


# ---------------------------------------------------------------------- COCO
@family(3500)
def coco(folder, rng):
    """COCO's JSON with bad values, bad bytes or bad images."""
    form = pick(rng, "polygons rle packed boxes")
    shutil.copytree(template(form, folder), folder, dirs_exist_ok=True)
    path = folder / "annotations" / pick(rng, "train.json train.json val.json")
    content = json.loads(path.read_text())
    kind = pick(rng, 6 * "values " + 3 * "rows outline " + "bytes images file_name")
    text = None
    if kind == "values":
        for _ in range(int(rng.integers(1, 4))):
            spoil(content, rng)
    elif kind == "rows":
        row = pick(
            rng,
            content[pick(rng, "annotations annotations images categories")],
        )
        row[pick(rng, list(row))] = strange(rng)
    elif kind == "outline":
        spoil_outline(pick(rng, content["annotations"]), rng)
    elif kind == "bytes":
        text = damaged(json.dumps(content).encode(), rng)
    elif kind == "images":
        image = folder / path.stem / pick(rng, "000.png 001.png")
        spoil_image(image, rng)
    else:
        pick(rng, content["images"])["file_name"] = strange_name(folder, path.stem, rng)
    if path.is_file():
        replace(path, json.dumps(content).encode() if text is None else text)
    return dense_case("detect", folder)


def spoil_outline(row, rng):
    """Make an outline that does not fit its image."""
    segment = row.get("segmentation")
    if isinstance(segment, dict) and isinstance(segment["counts"], str):
        old = segment["counts"]
        text = damaged(old.encode(), rng).decode("latin-1")
        segment["counts"] = pick(rng, [text, text, old[:-1], old * 2, "0" * 9999])
    elif isinstance(segment, dict):
        counts = segment["counts"]
        segment["counts"] = pick(rng, [counts[:-1], [-1, *counts], [], [0.5] * 4, [2**32, *counts]])
    else:
        points = [float(value) for value in rng.integers(-50, 200, int(rng.integers(0, 9)))]
        row["segmentation"] = pick(rng, [[points], points, [[1e9] * 6]])


def strange_name(folder, part, rng):
    """Return a name of an image's file that is absolute, leaves its folder or is odd. Some files
    exist."""
    shutil.copy(folder / part / "000.png", folder / "outside.png")
    os.symlink(folder, folder / part / "link")
    names = [
        "../outside.png",
        "link/outside.png",
        "link\\000.png",
        "./000.png",
        ".",
        "000.png\0",
    ]
    return pick(rng, [*names, str(folder / "outside.png"), strange(rng)])


# ---------------------------------------------------------------------- masks
@family(3000)
def masks(folder, rng):
    """Masks that are no masks, of other sizes, values, modes and bytes, and bad lists of
    classes."""
    shutil.copytree(template("masks", folder), folder, dirs_exist_ok=True)
    part = pick(rng, "train train val")
    mask, image = (folder / kind / part / "000.png" for kind in ("masks", "images"))
    kind = pick(rng, "bytes mode mode values values image classes files")
    if kind == "bytes":
        replace(mask, damaged(mask.read_bytes(), rng))
    elif kind == "mode":
        spoil_image(mask, rng)
    elif kind == "values":
        for path in pick(rng, [[mask], sorted((folder / "masks").rglob("*.png"))]):
            spoil_values(path, rng)
    elif kind == "image":
        spoil_image(image, rng)
    elif kind == "classes":
        text = "\n".join(str(strange(rng)) for _ in range(int(rng.integers(1, 5))))
        text = text.encode("utf-8", "surrogatepass")
        replace(
            folder / "classes.txt",
            pick(rng, [text, text * 90, damaged(text, rng)]),
        )
    else:
        strange_place(pick(rng, [mask, mask.parent, image, folder / "classes.txt"]), rng)
    return dense_case("segment", folder)


def spoil_values(path, rng):
    """Give a mask other numbers, in its size."""
    values = np.asarray(Image.open(path))
    some = [
        [0, 255],
        [255],
        [0, 128],
        [0],
        [1],
        [0, 1, 2, 3, 4],
        [254, 255],
        [0, 1, 65535],
    ]
    drawn = rng.choice(pick(rng, [*some, list(range(256))]), values.shape)
    kind = np.uint16 if drawn.max() > 255 else np.uint8
    replace(path, encoded(Image.fromarray(drawn.astype(kind))))


def spoil_image(path, rng):
    """Write another image, or a damaged one, in the place of one."""
    with Image.open(path) as image:
        image.load()
    grey = image.convert("L")
    mode = pick(rng, "1 L P LA RGB RGBA CMYK I I;16 F size turned bytes")
    options = {}
    if mode == "size":
        image = image.resize(pick(rng, [(1, 1), (3, 5), image.size[::-1], (1, 4000)]))
    elif mode == "turned":
        exif = Image.Exif()
        exif[0x0112] = pick(rng, [*range(10), 65535])
        options["exif"] = exif
    elif mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * pick(rng, [1, 257]))
    elif mode != "bytes":
        image = grey.convert(mode)
    form = pick(rng, "PNG PNG PNG TIFF JPEG BMP GIF WEBP")
    try:
        content = encoded(image, form, **options)
    # this format has no such mode
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        content = encoded(grey, "PNG")
    replace(path, damaged(content, rng) if mode == "bytes" else content)


def encoded(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, format=form, **options)
    return file.getvalue()
