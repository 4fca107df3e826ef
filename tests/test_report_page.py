"""``grid.html``: what it says with scripts off, what it does in a real browser, and that labels stay text."""

import json
import re
from functools import partial

import pytest
from browser import Reader
from grids import cell, changed, failed, full, grid, missing
from PIL import Image

from idmm.report.page import page_data
from idmm.report.render import render
from idmm.report.sections import sections
from idmm.report.table import Table, format_gain

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


def html(cells):
    return render("grid.html", sections(grid(cells)))


# ------------------------------------------------------------------ the file
def test_it_is_a_plain_table_without_scripts():
    read, found = Reader(html(cells())), Table(grid(cells()), "finetune")
    heads = ["result of", "backbone", "source", "method", "flowers", "pets", "dtd", "mean", "mean gain"]
    assert read.rows[0] == heads
    assert len(read.rows) == 1 + 3 * 2 * 5, "three readouts, two backbones, scratch and two by two"
    texts = {tuple(row[:4]): [" ".join(text.split()) for text in row[4:]] for row in read.rows[1:]}
    row = texts["fine-tuning", BACKBONES[0], "flowers", "idmm"]
    one = found.cells[BACKBONES[0], ("flowers", "idmm"), "flowers"]
    assert row[0] == f"{one.stats.mean:.1f} ± {one.stats.std:.1f} {format_gain(one.gain)}"
    assert [row[1], *row[3:]] == ["failed", "", ""]
    assert texts["fine-tuning", BACKBONES[0], "pets", "idmm"][2] == "—"
    assert "n = 1 †" in texts["fine-tuning", BACKBONES[0], "pets", "idmm"][0]
    means = [found.mean(BACKBONES[1], ("pets", "simclr"), target) for target in found.targets]
    assert texts["fine-tuning", BACKBONES[1], "pets", "simclr"][3] == f"{sum(means) / 3:.1f}"
    assert ("fine-tuning", BACKBONES[0], "from scratch", "no pretraining") in texts
    assert '<option value="net">' in html([cell(backbone="Net"), cell(backbone="net")])


def test_gains_have_their_interval_and_a_colour_where_they_are_shown():
    values = {("scratch", "none"): 50.0, ("a", "idmm"): 80.0, ("b", "idmm"): 30.0, ("c", "idmm"): 51.0}
    some = [cell(*row, top1=value, test_size=200, target=t) for row, value in values.items() for t in "xy"]
    text, found = html(some), Table(grid(some), "finetune")
    tones = dict(zip("abc", ("up", "down", "level"), strict=True))
    for source, tone in tones.items():
        said = format_gain(found.cells["net", (source, "idmm"), "x"].gain)
        assert re.fullmatch(r"[+−]\d+\.\d \([+−]\d+\.\d to [+−]\d+\.\d\)", said)
        assert text.count(f'<span class="gain {tone}">{said}</span>') >= 2
    means = re.findall(r'data-value="[-\d.]+"><span class="gain (\w+)">([^<]+)</span>', text)
    assert [tone for tone, _ in means] == list(tones.values()) and means[0][1].startswith("+30.0 (+2")
    assert Reader(text).rows[0] == ["source", "method", "x", "y", "mean", "mean gain"], "one measure and one backbone"
    assert "N/A" not in text and "readout" not in text.lower()


def nasty():
    names = dict.fromkeys(("source", "method", "backbone", "target"), HOSTILE)
    one = cell(**names, config={HOSTILE: HOSTILE, "data": {}}, folder="javascript:alert(1)")
    return [one, failed(HOSTILE, **names, seed=1, log='x" onclick="alert(1)')]


