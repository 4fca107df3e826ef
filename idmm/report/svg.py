"""Figures and images as they stand in a page: whole, inline, and fit for its light and its dark look."""

import base64
import io
import re
import warnings

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from idmm.pictures import COLOURS, DPI

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
QUALITY = 88  # of WebP
GAP = 4  # pixels between the images of a sheet
LEAST, MOST = 48, 96  # sides that images of a sheet are shown at (pixels)
# colours of figures -> theirs in a light page, in a dark one
THEMES = {
    **{of.lower(): (of, dark) for of, dark in zip(
        COLOURS, ("#4aa3e0", "#f07f3c", "#1fbf92", "#e39cc6", "#f3b63a", "#9bd6f8", "#e8e8e8", "#f7ee7a", "#a8326e",
                  "#6f5fd0"), strict=True)},
    "#ffffff": ("#ffffff", "#1d2025"), "#000000": ("#1b1b1b", "#e8e8e8"), "#262626": ("#262626", "#e8e8e8"),
    "#e6e6e6": ("#e6e6e6", "#343941"), "#b3b3b3": ("#b3b3b3", "#5a606a"), "#999999": ("#999999", "#7d838c"),
    "#666666": ("#666666", "#a9adb3"),
}  # fmt: skip
ImageBlock = tuple[str, list[list[np.ndarray]]]  # a title, and rows of images
_STYLE = "".join(f"--c{name[1:]}:{{{n}}};" for n, name in enumerate(THEMES))


def themed_svg(figure: Figure) -> str:
    """Returns a figure as SVG that looks right on light and on dark ground: it brings its own, and follows the reader's
    ``prefers-color-scheme``. Letters stay letters, drawn in the reader's own font."""
    text = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": "idmm"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts may have it
        figure.savefig(text, format="svg", dpi=DPI, facecolor="white", metadata={"Date": None})
    known = "|".join(name[1:] for name in THEMES)
    svg = re.sub(rf"#({known})\b(?=[;\"'])", r"var(--c\1)", text.getvalue())
    svg = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", rf"\1 {FONTS}", svg)
    light, dark = (_STYLE.format(*colours) for colours in zip(*THEMES.values(), strict=True))
    style = f":root{{{light}fill:var(--c000000)}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return svg.replace("<defs>", f"<style>{style}</style>\n<defs>", 1)


def data_uri(kind: str, content: bytes) -> str:
    """Returns a file that stands in the page itself."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def webp(image: np.ndarray) -> str:
    """Returns an image, uint8 [H, W, 3 or 4], as a data URI."""
    content = io.BytesIO()
    Image.fromarray(image).save(content, "webp", quality=QUALITY, method=4)
    return data_uri("image/webp", content.getvalue())


def sheets(blocks: list[ImageBlock]) -> list[tuple[str, np.ndarray]]:
    """Returns each block's title, and its images, uint8 or [0, 1] [H, W, 3] each, as one, uint8 [H, W, 4].

    All get the longest side that there is, or what of that fits a page: pixels of small images stay squares.
    """
    side = max(max(image.shape[:2]) for _, rows in blocks for row in rows for image in row)
    side = MOST if side > MOST else side * max(1, -(-LEAST // side))
    return [(title, _sheet(rows, side)) for title, rows in blocks]


def _sheet(rows: list[list[np.ndarray]], side: int) -> np.ndarray:
    """Images as one, with clear gaps between them."""
    across, down = (number * (side + GAP) - GAP for number in (max(map(len, rows)), len(rows)))
    made = Image.new("RGBA", (across, down))
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            picture = Image.fromarray(thumbnail(image, side))
            left, top = (side - picture.width) // 2, (side - picture.height) // 2
            made.paste(picture, (column * (side + GAP) + left, row * (side + GAP) + top))
    return np.asarray(made)


def thumbnail(image: np.ndarray, side: int = MOST) -> np.ndarray:
    """Returns an image, uint8 or in [0, 1], [H, W, 3], with its longer side that long, uint8."""
    if image.dtype != np.uint8:
        image = np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8)
    height, width = image.shape[:2]
    factor = side / max(height, width)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    way = Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, way))
