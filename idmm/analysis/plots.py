"""Pictures of runs, written as PNG: loss curves, augmented crops, a comparison over seeds, accuracy over labels.

Figures are made without pyplot, so no window opens and a user's own figures, backend and settings stay as they are.
Colours are Okabe and Ito's, told apart by colour-blind readers; line styles and markers tell the same in grey print.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from idmm.analysis.palette import COLOURS, MARKERS, STYLES
from idmm.config import Views
from idmm.data.views import MultiCropTransform
from idmm.files import replacing
from idmm.mixing import Mix, draw_cutmix, mix_images
from idmm.seeding import derive, numpy_rng

LOOKS = [(COLOURS[n % 7], STYLES[n % 4], MARKERS[n % 7]) for n in range(28)]  # no two alike
CROWD = 4  # curves in a panel, above which bands hide them
DPI = 150
VISIBLE = 0.2  # least share of a crop that the sheet's CutMix replaces
SHOWN_DRAWS = 100  # draws among which one as large as that is looked for

Records = list[dict]  # of metrics.jsonl, an epoch each


def loss_curves(runs: dict[str, Records | list[Records]], path: str | Path, title: str = "") -> None:
    """Draws the loss of each epoch, and below it the learning rate.

    Args:
        runs: Label -> a run's records of ``metrics.jsonl``, or those of several runs (seeds): then each is a thin
            line and their mean a thick one.
        path: PNG to write.
        title: Above the picture.
    """
    loss_panels({title: runs}, path)


def loss_panels(panels: dict[str, dict[str, Records | list[Records]]], path: str | Path) -> None:
    """Draws :func:`loss_curves` side by side: title -> runs. Losses of different stages share no axis."""
    figure = Figure(figsize=(0.6 + 4.4 * len(panels), 4.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    axes = figure.subplots(2, len(panels), sharex="col", squeeze=False, height_ratios=(3, 1))
    for (title, runs), (top, bottom) in zip(panels.items(), axes.T, strict=True):
        for number, (label, records) in enumerate(runs.items()):
            several = records if records and isinstance(records[0], list) else [records]
            _curve(top, several, "loss", number, label)
            _curve(bottom, several, "lr", number, label)
            for epoch in _boundaries(several[0]):
                top.axvline(epoch, color="0.6", linewidth=0.8, linestyle=":")
        top.set_title(title, fontsize=11)
        top.set_ylabel("loss, mean over the epoch (nats)")
        bottom.set_ylabel("learning rate")
        bottom.set_xlabel("epoch")
        bottom.set_ylim(bottom=0)
        bottom.set_xlim(left=0)
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        if len(runs) > 1 or next(iter(runs), ""):
            top.legend(frameon=False, fontsize=9)
        for axis in (top, bottom):
            _plain(axis)
    _save(figure, path)


def _curve(axis, several: list[Records], name: str, number: int, label: str) -> None:
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
    lines = [[record[name] for record in records] for records in several]
    shortest = min(map(len, lines))
    if len(lines) > 1:
        for line in lines:
            axis.plot(np.arange(1, len(line) + 1), line, color=colour, linewidth=0.7, alpha=0.45)
        label = f"{label} (mean of {len(lines)} seeds)"
    mean = np.mean([line[:shortest] for line in lines], axis=0)
    marker = "o" if shortest == 1 else ""  # a line of one point is none
    axis.plot(
        np.arange(1, shortest + 1), mean, color=colour, linestyle=style, linewidth=1.8, marker=marker, label=label
    )


def _boundaries(records: Records) -> list[float]:
    """Where one stage ends and the next begins, between two epochs."""
    stages = [record.get("stage", 1) for record in records]
    return [i + 0.5 for i in range(1, len(stages)) if stages[i] != stages[i - 1]]


def crop_sheet(
    store, views: Views, path: str | Path, *, mean, std, seed: int = 0, cutmix_alpha: float = 0.0, images: int = 6
) -> None:
    """Draws what stage 1 sees: a row for each image, at left the original, then its crops of each group.

    The crops are those of the run's first epoch, made by the loader's own code, with normalisation undone. With
    CutMix, every group follows a second time as mixed for the network, by the first draw whose box is large
    enough to see; in training many boxes are smaller.

    Args:
        store: Images by number, as :class:`idmm.data.views.MultiCropTransform` takes them.
        views: Crops and colours.
        path: PNG to write.
        mean: Of each channel.
        std: Likewise.
        seed: Of the run.
        cutmix_alpha: The method's; 0: no CutMix.
        images: Rows, spread evenly over the dataset.
    """
    indices = np.unique(np.linspace(0, len(store) - 1, min(images, len(store))).astype(int))
    batch = MultiCropTransform(store, views, mean, std, seed)(0, indices)
    blocks = [("original", [[store.image(i).permute(1, 2, 0).numpy()] for i in indices])]
    for number, (crops, group) in enumerate(zip(batch["views"], views.crops, strict=True)):
        low, high = group.scale
        blocks.append((f"crops of {low:.0%} to\n{high:.0%} of the area", _pixels(crops, mean, std)))
        if cutmix_alpha:
            mix = _visible_mix(crops, cutmix_alpha, derive(seed, "crop sheet", number))
            mixed = mix_images(crops.flatten(0, 1), mix).unflatten(0, crops.shape[:2])
            blocks.append((f"after CutMix\n({mix.lam:.0%} its own pixels)", _pixels(mixed, mean, std)))
    _sheet(blocks, path)


def _visible_mix(crops: torch.Tensor, alpha: float, key: int) -> Mix:
    """The first of the key's draws that replaces enough to be seen, or the one that replaces most."""
    count, size = crops.shape[0] * crops.shape[1], crops.shape[-2:]
    draws = [draw_cutmix(count, *size, alpha, numpy_rng(key, "cutmix", n)) for n in range(SHOWN_DRAWS)]
    return next((mix for mix in draws if mix.lam <= 1 - VISIBLE), min(draws, key=lambda mix: mix.lam))