def test_nothing_is_loaded_and_no_label_is_markup():
    text = html(nasty())
    read = Reader(text)
    assert [tag for tag, _ in read.tags if tag in ("script", "img", "link", "iframe")] == ["script", "script"]
    assert not [a for _, attrs in read.tags for a in attrs if a.startswith("on") or a in ("src", "style")]
    hrefs = [attrs["href"] for tag, attrs in read.tags if tag == "a"]
    assert hrefs == ["./javascript%3Aalert%281%29", "./x%22%20onclick%3D%22alert%281%29"]
    assert HOSTILE in read.rows[1] and not re.search(r"https?://|@import|url\(", text)
    (policy,) = [attrs["content"] for tag, attrs in read.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    inside = re.search(r'id="data">(.*?)</script>\n<script>', text)[1]
    assert not set("<>&") & set(inside), "'</script ' with a space would end it too"
    data = json.loads(inside)
    assert HOSTILE in data[0]["title"] and [HOSTILE, HOSTILE] in [*data[0]["config"], [HOSTILE, HOSTILE]]


def test_config_is_taken_apart():
    base = {"train": {"epochs": 3, "lr": None}, "seed": 0}
    views = {"views": {"size": 112}}
    some = [cell(config={**base, "seed": n}, seed=n, pretrain_config={"seed": n, **views}) for n in (0, 1)]
    shown = page_data(sections(grid(some)))
    assert shown["details"][0]["config"] == [("seed", "0 / 1"), ("pretrain.seed", "0 / 1")]
    assert shown["shared_config"] == {"train.epochs": "3", "train.lr": "null", "pretrain.views.size": "112"}
    assert "<dt>train.epochs</dt><dd>3</dd><dt>train.lr</dt><dd>null</dd><dt>pretrain.views.size" in html(some)


# ------------------------------------------------------------------ a browser
@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of some cells; it may load nothing else, and the console stays empty."""

    def show(some, scripts=True):
        (tmp_path / "grid.html").write_text(html(some))
        browser.requests.clear()
        browser.complaints.clear()
        browser.open(tmp_path / "grid.html", scripts)
        return browser

    yield show
    assert browser.requests == [(tmp_path / "grid.html").as_uri()] and browser.complaints == []


ROWS = "[...document.querySelectorAll('#grid tbody tr')].filter(r => !r.hidden)"
SHOWN = "document.getElementById('details').innerText"
HIDDEN = "document.getElementById('details').hidden"
STATUS = "document.getElementById('status').textContent"
STOPS = "[...document.querySelectorAll('#grid td[tabindex=\"0\"]')].map(c => c === document.activeElement)"


def column(page, number):
    return page.run(f"{ROWS}.map(r => r.cells[{number}].dataset.value ?? r.cells[{number}].textContent.trim())")


def head(number):
    return f"document.querySelectorAll('#grid thead th')[{number}]"


def sorted_as(page):
    return page.run("[...document.querySelectorAll('#grid thead th')].map(h => h.getAttribute('aria-sort'))")


def at(row, number):
    return f"{ROWS}[{row}].cells[{number}]"


def choose(page, name, value):
    chosen = f"s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change'));"
    page.run(f"(s => {{ {chosen} }})(document.querySelector('select[name={name}]'))")


def test_clicks_and_keys_sort_both_ways_and_nothing_goes_last(opened):
    page = opened(cells())
    assert sorted_as(page) == ["none"] * 9
    known = sorted(float(value) for value in column(page, 5) if value != "failed")
    for order, values in (("descending", known[::-1]), ("ascending", known)):
        page.click(f"{head(5)}.firstChild")
        assert [float(value) for value in column(page, 5)[:-1]] == values and column(page, 5)[-1] == "failed"
        assert sorted_as(page) == ["none"] * 5 + [order] + ["none"] * 3
        assert f"sorted by pets, {order}" in page.run(STATUS)
    page.click(f"{head(2)}.firstChild")
    assert sorted_as(page)[2] == "ascending" and column(page, 2) == sorted(column(page, 2), key=str.lower)
    page.run(f"{head(4)}.firstChild.focus()")
    page.press("Enter")
    values = [float(value) for value in column(page, 4)]
    assert sorted_as(page)[4] == "descending" and values == sorted(values, reverse=True)
    page.press("Tab")
    assert page.run(f"document.activeElement === {head(5)}.firstChild")


def test_filters(opened):
    page = opened(cells())
    assert set(column(page, 0)) == {"fine-tuning"} and len(column(page, 0)) == 10, "the grid's own readout first"
    choose(page, "measure", "kNN")
    choose(page, "backbone", "a_b & c%")
    assert column(page, 0) == ["kNN"] * 5 and column(page, 1) == ["a_b & c%"] * 5
    assert page.run(STATUS).startswith("5 of 30 rows")
    choose(page, "measure", "")
    choose(page, "backbone", "")
    assert len(column(page, 0)) == 30


def test_hover_focus_and_clicks_show_a_cell(opened):
    page = opened(cells())
    assert page.run(HIDDEN)
    page.hover(at(1, 4))
    shown = page.run(SHOWN)
    for text in ("flowers, idmm → flowers (pvt_v2_b0)", "n = 2 of 2", "95 % interval", "12 s", "data.name", "0 / 1"):
        assert text in shown
    page.hover(at(1, 5))
    assert "2 of 2 runs failed" in page.run(SHOWN) and "no <b>memory</b>" in page.run(SHOWN)
    assert page.run("document.querySelector('#details a').href").endswith("/runs/x%20y/log.txt")
    page.run(f"{at(0, 4)}.focus()")
    assert "from scratch → flowers" in page.run(SHOWN)
    page.press("ArrowDown")
    assert "flowers, idmm → flowers" in page.run(SHOWN)
    page.press("ArrowRight")
    assert "flowers, idmm → pets" in page.run(SHOWN) and page.run(f"document.activeElement === {at(1, 5)}")
    assert page.run(STOPS) == [True], "one stop of Tab, where the focus is"
    page.press("Escape")
    assert page.run(HIDDEN)
    for wanted in ("flowers, idmm → flowers", "pets, idmm → flowers"):  # the first click keeps it, the next lets go
        page.click(at(1, 4))
        page.hover(at(3, 4))
        assert wanted in page.run(SHOWN)


def test_off_scripts_leave_a_table(opened):
    page = opened(cells(), scripts=False)
    assert len(column(page, 0)) == 30 and page.run("document.getElementById('filters').hidden")
    assert page.run(f"{head(4)}.querySelector('button')") is None
    assert page.run(f"{at(1, 5)}.title") == "2 of 2 runs failed"


def test_hostile_labels_run_nowhere(opened):
    page = opened([*nasty(), cell("b", target=HOSTILE)])
    page.hover(at(0, 3))
    page.click(f"{head(3)}.firstChild")
    assert HOSTILE in page.run("document.getElementById('details').textContent")
    assert page.run("document.title") == "Transfer grid" and page.run("document.images.length") == 0


def test_no_half_of_the_page_is_blank(opened):
    page = opened([cell("scratch", "none", test_size=96), cell(test_size=96)])
    page.call("Emulation.setDeviceMetricsOverride", width=1280, height=800, deviceScaleFactor=1, mobile=False)
    widths = page.run("[...document.querySelectorAll('table')].map(t => t.offsetWidth).filter(w => w)")
    assert len(widths) >= 2 and min(widths) > 1100


def test_light_and_dark(opened, tmp_path):
    corner, page = {}, opened(cells())
    for dark in (False, True):
        page.picture(tmp_path / "shot.png", width=900, height=600, dark=dark)
        corner[dark] = Image.open(tmp_path / "shot.png").convert("L").getpixel((2, 2))
    assert corner[False] > 240 and corner[True] < 40
