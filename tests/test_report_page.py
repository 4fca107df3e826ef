"""``grid.html``: what it shows, and that labels stay text."""

from functools import partial

from grids import cell, changed, failed, full, grid, missing
from pages import Reader

from idmm.report.render import page
from idmm.report.sections import sections
from idmm.report.table import Table

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
