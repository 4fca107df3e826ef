"""Images of more than 8 bits are scaled by one range for a whole data set, which travels; pages are named."""

import io
import json
import shutil

import numpy as np
import pytest
import tifffile
import torch
from folders import HOW, TINY, faults, opened, section, tree, tuned
from folders import same as same_images
from helpers import call, inside, metrics, refused, same
from PIL import Image
from test_resume import stop_at

import idmm
from idmm.data import cache, depth
from idmm.data.cache import load_split
from idmm.data.datasets import open_splits
from idmm.data.images import BadImage, decode, frames, load
from idmm.errors import RunError
from idmm.models.spec import model_spec


def deep(path, low, high, seed=0, kind=np.uint16, shape=(24, 30)):
    """Writes a grey gradient from ``low`` to ``high``, as PNG or TIFF."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ramp = np.linspace(low, high, shape[0] * shape[1])
    np.random.default_rng(seed).shuffle(ramp[1:-1])
    Image.fromarray(ramp.reshape(shape).astype(kind)).save(path)
    return path


def twelve_bits(root, ends):
    """Labelled images of 12 bits in 16-bit PNGs; ``ends``: {split: (smallest, largest value)}."""
    for split, (low, high) in ends.items():
        for name in "ab":
            for i in range(4):
                deep(root / split / name / f"{i}.png", low + i, high - (name == "b"), seed=i)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return twelve_bits(tmp_path_factory.mktemp("deep") / "d", {"train": (3, 4012), "val": (0, 4095)})


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """Pretrained by auto and by full, each with a cache of its own; nothing may be written to them."""
    folder = tmp_path_factory.mktemp("runs")
    for given in ("auto", "full"):
        own = {"data__root": str(root), "data__cache_dir": str(folder / f"cache-{given}")}
        assert inside("pretrain", folder / given, **TINY, **own, data__range=given) == 0
    return folder


def levels(folder):
    """Grey levels of 65,536 in the only cache entry of a folder."""
    (pixels,) = folder.glob("*/pixels-*")
    return np.unique(np.fromfile(pixels, dtype=np.uint16))


def info(run, stem="backbone"):
    return json.loads((run / f"{stem}.json").read_text())


def said(run):
    return (run / "log.txt").read_text()


# ------------------------------------------------------------------ one range
def test_twelve_bits_use_all_levels_and_the_log_says_how(runs):
    found = levels(runs / "cache-auto")
    assert len(found) > 2000 and found.min() == 0 and found.max() == 65535, "they are not cut to 8 bits"
    text = "8 of 8 train images are 16-bit grey; values 3 to 4012; [3, 4012] becomes 0 to 1, kept as 16 bits (from the"
    assert f"{text} training images)" in said(runs / "auto") and "of that range or less" not in said(runs / "auto")
    assert info(runs / "auto")["range"] == [3, 4012]
    assert idmm.load_backbone(runs / "auto").pretrained_cfg["range"] == [3, 4012]


def test_full_is_warned_of(runs):
    assert levels(runs / "cache-full").max() == 4012
    text = said(runs / "full")
    assert "[0, 65535] becomes 0 to 1, kept as 16 bits (data.range)" in text
    assert "half of them span 6.1 % of that range or less; --data.range '[4.5, 4011.5]' would suit" in text
    assert info(runs / "full")["range"] == "full"


def test_fine_tuning_takes_the_checkpoints_range(runs, root, tmp_path):
    other = twelve_bits(tmp_path / "other", {"train": (100, 2000), "val": (0, 5000)})
    given = {"model__name": None, "model__kwargs": None, "init": str(runs / "auto")}
    assert tuned(tmp_path / "b", other, **given) == 0
    assert info(tmp_path / "b")["range"] == info(tmp_path / "b", "model")["range"] == [3, 4012]
    text = said(tmp_path / "b")
    assert (
        "8 of 8 train images are 16-bit grey; values 100 to 2000; [3, 4012] becomes 0 to 1, kept as 16 bits (as in"
        in text
    )
    assert (
        "8 of 8 test images are 16-bit grey; values 0 to 5000; [3, 4012] becomes 0 to 1, kept as 16 bits (as in" in text
    )
    assert tuned(tmp_path / "c", other, **given, data__range=[50, 3000]) == 0
    assert info(tmp_path / "c", "model")["range"] == [50, 3000]
    assert tuned(tmp_path / "d", other, **{**given, "init": str(runs / "full")}) == 0
    assert info(tmp_path / "d", "model")["range"] == "full"


def test_a_probe_and_fewlabel_take_it_too(runs, root, tmp_path, capsys):
    assert (
        call(["probe", "--init", runs / "auto", "--data.name", "folder", "--data.root", root, "--device", "cpu"]) == 0
    )
    assert "[3, 4012] becomes 0 to 1, kept as 16 bits (as in" in capsys.readouterr().err
    few = ["fewlabel", "--init", f"[{runs / 'auto'}, {runs / 'full'}]", "--data.name", "folder", "--data.root", root]
    few += ["--per_class", "[2]", "--seeds", "1", "--untrained", "true", "--device", "cpu", "--out", tmp_path / "few"]
    assert call(few) == 0
    text = capsys.readouterr().err
    assert (
        "[3, 4012] becomes 0 to 1, kept as 16 bits (as in" in text
        and "[0, 65535] becomes 0 to 1, kept as 16 bits (as in" in text
    )


# ------------------------------------------------------------------ resuming
@pytest.fixture(scope="module")
def cut(root, tmp_path_factory):
    """Runs by auto and by full that stopped in their second epoch, and what their ends are; to be copied."""
    folder = tmp_path_factory.mktemp("cut")
    given = {**TINY, "train__epochs": 2, "data__root": str(root)}
    for name in ("auto", "full"):
        assert inside("pretrain", folder / f"whole-{name}", **given, data__range=name) == 0
        with pytest.MonkeyPatch.context() as patch:
            stop_at(patch, 1, 1, 0 + 1)
            assert inside("pretrain", folder / name, **given, data__range=name) == 130
    return folder, given


def test_a_run_goes_on_with_its_range(cut, tmp_path, capsys):
    (folder, given), run = cut, tmp_path / "run"
    shutil.copytree(folder / "auto", run)
    capsys.readouterr()
    for other in ("full", [0, 4095]):
        assert inside("pretrain", run, **given, data__range=other) == 2
        assert f"data.range: the run in '{run}' has auto, asked for now is" in capsys.readouterr().err
    assert inside("pretrain", run, **given) == 0
    assert metrics(run) == metrics(folder / "whole-auto") and same(run, folder / "whole-auto")
    assert json.loads((run / "last/images.json").read_text())["range"] == [3, 4012]


def test_the_range_of_a_checkpoint(runs, tmp_path):
    def range_from(**changes):
        kept = {key: value for key, value in {**info(runs / "auto"), **changes}.items() if value is not None}
        (tmp_path / "a.json").write_text(json.dumps(kept))
        given = idmm.config.FinetuneConfig(init=str(tmp_path / "a.safetensors"), data=section(range=asked))
        return model_spec(given).range

    shutil.copy(runs / "auto/backbone.safetensors", tmp_path / "a.safetensors")
    asked = "auto"
    assert range_from() == [3, 4012] and range_from(range="full") == "full"
    assert range_from(range=None) == "auto", "its images had 8 bits"
    assert range_from(range=None, ema=None, size=None) == "auto", "of another program"
    asked = [1.0, 2.0]
    assert range_from() == [1.0, 2.0]


# ------------------------------------------------------------------ the range itself
def test_8_bit_images_cost_nothing_and_stay_as_they_are(tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("a second look at an image of 8 bits")

    root = tree(tmp_path / "d", train={"a": 3, "b": 3})
    monkeypatch.setattr(depth, "depth", never)
    stores = [opened(root, range=given) for given in ("auto", "full", [0, 4095])]
    assert len(list((tmp_path / "cache").iterdir())) == 1, "one place for all ranges"
    for store in stores:
        assert store.scale is None and same_images(store, stores[0])
        for i, item in enumerate(open_splits(section(root), labelled=False).train.items):
            assert torch.equal(store.image(i), torch.from_numpy(decode(item, 10**8)).permute(2, 0, 1))


def test_a_run_of_8_bits_says_nothing_of_a_range(tmp_path):
    root = tree(tmp_path / "d", train={"a": 4, "b": 4})
    assert inside("pretrain", tmp_path / "a", **TINY, data__root=str(root)) == 0
    assert "range" not in info(tmp_path / "a") and "images are" not in said(tmp_path / "a")


@pytest.mark.parametrize("keep", ["disk", "ram", "off"])
@pytest.mark.parametrize("cores", [1, 7])
def test_any_number_of_threads_finds_the_same(tmp_path, monkeypatch, keep, cores):
    for i in range(12):
        deep(tmp_path / "d/train" / f"{i:02d}.png", 500 - 10 * i, 1000 + 100 * i, seed=i)
    monkeypatch.setattr("idmm.data.depth.cores", lambda: cores)
    store = opened(tmp_path / "d", keep=keep)
    assert store.scale == (390, 2100) and store.cache == keep
    for i, item in enumerate(open_splits(section(tmp_path / "d"), labelled=False).train.items):
        wanted = np.rint((np.asarray(Image.open(item)).astype(float) - 390) * (65535 / (2100 - 390)))
        np.testing.assert_array_equal(store.image(i)[0].numpy(), wanted)


@pytest.mark.parametrize(("module", "name"), [(cache, "load"), (depth, "depth")])
def test_the_image_that_memory_does_not_hold_is_named(module, name, tmp_path, monkeypatch):
    def full(*_):
        raise MemoryError

    deep(tmp_path / "d/train/0.png", 0, 100)
    monkeypatch.setattr(module, name, full)
    line = f"out of memory while decoding '{tmp_path}/d/train/0.png'; a lower data.max_pixels refuses it"
    with pytest.raises(RunError, match=f"^{line}$"):
        opened(tmp_path / "d")


def test_hot_and_dead_pixels_do_not_set_it(tmp_path):
    path = deep(tmp_path / "d/train/0.png", 100, 4000, shape=(128, 128))
    pixels = np.array(Image.open(path))
    pixels[3, 5], pixels[7, 9] = 65535, 0
    Image.fromarray(pixels).save(path)
    deep(tmp_path / "d/train/1.png", 100, 4000, shape=(24, 30))
    store = opened(tmp_path / "d")
    assert store.scale == (100, 4000)
    assert store.image(0)[0, 3, 5] == 65535 and store.image(0)[0, 7, 9] == 0


def test_an_image_that_leaves_the_others_few_levels_is_named(tmp_path):
    root = twelve_bits(tmp_path / "d", {"train": (3, 4012)})
    deep(root / "train/b/odd.png", 65000, 65100)
    assert inside("pretrain", tmp_path / "a", **TINY, data__root=str(root)) == 0
    what = "9 of 9 train images are 16-bit grey: half of them span 6.2 % of that range or less"
    why = "as 'train/b/odd.png' goes up to 65100; --data.range '[5, 4012]' would suit a typical one"
    assert f"{what}, {why}" in said(tmp_path / "a")


def test_floats_and_32_bits_take_one_range_for_all_images(tmp_path):
    for kind in (np.float32, np.int32):
        folder = tmp_path / kind.__name__
        deep(folder / "d/train/0.tif", 0, 100, kind=kind)
        deep(folder / "d/train/1.tif", -100, 400, kind=kind)
        store = opened(folder / "d")
        assert store.scale == (-100, 400)
        assert brightest(store, 0) == 26214 and brightest(store, 1) == 65535
        each = opened(folder / "d", range="full")
        assert each.scale == "full" and brightest(each, 1) == 65535
        assert brightest(each, 0) == (25700 if kind is np.float32 else 100), "by a range of its own, as before"


def brightest(store, i):
    return int(store.image(i).numpy().max())


def test_values_that_are_no_numbers_are_black_and_said(tmp_path):
    file = io.BytesIO()
    Image.fromarray(np.array([[np.nan, 1.0, 3.0, np.inf, -np.inf]], dtype=np.float32)).save(file, "TIFF")
    found = load(file.getvalue(), 100, (1, 3))
    assert found.pixels[0, :, 0].tolist() == [0, 0, 65535, 65535, 0] and found.depth.ends == ((1.0, 3.0),)
    assert found.depth.kind == "float grey with NaN or infinite values, which become the lowest (of +inf the highest)"


def test_images_of_8_bits_beside_deep_ones_stay_as_they_are(tmp_path, capsys):
    root = twelve_bits(tmp_path / "d", {"train": (3, 4012)})
    for name in "ab":
        Image.fromarray(np.full((16, 16), 77, dtype=np.uint8)).save(root / "train" / name / "flat.png")
    assert inside("pretrain", tmp_path / "a", **TINY, data__root=str(root)) == 0
    text = said(tmp_path / "a")
    assert "8 of 10 train images are 16-bit grey" in text and "the other 2 train images of 8 bits stay as they" in text
    store = opened(root)
    assert set(store.image(store.names.index("train/a/flat.png")).unique().tolist()) == {77}


def test_ranges_share_no_pixels_on_the_disk(tmp_path):
    root = twelve_bits(tmp_path / "d", {"train": (3, 4012)})
    stores = {str(given): opened(root, range=given) for given in ("auto", "full", [0, 8000], [3, 4012], "auto")}
    tops = {given: brightest(store, 0) for given, store in stores.items()}
    assert tops == {"auto": 65535, "full": 4012, "[0, 8000]": 32866, "[3, 4012]": 65535}
    assert len(list((tmp_path / "cache").iterdir())) == 3, "[3, 4012] is what auto came to"
    for given, top in (("full", 4012), ([0, 8000], 32866), ("auto", 65535)):
        assert brightest(opened(root, range=given), 0) == top


def test_what_data_range_takes(capsys):
    line = "data.range: got {}, wanted auto, full or [low, high] with low < high"
    for text, shown in (
        ("[5, 5]", "[5, 5]"),
        ("best", "'best'"),
        ("[1, 2, 3]", "[1, 2, 3]"),
        ("[.nan, 1]", "[nan, 1]"),
    ):
        assert refused(capsys, ["pretrain", "--out", "x", "--data.range", text]) == [line.format(shown)]


# ------------------------------------------------------------------ pages and samples
def tif(*pages, **options):
    """A TIFF of pages: arrays, or (array, options of the page)."""
    file = io.BytesIO()
    with tifffile.TiffWriter(file, bigtiff=options.pop("bigtiff", False)) as writer:
        for page in pages:
            array, more = page if isinstance(page, tuple) else (page, {})
            writer.write(array, **{**options, **more})
    return file.getvalue()


def noise(*shape, kind=np.uint8):
    return np.random.default_rng(0).integers(0, 250, shape).astype(kind)


RGB, GREY = noise(8, 8, 3), noise(8, 8)
BANDS = dict(photometric="minisblack", planarconfig="contig")
WANTED = "wanted 1 (grey), 3 (RGB) or 4 (RGBA or CMYK), or --data.in_chans"
REFUSED = {
    "pages": (tif(GREY, GREY, GREY), "a TIFF of 3 pages; wanted one picture a file, or --data.bands '[0, 1, 2]'"),
    "five samples": (tif(noise(8, 8, 5), **BANDS), f"a TIFF of 5 samples per pixel; {WANTED} 5"),
    "BigTIFF": (tif(noise(8, 8, 5), **BANDS, bigtiff=True), f"a TIFF of 5 samples per pixel; {WANTED} 5"),
    "RGB and two": (tif(noise(8, 8, 5), photometric="rgb"), f"a TIFF of 5 samples per pixel; {WANTED} 5"),
    "two channels": (tif(noise(8, 8, 2), **BANDS), f"a TIFF of 2 samples per pixel; {WANTED} 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tiff_that_would_lose_something_is_named(name):
    content, reason = REFUSED[name]
    with pytest.raises(BadImage) as caught:
        decode(content, 10**6)
    assert caught.value.reason == reason


READ = {
    "previews after it": tif(RGB, (noise(4, 4, 3), {"subfiletype": 1})),
    "a preview before it": tif((noise(4, 4, 3), {"subfiletype": 1}), RGB),
    "big": tif(RGB, bigtiff=True),
    "planes": tif(RGB.transpose(2, 0, 1), photometric="rgb", planarconfig="separate"),
    "compressed as Pillow cannot": tif(RGB, photometric="rgb", compression="zlib", predictor=True, tile=(16, 16)),
}
DEEP = {  # which the reader of 0.1.0 refused, or cut to 8 bits
    "half floats": tif(RGB.astype(np.float16), photometric="rgb"),
    "float colours": tif(RGB.astype(np.float32), photometric="rgb"),
    "planes": tif(RGB.transpose(2, 0, 1).astype(np.uint16), photometric="rgb", planarconfig="separate"),
    "16-bit colours": tif(RGB.astype(np.uint16), photometric="rgb", compression="lzw"),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_colours_are_read_whole(name):
    wanted = np.rint(RGB.astype(float) * (65535 / 249)).astype(np.uint16)
    np.testing.assert_array_equal(load(DEEP[name], 10**6, (0, 249)).pixels, wanted)


@pytest.mark.parametrize("name", READ)
def test_previews_are_no_pages(name):
    np.testing.assert_array_equal(decode(READ[name], 10**6), RGB)
    assert frames(READ[name], 10**6) == 1


def test_training_names_the_files(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 2, "b": 2})
    for name in ("pages", "five samples"):
        (root / "train/a" / f"{name}.tif").write_bytes(REFUSED[name][0])
    lines = faults(load_split, open_splits(section(root), labelled=False).train, bound=None, data=section())
    assert lines[0].startswith(f"data.root: 2 of 6 images cannot be used {HOW}")
    assert lines[1:] == [f"  {root}/train/a/{name}.tif: {REFUSED[name][1]}" for name in ("five samples", "pages")]


# ------------------------------------------------------------------ the check
def test_the_check_reports_depths_and_pictures(tmp_path, capsys):
    root = twelve_bits(tmp_path / "d", {"train": (3, 4012), "val": (10, 3000)})
    Image.fromarray(GREY).save(root / "train/a/eight.png")
    Image.fromarray(RGB).save(root / "train/a/film.gif", save_all=True, append_images=[Image.fromarray(255 - RGB)])
    (root / "train/b/stack.tif").write_bytes(REFUSED["pages"][0])
    tifffile.imwrite(root / "train/b/colour.tif", noise(8, 8, 3, kind=np.uint16), photometric="rgb")
    assert call(["data", "check", "folder", "--root", root, "--out", tmp_path / "c"]) == 1
    text = capsys.readouterr().out
    for line in (
        "depth: 8 of 11 train images are 16-bit grey; values 3 to 4012; [0, 4012] becomes 0 to 1, kept as 16 bits",
        "depth: 1 of 11 train images is 16-bit colour; values 0 to 249; [0, 4012] becomes 0 to 1, kept as 16 bits",
        "depth: the other 2 train images of 8 bits stay as they are",
        "depth: 8 of 8 test images are 16-bit grey; values 10 to 3000; [0, 4012] becomes 0 to 1, kept as 16 bits",
        "train/b/stack.tif: a TIFF of 3 pages; wanted one picture a file, or --data.bands '[0, 1, 2]'",
    ):
        assert line in text, line
    found = json.loads((tmp_path / "c/check.json").read_text())
    assert found["range"] == [0, 4012] and found["depths"]["train"] == {
        "8 bits": {"images": 2}, "16-bit colour": {"images": 1, "low": 0, "high": 249},
        "16-bit grey": {"images": 8, "low": 3, "high": 4012},
    }  # fmt: skip


def test_the_check_compares_dark_images_as_training_sees_them(tmp_path, capsys):
    """At 16 of 256 levels all 12-bit images were flat, hence nearly the same."""
    root = tmp_path / "d"
    for i in range(6):
        field = np.random.default_rng(i).integers(3, 1000, (4, 4)).astype(np.uint16)
        path = root / "train" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.kron(field, np.ones((20, 20), dtype=np.uint16))).save(path)
    call(["data", "check", "folder", "--root", root, "--out", tmp_path / "c"])
    assert json.loads((tmp_path / "c/check.json").read_text())["near_duplicates"] == []


@pytest.mark.parametrize("kind, top", [("10-bit grey", 1023), ("14-bit grey", 16383), ("16-bit colour", 65535)])
def test_what_full_means_is_said_for_any_number_of_bits(kind, top):
    (line,), _ = depth.described("train", ["a"], np.array([kind]), np.array([[0.0, 900.0]]), "full", "data.range")
    assert line.endswith(f"values 0 to 900; [0, {top}] becomes 0 to 1, kept as 16 bits (data.range)")
