"""Pictures of several runs: sheets of crops, a comparison over seeds, accuracy over labels."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from idmm.pictures import STYLES, log_axis, look, plain_axis, save, shortened

ImageBlock = tuple[str, list[list[np.ndarray]]]  # a title, and rows of images
GAP = 4  # pixels between the images of a sheet
LEAST, MOST = 48, 96  # sides of its images (pixels)
TOP1 = "top-1 accuracy on the test images (%)"


# ---------------------------------------------------------------------- sheets of images
def image_sheet(blocks: list[ImageBlock], path: str | Path, note: str = "") -> None:
    """Draws blocks of images side by side, each under its title, above a note; images are [S, S, 3] in [0, 1] or
    uint8. Pixels of small images stay squares."""
    cell, between, head, edge = 0.85, 0.3, 0.42, 0.12  # inches; the cell with its gap
    side = max(max(image.shape[:2]) for _, rows in blocks for row in rows for image in row)
    side = MOST if side > MOST else side * max(1, -(-LEAST // side))
    images = [_sheet(rows, side) for _, rows in blocks]
    pixel = cell * len(blocks[0][1]) / (images[0].height + GAP)
    widths = [max(1.25, image.width * pixel) for image in images]
    width = sum(widths) + between * (len(images) - 1) + 2 * edge
    below = edge + (0.2 if note else 0)
    height = images[0].height * pixel + head + below
    figure = Figure(figsize=(width, height))
    left = edge
    figure.text(edge / width, 0.14 / height, note, va="center", fontsize=7.5, color="0.35")
    for (title, _), image, block in zip(blocks, images, widths, strict=True):
        figure.text((left + block / 2) / width, 1 - head / 2 / height, title, ha="center", va="center", fontsize=8)
        axis = figure.add_axes((left / width, below / height, block / width, 1 - (head + below) / height))
        axis.imshow(image, interpolation="nearest")
        axis.set_axis_off()
        left += block + between
    save(figure, path)


def _sheet(rows: list[list[np.ndarray]], side: int) -> Image.Image:
    """Images as one, on white, each with its longer side that long."""
    across, down = (number * (side + GAP) - GAP for number in (max(map(len, rows)), len(rows)))
    sheet = Image.new("RGB", (across, down), "white")
    for y, images in enumerate(rows):
        for x, image in enumerate(images):
            if image.dtype != np.uint8:
                image = np.rint(255 * np.clip(image, 0, 1)).astype(np.uint8)
            height, width = image.shape[:2]
            size = [max(1, round(one * side / max(height, width))) for one in (width, height)]
            resampling = Image.Resampling.NEAREST if max(height, width) < side else Image.Resampling.LANCZOS
            place = [n * (side + GAP) + (side - one) // 2 for n, one in zip((x, y), size, strict=True)]
            sheet.paste(Image.fromarray(np.ascontiguousarray(image)).resize(size, resampling), place)
    return sheet


# ---------------------------------------------------------------------- accuracies
def comparison(
    scores: dict[str, Sequence[float]], path: str | Path, title: str, one_class: float, untaught: Sequence[str] = ()
) -> None:
    """Draws a bar for each label's mean with its standard deviation, and a dot for each seed.

    Args:
        scores: Label -> a score for each seed, in percent.
        path: PNG to write.
        title: Above the picture.
        one_class: What naming the largest class every time would reach (percent), a dotted line.
        untaught: Labels of what no network learned, drawn in grey.
    """
    figure = Figure(figsize=(1.6 + 1.5 * len(scores), 4.2), layout="constrained")
    axis = figure.subplots()
    table = [np.asarray(values, dtype=float) for values in scores.values()]
    for place, (label, values) in enumerate(zip(scores, table, strict=True)):
        style = look(place, **({"color": "0.4"} if label in untaught else {}))
        colour, mean = style["color"], values.mean()
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        axis.bar(place, mean, width=0.62, color=colour, alpha=0.35, edgecolor=colour, linewidth=1.2)
        axis.errorbar(place, mean, spread, color="black", capsize=4, linewidth=1.2, marker="_", zorder=4)
        dots = {**style, "linestyle": "", "markeredgecolor": "white", "markersize": 7, "zorder": 3, "clip_on": False}
        axis.plot(np.full(len(values), place - 0.18), values, **dots)
        text = f"{mean:.1f} ± {spread:.1f}" if len(values) > 1 else f"{mean:.1f}"
        axis.annotate(text, (place, 0), (0, 6), textcoords="offset points", ha="center", fontsize=11, weight="bold")
    axis.set_xticks(range(len(scores)), list(scores))
    axis.set(xlim=(-0.6, len(scores) - 0.4), ylim=(0, 100), ylabel=TOP1)
    _accuracy_axis(axis, title, one_class)
    key = [Patch(color="0.8", label="mean"), Line2D([], [], label="one seed", **look(6, linestyle="", marker="o"))]
    if any(len(values) > 1 for values in table):
        lines = {"color": "black", "linestyle": "", "marker": "|", "markersize": 12}
        key.append(Line2D([], [], label="± 1 standard deviation over seeds", **lines))
    figure.legend(handles=key, ncols=len(key), loc="outside lower center", fontsize=8, frameon=False)
    save(figure, path)


def label_curves(
    panels: dict[str, dict[str, list[tuple[float, float, float]]]], path: str | Path, *, one_class: float,
    ylabel: str = TOP1, seeds: int = 1, untaught: Sequence[str] = (), note: str = "",
) -> None:  # fmt: skip
    """Draws accuracy over the labelled images per class, with bars of one standard deviation over draws.

    Args:
        panels: Title -> label -> points (images a class, mean, standard deviation), in percent.
        path: PNG to write.
        one_class: What naming the largest class every time would reach (percent), a dotted line.
        ylabel: Of the accuracies.
        seeds: Draws that the mean is of.
        untaught: Labels of networks with fresh weights, drawn in grey.
        note: For below the panels.
    """
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    taught = [label for label in labels if label not in untaught]
    looks = {label: look(n) for n, label in enumerate(taught)}
    grey = {"color": "0.45", "marker": "*"}
    looks |= {label: {**grey, "linestyle": STYLES[3 - n % 4]} for n, label in enumerate(untaught)}
    figure = Figure(figsize=(3.4 + 3.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for place, (label, points) in enumerate(curves.items()):
            x, mean, std = np.array(points, dtype=float).T
            x = x * 1.02 ** (place - (len(curves) - 1) / 2)  # so that bars of several curves do not hide each other
            line = {"linewidth": 1.8, "markeredgecolor": "white", "markersize": 7, **looks[label]}
            axis.plot(x, mean, label=shortened(label), **line)
            axis.errorbar(x, mean, std, fmt="none", ecolor=line["color"], elinewidth=1, capsize=2)
        ticks = sorted({x for points in curves.values() for x, _, _ in points})
        log_axis(axis, ticks, [f"{x:g}" for x in ticks])
        axis.set(xlim=(ticks[0] / 1.2, ticks[-1] * 1.2), xlabel="labelled images a class")
        _accuracy_axis(axis, title, one_class)
    axes[0].set(ylim=(0, 100), ylabel=ylabel)
    bars = f"mean, bars: ± 1 standard\ndeviation over {seeds} draws" if seeds > 1 else None
    lines = {line.get_label(): line for axis in axes for line in axis.lines if not line.get_label().startswith("_")}
    where = {"loc": "outside right upper", "frameon": False, "alignment": "left"}
    figure.legend(lines.values(), lines, fontsize=9, title=bars, title_fontsize=8, **where)
    if note:
        wrapping = textwrap.TextWrapper(50 * (1 + len(panels)), break_on_hyphens=False, break_long_words=False)
        figure.supxlabel("\n".join(map(wrapping.fill, note.split("\n"))), x=0.01, ha="left", fontsize=8)
    save(figure, path)


def _accuracy_axis(axis, title: str, one_class: float) -> None:
    """The title, and the line of the largest class."""
    axis.set_title(title, fontsize=11)
    axis.axhline(one_class, color="0.4", linewidth=1, linestyle=":")
    where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    axis.annotate("largest class", (1, one_class), (-2, 3), fontsize=8, ha="right", **where)
    plain_axis(axis)