def _pixels(views: torch.Tensor, mean, std) -> list[list[np.ndarray]]:
    """Undoes normalisation, [B, count, C, S, S] -> rows of [S, S, 3] in [0, 1]."""
    shape = (-1, 1, 1)
    values = views * torch.tensor(std).reshape(shape) + torch.tensor(mean).reshape(shape)
    values = values.clamp(0, 1).expand(-1, -1, 3, -1, -1).permute(0, 1, 3, 4, 2)  # one channel is shown as grey
    return [list(row) for row in values.numpy()]


def _sheet(blocks: list[tuple[str, list[list[np.ndarray]]]], path: str | Path) -> None:
    """Lays blocks of images side by side, each under its title; sizes are in inches."""
    cell, gap, between, head, edge = 0.8, 0.05, 0.3, 0.42, 0.12
    rows = len(blocks[0][1])
    widths = [max(1.25, len(grid[0]) * (cell + gap) - gap) for _, grid in blocks]
    width, height = sum(widths) + between * (len(blocks) - 1) + 2 * edge, rows * (cell + gap) - gap + head + edge
    figure = Figure(figsize=(width, height))
    left = edge
    for (title, grid), block in zip(blocks, widths, strict=True):
        middle = (left + block / 2) / width
        figure.text(middle, 1 - head / 2 / height, title, ha="center", va="center", fontsize=8)
        first = left + (block - len(grid[0]) * (cell + gap) + gap) / 2
        for row, pictures in enumerate(grid):
            for column, picture in enumerate(pictures):
                x, y = first + column * (cell + gap), height - head - (row + 1) * (cell + gap) + gap
                axis = figure.add_axes((x / width, y / height, cell / width, cell / height))
                axis.imshow(picture, interpolation="nearest")
                axis.set_axis_off()
        left += block + between
    _save(figure, path)


def pair_sheet(
    rows: list[tuple[str, list[str], list[np.ndarray]]], path: str | Path, title: str, columns: int = 3
) -> None:
    """Draws pairs of images side by side, several pairs a row.

    Args:
        rows: For each pair what is the matter, two names, and two images, uint8 [H, W, 3] of any sizes.
        path: PNG to write.
        title: Above the picture.
        columns: Pairs a row.
    """
    columns = min(columns, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(4.4 * columns, 0.5 + 2.9 * lines), layout="constrained")
    figure.suptitle(title, fontsize=11)
    frames = np.ravel(figure.subfigures(lines, columns, squeeze=False))
    for frame, (matter, names, images) in zip(frames, rows, strict=False):
        frame.suptitle(matter, fontsize=9, color=COLOURS[1])
        for axis, name, image in zip(frame.subplots(1, 2), names, images, strict=True):
            axis.imshow(image, interpolation="nearest")
            axis.set_title(_shortened(name), fontsize=6.5)
            axis.set_axis_off()
    _save(figure, path)


def _shortened(name: str, most: int = 40) -> str:
    """Keeps the end of each line, where names differ."""
    return "\n".join(line if len(line) <= most else f"…{line[1 - most :]}" for line in name.split("\n"))


