"""``grid.html``: what it says with scripts off, what it does in a real browser, and that labels stay text."""

import json
import re
from html.parser import HTMLParser

import pytest
from browser import browsing
from grids import cell, failed, full, grid
from PIL import Image

from idmm.report.page import page_data
from idmm.report.render import render
from idmm.report.sections import sections
from idmm.report.table import Table

HOSTILE = "</script><script>document.title='stolen'</script><img src=x onerror=\"document.title='stolen'\">"
BACKBONES = ("pvt_v2_b0", "a_b & c%")


def cells():
    """Two backbones, two readouts; one entry failed, one is missing, one has a failed seed."""
    found = full(2, targets=3, backbones=BACKBONES) + full(2, targets=3, seeds=1, backbones=BACKBONES, protocol="probe")
    place = {
        tuple(c[k] for k in ("protocol", "backbone", "source", "method", "target", "seed")): n
        for n, c in enumerate(found)
    }

    def change(make, source, target, seed, **fields):
        where = ("finetune", BACKBONES[0], source, "idmm", target, seed)
        found[place[where]] = make(source=source, target=target, seed=seed, backbone=BACKBONES[0], **fields)

    for seed in (0, 1):
        change(failed, "flowers", "pets", seed, error="no <b>memory</b>", log="runs/x y/log.txt")
        change(cell, "pets", "dtd", seed, top1=None)
    change(failed, "pets", "flowers", 1)
    return found


def html(cells):
    return render("grid.html", sections(grid(cells)))


