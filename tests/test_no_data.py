"""Values that mark pixels without data are told before they set the range; pictures say what they show."""

import json

import numpy as np
import pytest
from helpers import call, inside
from PIL import Image
from test_channels import RUN

from idmm.data.composite import composite, explained
from idmm.data.depth import no_data
from idmm.data.images import Bands, depth

BANDS = Bands(2)


def tile(i, channels=2, low=300, high=2500):
    return np.random.default_rng(i).integers(low, high, (32, 32, channels)).astype(np.float32)


def found(images, bands=BANDS):
    return no_data([depth(image, 10**6, bands) for image in images], bands)


def corner(images, value, every=5, channels=slice(None)):
    for image in images[::every]:
        image[:8, :8, channels] = value
    return images


def test_a_fill_value_is_told_with_the_range_of_the_others():
    line = found(corner([tile(i) for i in range(10)], -9999))
    start = (
        "-9999 in each channel, on 6.2 % of the pixels of 2 images and far from all other values, looks like a no-data"
    )
    assert line.startswith(f"{start} value: --data.range '[[30") and line.endswith("]]'")
    low, high = json.loads(line.partition("--data.range '")[2][:-1])[0]
    assert 300 <= low < 310 and 2490 < high < 2500
    some = found(corner([tile(i) for i in range(10)], 65535, channels=1))
    assert some.startswith("65535 in channel 1, on 6.2 % of the pixels of 2 images") and "], [30" in some
    assert found(corner([tile(i) for i in range(10)], 0)) is None, "near the others it costs few levels"
    grey = [image[..., :1] for image in corner([tile(i) for i in range(10)], -9999)]
    assert "-9999, on 6.2 %" in found(grey, None) and "--data.range '[30" in found(grey, None)


@pytest.mark.parametrize("kind", ["dark", "saturated", "masks", "labels", "hot pixels", "all fill"])
def test_ordinary_images_are_not_warned_of(kind):
    rng = np.random.default_rng(0)
    images = {
        "dark": [np.clip(rng.normal(0, 500, (32, 32, 2)), 0, 65535) for _ in range(6)],
        "saturated": [np.clip(rng.normal(50000, 20000, (32, 32, 2)), 0, 65535) for _ in range(6)],
        "masks": [rng.integers(0, 2, (32, 32, 2)) * 65535 for _ in range(6)],
        "labels": [rng.choice([0, 300, 301, 302], (32, 32, 2)) for _ in range(6)],
        "hot pixels": corner([tile(i) for i in range(10)], 0, every=100),
        "all fill": [np.full((32, 32, 2), 7)] * 3,
    }[kind]
    if kind == "hot pixels":
        images[3][5, 5] = 65535
    assert found([image.astype(np.uint16) for image in images]) is None


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fill") / "d"
    for split, first in (("train", 0), ("test", 100)):
        for name in "ab":
            (folder / split / name).mkdir(parents=True)
            images = corner([tile(first + i + 50 * (name == "b"), 5) for i in range(6)], -9999)
            for i, image in enumerate(images):
                np.save(folder / split / name / f"{i}.npy", image)
    return folder


def test_the_check_and_the_log_say_so(root, tmp_path, capsys):
    call(["data", "check", root, "--out", tmp_path / "c"])
    text = capsys.readouterr().out
    assert text.count("depth: -9999 in each channel, on 6.2 % of the pixels of 4 images") == 1
    assert "looks like a no-data value" in json.loads((tmp_path / "c/check.json").read_text())["no_data"]
    better = text.partition("no-data value: --data.range '")[2].partition("'")[0]
    assert inside("pretrain", tmp_path / "a", **RUN, data__root=str(root)) == 0
    assert "data.range: -9999 in each channel" in (tmp_path / "a/log.txt").read_text()
    assert inside("pretrain", tmp_path / "b", **RUN, data__root=str(root), data__range=json.loads(better)) == 0
    assert "no-data value" not in (tmp_path / "b/log.txt").read_text()


def test_pictures_leave_out_the_low_end():
    image = np.random.default_rng(0).integers(60000, 65535, (32, 32, 3)).astype(np.uint16)
    marked = image.copy()
    marked[:8, :8] = 0
    assert np.abs(composite(marked)[8:].astype(int) - composite(image)[8:]).max() <= 3
    assert not composite(marked)[:8, :8].any() and not composite(np.zeros((4, 4, 5), np.uint16)).any()


def test_pictures_say_what_they_show():
    assert explained(None, None, deep=False) == "" and "stretched" in explained(None, None, deep=True)
    assert explained(Bands(5), None, deep=False) == "channels 0, 1, 2 as red, green, blue, each stretched"
    assert explained(Bands(13, (7, 3, 2, 1)), [1, 2, 3], True) == "channels 3, 2, 1 as red, green, blue, each stretched"
    assert explained(Bands(None, (2, 1, 0)), None, deep=False) == "channels 2, 1, 0 as red, green, blue"
    assert explained(Bands(2), None, deep=True) == "channels 0, 1 as red, green, each stretched"
    assert explained(Bands(None, (4,)), None, deep=True) == "channel 4 as grey, each stretched"


def test_pages_and_sheets_say_what_they_show(root, tmp_path, monkeypatch):
    from idmm.report import sheets

    notes = []
    original = sheets.caption_sheet
    for module in ("idmm.report.sheets", "idmm.commands.explore_tables"):
        monkeypatch.setattr(f"{module}.caption_sheet", lambda *a, **k: notes.append(a[3]) or original(*a, **k))
    run, line = tmp_path / "a", "channels 4, 1, 0 as red, green, blue, each stretched"
    assert inside("pretrain", run, **RUN, data__root=str(root), data__composite=[4, 1, 0]) == 0
    assert call(["explore", run, "--device", "cpu"]) == 0
    one = root / "test/a/0.npy"
    assert call(["similar", "--init", run, one, root / "train", "--device", "cpu", "--out", tmp_path / "s.png"]) == 0
    assert len(notes) >= 4 and all(note.endswith(line) for note in notes), notes
    assert call(["report", run, "--out", tmp_path / "r"]) == 0
    assert f"Shown: {line}." in (tmp_path / "r/report.html").read_text()
    crops = next((tmp_path / "r").glob("crops*.png"))
    assert Image.open(crops).height > 100


def test_a_list_without_brackets_is_answered_by_one(capsys, tmp_path):
    assert call(["pretrain", "--out", tmp_path / "x", "--data.bands", "3,2,1"]) == 2
    assert "data.bands: got '3,2,1', wanted a list, such as '[3,2,1]'" in capsys.readouterr().err


def test_ranges_of_chosen_bands_are_named(root, capsys):
    call(["data", "check", root, "--bands", "[3, 1]"])
    assert "; of its channels 3: [-9999, " in (text := capsys.readouterr().out) and ", 1: [-9999, " in text