def comparison(
    scores: dict[str, Sequence[float]],
    path: str | Path,
    title: str = "",
    ylabel: str = "top-1 accuracy on the test images (%)",
    chance: float | None = None,
) -> None:
    """Draws a bar for each label's mean with its standard deviation, and a dot for each seed.

    Args:
        scores: Label -> a score for each seed, in percent; the n-th dots of neighbours are joined where all labels
            have as many.
        path: PNG to write.
        title: Above the picture.
        ylabel: Of the scores.
        chance: What guessing would reach, a dotted line.
    """
    figure = Figure(figsize=(1.6 + 1.5 * len(scores), 4.2), layout="constrained")
    axis = figure.subplots()
    table = [np.asarray(values, dtype=float) for values in scores.values()]
    for place, values in enumerate(table):
        colour, mean = COLOURS[place % len(COLOURS)], values.mean()
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        axis.bar(place, mean, width=0.62, color=colour, alpha=0.35, edgecolor=colour, linewidth=1.2)
        axis.errorbar(place + 0.2, mean, spread, color="black", capsize=4, linewidth=1.2, marker="_", zorder=4)
        beside = np.full(len(values), place - 0.1)
        marker = {"marker": MARKERS[place % len(MARKERS)], "markeredgecolor": "white", "markersize": 7}
        axis.plot(beside, values, color=colour, linestyle="", zorder=3, clip_on=False, **marker)
        text = f"{mean:.1f} ± {spread:.1f}" if len(values) > 1 else f"{mean:.1f}"
        axis.annotate(text, (place, 0), (0, 6), textcoords="offset points", ha="center", fontsize=11, weight="bold")
    if len({len(values) for values in table}) == 1:
        for pair in np.stack(table, axis=1):  # [seeds, labels]
            axis.plot(np.arange(len(table)) - 0.1, pair, color="0.55", linewidth=0.8, zorder=2)
    if chance is not None:
        axis.axhline(chance, color="0.4", linewidth=1, linestyle=":")
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axis.annotate("chance", (1, chance), (-2, 3), fontsize=8, ha="right", **where)
    axis.set_xticks(range(len(scores)), list(scores))
    axis.set_xlim(-0.6, len(scores) - 0.4)
    axis.set_ylim(0, 100)
    axis.set_ylabel(ylabel)
    axis.set_title(title, fontsize=11)
    _plain(axis)
    _save(figure, path)


def label_curves(
    panels: dict[str, dict[str, list[tuple[float, float, float]]]],
    path: str | Path,
    *,
    ylabel: str = "top-1 accuracy on the test images (%)",
    chance: float | None = None,
    seeds: int = 1,
    untaught: Sequence[str] = (),
) -> None:
    """Draws accuracy over the labelled images a class, with a band of one standard deviation over draws.

    Bars stand for bands where there are many curves or a single number of images.

    Args:
        panels: Title -> label -> points (images a class, mean, standard deviation), in percent.
        path: PNG to write.
        ylabel: Of the accuracies.
        chance: What guessing would reach, a dotted line.
        seeds: Draws that the mean is of.
        untaught: Labels of networks with fresh weights, drawn in grey.
    """
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    looks = _looks(labels, untaught)
    barred = len(labels) > CROWD or all(len(points) == 1 for curves in panels.values() for points in curves.values())
    figure = Figure(figsize=(3.4 + 3.6 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for place, (label, points) in enumerate(curves.items()):
            shift = 1.02 ** (place - (len(curves) - 1) / 2) if barred else None
            _label_curve(axis, points, looks[label], shift, label=_shortened(label))
        _label_axis(axis, sorted({x for points in curves.values() for x, _, _ in points}), title, chance)
    axes[0].set_ylim(0, 100)
    axes[0].set_ylabel(ylabel)
    what = "bars" if barred else "band"
    band = f"mean, {what}: ± 1 standard\ndeviation over {seeds} draws" if seeds > 1 else None
    lines = {line.get_label(): line for axis in axes for line in axis.lines if not line.get_label().startswith("_")}
    figure.legend(
        lines.values(), lines, loc="outside right upper", frameon=False, fontsize=9, title=band, title_fontsize=8,
        alignment="left",
    )  # fmt: skip
    _save(figure, path)


def _looks(labels: Sequence[str], untaught: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, line and marker of each curve."""
    grey = [("0.45", style, "*") for style in STYLES[::-1]]
    looks = dict(zip([label for label in labels if label not in untaught], itertools.cycle(LOOKS), strict=False))
    return looks | dict(zip(untaught, itertools.cycle(grey), strict=False))


def _label_curve(axis, points: list, look: tuple[str, str, str], shift: float | None, label: str) -> None:
    """Draws a curve with a band, or with bars, moved aside by a factor."""
    x, mean, std = np.array(points, dtype=float).T
    colour, style, shape = look
    if std.any() and shift is not None:
        x = x * shift
        axis.errorbar(x, mean, std, fmt="none", ecolor=colour, elinewidth=1, capsize=2)
    elif std.any():
        axis.fill_between(x, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        for edge in (mean - std, mean + std):  # in grey print bands run into each other
            axis.plot(x, edge, color=colour, linewidth=0.6, linestyle=style)
    marker = {"marker": shape, "markeredgecolor": "white", "markersize": 7}
    axis.plot(x, mean, color=colour, linestyle=style, linewidth=1.8, label=label, **marker)


def _label_axis(axis, ticks: list[float], title: str, chance: float | None) -> None:
    """The axis of labelled images a class, and the line of a guess."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axis.set_xlabel("labelled images a class")
    axis.set_title(title, fontsize=11)
    if chance is not None:
        axis.axhline(chance, color="0.4", linewidth=1, linestyle=":")
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axis.annotate("chance", (1, chance), (-2, 3), fontsize=8, ha="right", **where)
    _plain(axis)


def _plain(axis) -> None:
    """Takes away what carries no information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


def _save(figure: Figure, path: str | Path) -> None:
    with replacing(Path(path)) as file:
        figure.savefig(file, format="png", dpi=DPI, facecolor="white")
