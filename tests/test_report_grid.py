"""A transfer grid's pictures and its page: what they show, and that nothing in a grid keeps them from being drawn."""

import warnings
from functools import partial

import pytest
from grids import cell, changed, failed, full, grid, missing
from pages import Reader
from PIL import Image

from idmm.report import grid_pictures
from idmm.report.grid_pictures import heat_maps
from idmm.report.render import page
from idmm.report.sections import sections
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
    assert [text.get_text() for text in accuracy.texts if "†" in text.get_text()] == ["n = 1 †"]
    assert {t.get_text() for t in accuracy.texts if t.get_weight() == "bold"} == {
        f"{max(found.mean('net', row, target) or 0 for row in found.rows):.1f}" for target in found.targets
    }  # fmt: skip


@pytest.mark.parametrize("label", ["$x^2 \\nope$" + "a" * 300, "名前 ü\nb"], ids=ascii)
def test_any_label_can_be_drawn(tmp_path, label):
    names = {"source": label, "method": label, "backbone": label, "target": label}
    cells = [cell(**names), cell(**{**names, "method": "x"}), cell(**{**names, "source": "scratch", "method": "none"})]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = table(cells)
        heat_maps([found], tmp_path / "grid.png")
    assert Image.open(tmp_path / "grid.png").width < 4000


HOSTILE = "</script><script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">"
BACKBONES = ("pvt_v2_b0", "a_b & c%")


def cells():
    """Two backbones, two readouts; one cell failed, one is missing, one has a failed seed."""
    found = full(2, targets=3, backbones=BACKBONES) + full(2, targets=3, seeds=1, backbones=BACKBONES, protocol="probe")
    place = {"protocol": "finetune", "backbone": BACKBONES[0], "method": "idmm"}
    broken = partial(failed, error="no <b>memory</b>", log="runs/x y/log.txt")
    found = changed(found, broken, source="flowers", target="pets", **place)
    found = changed(found, missing, source="pets", target="dtd", **place)
    return changed(found, failed, source="pets", target="flowers", seed=1, **place)


def test_tables_with_intervals_gains_and_statuses(tmp_path):
    read, found = Reader(page(tmp_path, sections(grid(cells())))), Table(grid(cells()), "finetune")
    assert "finetune: 55 of 60 cells done, 3 failed, 2 missing probe: 30 of 30 cells done" in read.text
    assert read.text.count("source method flowers pets dtd from scratch no pretraining") == 3 * 2, "readouts, backbones"
    one = found.cells[BACKBONES[0], ("flowers", "idmm"), "flowers"]
    assert f"flowers idmm {one.stats.mean:.1f} ± {one.stats.half:.1f} {one.gain} failed" in read.text
    first = read.text[: read.text.index("a_b & c%")]
    assert "(n = 1) †" in first and first.count("—") == 1
    assert read.text.count("no <b>memory</b> (log: runs/x y/log.txt)") == 2


def test_no_label_is_markup(tmp_path):
    names = dict.fromkeys(("source", "method", "backbone", "target"), HOSTILE)
    some = [cell(**names, folder="javascript:alert(1)"), failed(HOSTILE, **names, seed=1)]
    read = Reader(page(tmp_path, sections(grid(some))))
    assert not {tag for tag, _ in read.tags} & {"script", "img", "link", "iframe"} and HOSTILE in read.text
