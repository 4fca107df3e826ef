"""What images look like, as far as views depend on it: their colours, their backgrounds, their size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from idmm.data.composite import composite
from idmm.data.images import Bound, CentreCrop, fitted, resized

SIDE = 32  # pixels of the small images that are compared as they are
LINES = 256  # of an image that are looked at
UNCOLOURED = 4  # most levels between a pixel's channels that are no colour
PLAIN = 0.5  # share of an image's border of one colour, or of neighbours alike, from which it is drawn or cut out
LARGE = "[{count: 2, scale: [0.35, 1.0]}]"  # crops that hold enough of a small or plain image
SMALL = 64  # short side (pixels) under which images are tiny


@dataclass(frozen=True)
class Look:
    """Of one image."""

    short: int  # side (pixels)
    grey: bool  # no pixel has a colour
    border: float  # share of the border that has its most frequent colour
    flat: float  # share of neighbouring pixels that are the same
    pixels: np.ndarray  # its middle as a training image and as one to evaluate on, grey levels [2, SIDE, SIDE, C]


def look_at(image: np.ndarray, crop: CentreCrop, bound: Bound = None) -> Look:
    """Returns the look of an image, uint8 or uint16 [H, W, C]; ``crop``: how it would be evaluated, ``bound``: what
    would be kept of it to train on."""
    shown = composite(image, ends=np.array([[0, np.iinfo(image.dtype).max]]))  # as it is, uint8 [H, W, 3]
    lines = shown[:: max(1, len(shown) // LINES)]  # [R, W, 3]
    edges = np.concatenate([shown[0], shown[-1], shown[:, 0], shown[:, -1]])  # [2 H + 2 W, 3]
    _, count = np.unique(edges, axis=0, return_counts=True)
    alike = (lines[:, 1:] == lines[:, :-1]).all(-1)
    return Look(
        short=min(image.shape[:2]),
        grey=bool(np.all(lines.max(-1) - lines.min(-1) <= UNCOLOURED)),
        border=float(count.max() / len(edges)),
        flat=float(alike.mean()) if alike.size else 1.0,
        pixels=np.stack([small(fitted(image, bound), crop.crop_pct), small(crop(image), 1.0)]),
    )


def small(image: np.ndarray, crop_pct: float) -> np.ndarray:
    """Returns the middle of an image, ``crop_pct`` of its short side, averaged down: uint8 or uint16 [H, W, C] -> grey
    levels of 0 to 255, [SIDE, SIDE, C]."""
    (h, w), side = image.shape[:2], crop_pct * min(image.shape[:2])
    box = ((w - side) / 2, (h - side) / 2, (w + side) / 2, (h + side) / 2)
    pixels = resized(image, SIDE, SIDE, Image.Resampling.BOX, box)
    return pixels if pixels.dtype == np.uint8 else pixels / np.float32(257)


def summary(looks: Sequence[Look]) -> dict:
    """Returns of several images the share that is grey, and the medians of ``border``, ``flat`` and ``short``."""
    if not looks:
        return {}
    middle = {name: float(np.median([getattr(look, name) for look in looks])) for name in ("border", "flat", "short")}
    return {"images": len(looks), "grey": float(np.mean([look.grey for look in looks])), **middle}


def suggestions(found: dict, colours: bool = True) -> list[dict]:
    """Returns what views such images suggest in stage 1: ``about``, ``why`` (measured on them) and ``flags``.

    Args:
        found: Their :func:`summary`.
        colours: Whether their channels are red, green and blue.
    """
    if not found:
        return []
    grey, border, flat, short = (found[name] for name in ("grey", "border", "flat", "short"))
    lines = []

    def add(about: str, why: str, flags: str) -> None:
        lines.append({"about": about, "why": why, "flags": flags})

    if colours and grey == 1:
        why = f"all {found['images']:,} training images are grey: hue, saturation and grey change nothing in them"
        why += "; with --data.in_chans 1 the model sees one channel, not three equal ones, slightly faster"
        add("grey", why, "--views.grey_prob 0")
    if short < SMALL:
        size = int(max(32, -(-short // 16) * 16))
        why = f"half of the training images have a short side of {short:.0f} px or less: small crops are a few pixels"
        flags = f"--views.size {size} --views.crops '{LARGE}' --views.blur_prob 0"
        add("tiny", f"{why} that look alike, and blur takes away the rest", flags)
    if max(border, flat) >= PLAIN:
        why = f"in the median training image {100 * border:.0f} % of the border has one colour and {100 * flat:.0f} %"
        why += " of neighbouring pixels are the same, as in drawings and cut-outs: small crops may show the background"
        why += " alone"
        flags = f"--views.crops '{LARGE}'"
        if colours and grey < 1:
            why += ", and strong colours may change what tells such images apart"
            flags += " --views.jitter '[0.4, 0.4, 0.4, 0.1]' --views.grey_prob 0.1"
        add("plain", why, flags)
    return lines