class Reader(HTMLParser):
    """Elements by tag with their attributes, and the rows of the table ``grid`` as texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self._inside, self._cell = [], [], False, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs).get("id") == "grid" or (self._inside and tag != "table")
        if self._inside and tag == "tr":
            self.rows.append([])
        if self._inside and tag in ("td", "th"):
            self.rows[-1].append("")
        self._cell = self._inside and self.rows and tag not in ("tr", "tbody", "thead")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "table"
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data


# ------------------------------------------------------------------ the file
def test_it_is_a_plain_table_without_scripts():
    read, found = Reader(html(cells())), Table(grid(cells()), "finetune")
    heads = ["readout", "backbone", "source", "method", "flowers", "pets", "dtd", "average", "average gain"]
    assert read.rows[0] == heads
    assert len(read.rows) == 1 + 3 * 2 * 5, "three readouts, two backbones, scratch and two by two"
    texts = {tuple(row[:4]): [" ".join(text.split()) for text in row[4:]] for row in read.rows[1:]}
    row = texts["fine-tuned", BACKBONES[0], "flowers", "idmm"]
    one = found.cells[BACKBONES[0], ("flowers", "idmm"), "flowers"]
    assert row[0] == f"{one.stats.mean:.1f} ± {one.stats.std:.1f} ({one.gain.mean:+.1f})" and row[1:] == [
        "failed",
        row[2],
        "",
        "",
    ]
    assert texts["fine-tuned", BACKBONES[0], "pets", "idmm"][2] == "—"
    assert "n = 1 †" in texts["fine-tuned", BACKBONES[0], "pets", "idmm"][0]
    means = [found.mean(BACKBONES[1], ("pets", "simclr"), target) for target in found.targets]
    assert texts["fine-tuned", BACKBONES[1], "pets", "simclr"][3] == f"{sum(means) / 3:.1f}"
    assert ("fine-tuned", BACKBONES[0], "N/A", "random init.") in texts


def test_nothing_is_loaded_and_no_label_is_markup():
    names = {"source": HOSTILE, "method": HOSTILE, "backbone": HOSTILE, "target": HOSTILE}
    nasty = [
        cell(**names, config={HOSTILE: HOSTILE, "data": {}}, folder="javascript:alert(1)"),
        failed(HOSTILE, **names, seed=1, log='x" onclick="alert(1)'),
    ]
    text = html(nasty)
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


@pytest.mark.parametrize("given", [[], [failed()], [cell()], [cell(seconds=None, config=None)]], ids=str)
def test_any_grid_has_a_page(given):
    assert len(Reader(html(given)).rows) == (2 if given else 0)


# ------------------------------------------------------------------ a browser
@pytest.fixture(scope="module")
def page():
    with browsing() as opened:
        yield opened


@pytest.fixture
def opened(page, tmp_path):
    (tmp_path / "grid.html").write_text(html(cells()))
    page.requests.clear()
    page.complaints.clear()
    page.open(tmp_path / "grid.html")
    yield page
    assert page.requests == [(tmp_path / "grid.html").as_uri()] and page.complaints == []


def column(page, number):
    return page.run(
        f"[...document.querySelectorAll('#grid tbody tr')].filter(r => !r.hidden).map(r => r.cells[{number}]"
        f".dataset.value ?? r.cells[{number}].textContent)"
    )


def head(number):
    return f"document.querySelectorAll('#grid thead th')[{number}]"


def sorted_as(page):
    return page.run("[...document.querySelectorAll('#grid thead th')].map(h => h.getAttribute('aria-sort'))")


SHOWN = "document.getElementById('details').innerText"
HIDDEN = "document.getElementById('details').hidden"


def at(row, number):
    return f"[...document.querySelectorAll('#grid tbody tr')].filter(r => !r.hidden)[{row}].cells[{number}]"


def choose(page, name, value):
    page.run(f"(s => {{ s.value = {json.dumps(value)}; s.dispatchEvent(new Event('change')); }})"
             f"(document.querySelector('select[name={name}]'))")  # fmt: skip


def test_click_sorts_both_ways_and_nothing_goes_last(opened):
    assert sorted_as(opened) == ["none"] * 9
    before = column(opened, 5)
    known = sorted(float(value) for value in before if value.strip() != "failed")
    opened.click(f"{head(5)}.firstChild")
    assert [float(v) for v in column(opened, 5)[:-1]] == known[::-1] and column(opened, 5)[-1].strip() == "failed"
    assert sorted_as(opened) == ["none"] * 5 + ["descending"] + ["none"] * 3
    opened.click(f"{head(5)}.firstChild")
    assert [float(v) for v in column(opened, 5)[:-1]] == known and column(opened, 5)[-1].strip() == "failed"
    assert "sorted by pets, ascending" in opened.run("document.getElementById('status').textContent")
    opened.click(f"{head(2)}.firstChild")
    assert sorted_as(opened)[2] == "ascending" and column(opened, 2) == sorted(column(opened, 2), key=str.lower)


def test_keys_sort_too(opened):
    opened.run(f"{head(4)}.firstChild.focus()")
    opened.press("Enter")
    assert sorted_as(opened)[4] == "descending"
    values = [float(value) for value in column(opened, 4)]
    assert values == sorted(values, reverse=True)
    opened.press("Tab")
    assert opened.run(f"document.activeElement === {head(5)}.firstChild")


def test_filters(opened):
    assert set(column(opened, 0)) == {"fine-tuned"} and len(column(opened, 0)) == 10, "the grid's own readout first"
    choose(opened, "readout", "kNN")
    choose(opened, "backbone", "a_b & c%")
    assert column(opened, 0) == ["kNN"] * 5 and column(opened, 1) == ["a_b & c%"] * 5
    assert opened.run("document.getElementById('status').textContent").startswith("5 of 30 rows")
    choose(opened, "readout", "")
    choose(opened, "backbone", "")
    assert len(column(opened, 0)) == 30


def test_hover_and_focus_show_a_cell(opened):
    assert opened.run(HIDDEN)
    opened.hover(at(1, 4))
    shown = opened.run(SHOWN)
    assert "flowers, idmm → flowers (pvt_v2_b0)" in shown and "n = 2 of 2" in shown and "95 % interval" in shown
    assert "12 s" in shown and "data.name" in shown and "0 / 1" in shown
    opened.hover(at(1, 5))
    assert "2 of 2 runs failed" in opened.run(SHOWN) and "no <b>memory</b>" in opened.run(SHOWN)
    link = opened.run("document.querySelector('#details a').href")
    assert link.endswith("/runs/x%20y/log.txt")
    opened.run(f"{at(0, 4)}.focus()")
    assert "from scratch → flowers" in opened.run(SHOWN)
    opened.press("ArrowDown")
    assert "flowers, idmm → flowers" in opened.run(SHOWN)
    opened.press("ArrowRight")
    assert "flowers, idmm → pets" in opened.run(SHOWN)
    assert opened.run(f"document.activeElement === {at(1, 5)}")
    stops = opened.run(
        "[...document.querySelectorAll('#grid td[tabindex=\"0\"]')].map(c => c === document.activeElement)"
    )
    assert stops == [True], "one stop of Tab, where the focus is"
    opened.press("Escape")
    assert opened.run(HIDDEN)


def test_a_click_keeps_a_cell(opened):
    opened.click(at(1, 4))
    opened.hover(at(3, 4))
    assert "flowers, idmm → flowers" in opened.run(SHOWN)
    opened.click(at(1, 4))
    opened.hover(at(3, 4))
    assert "pets, idmm → flowers" in opened.run(SHOWN)


def test_off_scripts_leave_a_table(page, tmp_path):
    (tmp_path / "grid.html").write_text(html(cells()))
    page.open(tmp_path / "grid.html", scripts=False)
    assert len(column(page, 0)) == 30 and page.run("document.getElementById('filters').hidden")
    assert page.run(f"{head(4)}.querySelector('button')") is None
    assert page.run(f"{at(1, 5)}.title") == "2 of 2 runs failed"


def test_hostile_labels_run_nowhere(page, tmp_path):
    names = {"source": HOSTILE, "method": HOSTILE, "backbone": HOSTILE, "target": HOSTILE}
    nasty = [cell(**names, config={HOSTILE: HOSTILE}), failed(HOSTILE, **names, seed=1), cell("b", target=HOSTILE)]
    (tmp_path / "grid.html").write_text(html(nasty))
    page.requests.clear()
    page.complaints.clear()
    page.open(tmp_path / "grid.html")
    page.hover(at(0, 4))
    page.click(f"{head(4)}.firstChild")
    assert HOSTILE in page.run("document.getElementById('details').textContent")
    assert page.run("document.title") == "Transfer grid" and page.run("document.images.length") == 0
    assert len(page.requests) == 1 and page.complaints == []


def test_light_and_dark(opened, tmp_path):
    corner = {}
    for dark in (False, True):
        opened.picture(tmp_path / "shot.png", width=900, height=600, dark=dark)
        corner[dark] = Image.open(tmp_path / "shot.png").convert("L").getpixel((2, 2))
    assert corner[False] > 240 and corner[True] < 40
