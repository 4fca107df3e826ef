"""A transfer grid's pictures: what stands in them, and that nothing in a grid keeps them from being drawn."""

import warnings

import numpy as np
import pytest
from grids import cell, changed, failed, full, grid, missing, sizes
from matplotlib.patches import Rectangle
from PIL import Image

from idmm.report import grid_pictures
from idmm.report.grid_pictures import heat_maps, size_curves, source_ranks
from idmm.report.sections import ranking
from idmm.report.sections import size_curves as curves_of
from idmm.report.table import SCRATCH, Table


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were saved, as objects."""
    kept, save = [], grid_pictures.save
    monkeypatch.setattr(grid_pictures, "save", lambda figure, path: (kept.append(figure), save(figure, path)))
    return kept


def table(cells, protocol="finetune"):
    return Table(grid(cells, protocol), protocol)


def texts(axis):
    return {tuple(map(round, text.get_position())): text.get_text() for text in axis.texts if text.get_fontsize() > 7}


def panels(figure):
    return [axis for axis in figure.axes if axis.get_images()]


def broken():
    """Flowers' failed on pets, dtd's is missing on flowers, and one of two seeds of scratch failed on flowers."""
    cells = changed(full(3, ("idmm",), 2, 2), failed, source="flowers", target="pets")
    cells = changed(cells, missing, source="dtd", target="flowers")
    return changed(cells, failed, source="scratch", target="flowers", seed=1)


def test_heat_maps_show_numbers_marks_and_signs(tmp_path, drawn):
    found = table(broken())
    heat_maps([found], tmp_path / "grid.png")
    accuracy, gain = panels(drawn[0])
    rows = [label.get_text() for label in accuracy.get_yticklabels()]
    assert rows == ["from scratch", "flowers", "pets", "dtd"], "one method is not named"
    assert [label.get_text() for label in accuracy.get_xticklabels()] == ["flowers", "pets"]
    shown, gained = texts(accuracy), texts(gain)
    for y, row in enumerate(found.rows):
        for x, target in enumerate(found.targets):
            mean, more = found.mean("net", row, target), found.cells["net", row, target].gain
            if mean is not None:
                assert shown[x, y] == f"{mean:.1f}"
                assert gained[x, y] == ("0.0" if row == SCRATCH else f"{more.value:+.1f}".replace("-", "−"))
    assert (shown[1, 1], gained[1, 1], shown[0, 3]) == ("failed", "failed", "—")
    said = " ".join(drawn[0].get_supxlabel().split())
    assert "Framed: better than each other row" in said and "†: some runs failed" in said and "Underlined" not in said
    assert [text.get_text() for text in accuracy.texts if "†" in text.get_text()] == ["n = 1 †"]
    frames = [p for p in accuracy.patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert len(frames) == 2 and {t.get_text() for t in accuracy.texts if t.get_weight() == "bold"} == {
        f"{max(found.mean('net', row, target) or 0 for row in found.rows):.1f}" for target in found.targets
    }  # fmt: skip


def test_gain_is_centred_at_zero_and_what_may_be_chance_has_no_colour(tmp_path, drawn):
    cells = [cell("scratch", "none", top1=50.0), cell("a", top1=80.0), cell("b", top1=40.0)]
    heat_maps([table([{**one, "test_size": 20} for one in cells])], tmp_path / "grid.png")
    gain = panels(drawn[0])[1]
    norm = gain.get_images()[0].norm
    assert (norm.vmin, norm.vmax) == (-30, 30) and "−10.0" in texts(gain).values()
    assert gain.get_images()[0].get_array().flatten().tolist() == [0, 30, 0]


def test_ranks_from_best_to_worst_with_intervals(tmp_path, drawn):
    found = ranking(table(full(4, targets=4)))
    source_ranks(found, tmp_path / "insight.png")
    left, right = drawn[0].axes
    labels = ["from scratch" if one.source == "scratch" else one.source for one in found.ranks]
    assert left.yaxis_inverted() and [one.get_text() for one in left.get_yticklabels()] == labels
    bars = [tuple(line.get_xdata()) for line in left.lines if len(line.get_xdata()) == 2]
    assert bars == [pytest.approx(tuple(one.rank.interval)) for one in found.ranks]
    assert [text.get_text() for text in left.texts] == [f"{one.rank.value:.1f}" for one in found.ranks]
    assert [text.get_text() for text in right.texts] == [f"{one.gain.value:+.1f}" for one in found.ranks[:-1]]


def test_sizes_on_a_log_axis_with_intervals(tmp_path, drawn):
    found = table(sizes(methods=("idmm", "simclr"), targets=("pets", "cars"), seeds=3))
    curves = curves_of(found)
    size_curves(found, curves, tmp_path / "size.png")
    axis = drawn[0].axes[0]
    assert len(drawn[0].axes) == 2 and axis.get_xscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == ["100", "200", "500", "1,000", "2,000", "5,000"]
    for curve, (line, _, (bars,)) in zip(curves[::2], axis.containers, strict=True):
        assert line.get_ydata() == pytest.approx([stats.mean for stats in curve.points.values()])
        low, high = np.array([segment[:, 1] for segment in bars.get_segments()]).T
        assert (high - low) / 2 == pytest.approx([stats.half for stats in curve.points.values()])
    for kind in ("get_marker", "get_linestyle"):
        assert len({getattr(line, kind)() for line, *_ in axis.containers}) == 2, "not by colour alone"


@pytest.mark.parametrize("label", ["$x^2 \\nope$", "a" * 300, "名前 ü\nb"], ids=ascii)
def test_any_label_can_be_drawn(tmp_path, label):
    names = {"source": label, "method": label, "backbone": label, "target": label}
    cells = [cell(**names), cell(**{**names, "method": "x"}), cell(**{**names, "source": "scratch", "method": "none"})]
    cells += [{**one, **names} for one in sizes()]
    for n, one in enumerate(cells[3:]):
        one["source"] = f"{label}{n}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = table(cells)
        heat_maps([found], tmp_path / "grid.png")
        size_curves(found, curves_of(table(sizes())), tmp_path / "size.png")
        source_ranks(ranking(table([cell(label), cell("b", top1=3.0)])), tmp_path / "insight.png")
    assert Image.open(tmp_path / "grid.png").width < 4000
