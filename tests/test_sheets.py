"""Sheets of thumbnails: what stands where, and one example of each group of alike images."""

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from idmm.report import sheets
from idmm.report.sheets import Tile, caption_sheet, one_of_each, pair_rows


@pytest.fixture
def figures(monkeypatch):
    """What is drawn, instead of files."""
    made = []
    monkeypatch.setattr(sheets, "save", lambda figure, path: made.append(figure))
    return made


def tile(shape=(20, 20, 3), caption="a.png"):
    return Tile(np.zeros(shape, np.uint8), caption)


def places(figure, artists):
    renderer = FigureCanvasAgg(figure).get_renderer()
    return [artist.get_window_extent(renderer) for artist in artists]


def test_one_pair_of_each_group():
    pairs = [("a", "b"), ("c", "d"), ("b", "e"), ("f", "c"), ("g", "h"), ("e", "d")]
    assert one_of_each(pairs) == {0: 6, 4: 2}, "the last pair joins both groups"
    assert one_of_each(pairs[:5]) == {0: 3, 1: 3, 4: 2} and one_of_each([]) == {}


@pytest.mark.parametrize(("pairs", "rows"), [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [3, 2]), (12, [3] * 4)])
def test_pairs_fill_the_sheet(pairs, rows):
    found = pair_rows([(tile(), tile())] * pairs)
    assert [sum(one is None for one in tiles) for _, tiles in found] == rows


def test_each_pair_has_a_panel_of_its_own(figures):
    caption_sheet(pair_rows([(tile(), tile((20, 8, 3)))] * 5), "x.png", "title", cell=sheets.LARGE)
    (axis,) = figures[0].axes
    images = places(figures[0], axis.images)
    panels = [patch for patch in axis.patches if isinstance(patch, Rectangle) and patch.get_zorder() < 0]
    panels = places(figures[0], panels)
    assert len(panels) == 5 and len(images) == 10
    for number, panel in enumerate(panels):
        inside = [n for n, box in enumerate(images) if panel.x0 <= box.x0 and box.x1 <= panel.x1
                  and panel.y0 <= box.y0 and box.y1 <= panel.y1]  # fmt: skip
        assert inside == [2 * number, 2 * number + 1]
    assert not any(one.overlaps(other) for n, one in enumerate(panels) for other in panels[:n])


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", ["W" * 18, "i", "a class of a long name", "$x_", "\udcff\u56fe\u50cf"])
def test_texts_do_not_run_under_the_thumbnails(name, figures):
    rows = [(f"labelled {name}\nneighbours: {name}", [tile(), tile()])] * 2
    caption_sheet(rows, "x.png", "title", "what colours mean")
    (axis,) = figures[0].axes
    texts = [text for text in axis.texts if text.get_text().startswith("labelled")]
    for text in texts:
        text.set_text(text.get_text().encode("utf-8", "replace").decode())
    left = min(box.x0 for box in places(figures[0], axis.images))
    assert texts and max(box.x1 for box in places(figures[0], texts)) < left
