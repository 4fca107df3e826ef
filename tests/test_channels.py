"""Images of any number of channels and any depth: read whole, scaled as documented, kept as 16
bits, and measured."""

import io
import pickle
import shutil

import numpy as np
import pytest
import tifffile
import torch
from folders import HOW, TINY, faults, opened, section
from helpers import call, inside, logged, metrics, read, refused, same
from test_resume import stop_at

from idmm.data.formats import BadImage
from idmm.data.image_store import store_split
from idmm.data.images import Bands, fitted, read_image
from idmm.data.listing import list_images
from idmm.data.store import mean_and_std, moments

RUN = {**TINY, "data__in_chans": 5}


def tif(array, **options):
    """[H, W, C] as a TIFF of samples side by side, or as ``options`` say."""
    file = io.BytesIO()
    tifffile.imwrite(
        file, array, **{"photometric": "minisblack", "planarconfig": "contig", **options}
    )
    return file.getvalue()


def pages(array, **options):
    """[H, W, C] as a TIFF of C pages."""
    return tif(np.moveaxis(array, 2, 0), planarconfig=None, **options)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def noise(*shape, low=0, high=65536, dtype=np.uint16, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


FIVE = noise(20, 24, 5)
FORMATS = {
    "samples": tif(FIVE),
    "planes": tif(np.moveaxis(FIVE, 2, 0), planarconfig="separate"),
    "ImageJ": pages(FIVE, imagej=True),
    "OME": pages(FIVE, ome=True, compression="zlib"),
    "Zstandard, tiles": tif(FIVE, compression="zstd", tile=(16, 16)),
    "big TIFF, big end first": tif(FIVE, bigtiff=True, byteorder=">"),
    "npy": npy(FIVE),
    "npy, big end first": npy(FIVE.astype(">u2")),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_to_the_last_bit_or_not_at_all(name):
    content = FORMATS[name]
    found = read_image(content, bands=Bands(5))
    np.testing.assert_array_equal(found.pixels, FIVE)
    assert found.pixels.dtype == np.uint16
    chosen = read_image(content, bands=Bands(5, (4, 0)))
    np.testing.assert_array_equal(chosen.pixels, FIVE[:, :, [4, 0]])
    for share in (0.1, 0.5, 0.9):  # the file was cut short
        try:
            cut = read_image(content[: int(share * len(content))], bands=Bands(5)).pixels
        except BadImage:
            continue
        np.testing.assert_array_equal(cut, FIVE)  # what is missing was no pixel


KINDS = "uint8 bool int16 uint16 int64 float32".split()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_number(kind):
    values = np.array([0, 50, 100] * 4, dtype=kind).reshape(3, 2, 2)
    for content in [npy(values), *([] if kind == "bool" else [tif(values)])]:
        found = read_image(content, (0, 100), Bands(2))
        if kind in ("uint8", "bool"):
            wanted = values.astype(np.uint8) * (255 if kind == "bool" else 1)
            assert found.pixels.dtype == np.uint8
        else:
            wanted = np.array([0, 32768, 65535] * 4).reshape(3, 2, 2)
            assert found.pixels.dtype == np.uint16
        np.testing.assert_array_equal(found.pixels, wanted)
        if kind == "float32":
            with pytest.raises(
                BadImage,
                match=f"has values of type {kind}, which need a range, expected 8 or 16 bits",
            ):
                read_image(content, bands=Bands(2))


def test_the_axes_of_an_array():
    def read(*shape, bands):
        return read_image(npy(np.zeros(shape, np.uint8)), bands=bands).pixels.shape

    assert read(6, 7, 5, bands=Bands(5)) == (6, 7, 5)
    assert read(5, 6, 7, bands=Bands(5)) == (6, 7, 5)
    assert (
        read(6, 7, bands=None)
        == read(6, 7, 1, bands=None)
        == read(3, 6, 7, bands=None)
        == (6, 7, 3)
    )
    with pytest.raises(BadImage, match=r"^has 6 channels, expected 5$"):
        read(6, 8, 7, bands=Bands(5))


class Evil:
    def __reduce__(self):
        return open, (Evil.path, "w")


BAD = {
    "a_three.tif": (pages(FIVE[:, :, :4]), "has 4 channels, expected 5"),
    "c_nan.npy": (
        npy(np.where(FIVE == FIVE[3, 4, 2], np.nan, FIVE)[..., :5].astype(np.float32)),
        "not finite (NaN",
    ),
    "e_text.npy": (
        npy(np.full((4, 4, 5), "x")),
        "holds values of type <U1, expected integers, floats",
    ),
    "h_huge.npy": (
        npy(np.zeros((1, 1, 5), np.uint8)).replace(b"(1, 1, 5)", b"(99999, 99999, 5)"),
        "99999 x 99999",
    ),
    "i_four.npy": (
        npy(np.zeros((2, 2, 2, 5))),
        "an array of shape [2, 2, 2, 5], expected [H, W], [H, W, C] or [C, H, W]",
    ),
}


def five(root, train=6, test=2, seed=0, **splits):
    """Labelled TIFFs of five channels; the third has a third of the others' values."""
    for split, count in {"train": train, "val": test}.items():
        for c, name in enumerate("ab"):
            for i in range(count):
                values = noise(5, 4, 4, low=100 + 500 * c, high=4000, seed=[seed, c, i, len(split)])
                values[2] //= 3
                path = root / split / name / f"{i}.tif"
                path.parent.mkdir(parents=True, exist_ok=True)
                tifffile.imwrite(
                    path, np.kron(values, np.ones((1, 5, 6), np.uint16)), photometric="minisblack"
                )
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return five(tmp_path_factory.mktemp("five") / "d")


def test_what_cannot_be_used_is_named_and_nothing_is_run(tmp_path, capsys):
    root = five(tmp_path / "d")
    Evil.path = str(tmp_path / "ran")
    bad = {
        **BAD,
        "j_objects.npy": (
            npy(np.array([[Evil()]], dtype=object)),
            "unreadable or truncated (Object arrays cannot be loaded",
        ),
        "k_pickle.npy": (pickle.dumps(Evil()), "not an image"),
    }
    for name, (content, _) in bad.items():
        (root / "train/a" / name).write_bytes(content)
    lines = refused(
        capsys, ["pretrain", "--data.root", root, "--data.in_chans", 5, "--out", tmp_path / "run"]
    )
    named = [line for line in lines if line.startswith("  ")]
    assert any(
        line.startswith(f"data.root: {len(bad)} of {12 + len(bad)} images cannot be used {HOW}")
        for line in lines
    )
    for line, (name, (_, why)) in zip(named, bad.items(), strict=True):
        assert line.startswith(f"  {root}/train/a/{name}: ") and why in line, line
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ran").exists()
    assert call(["data", "check", "--root", root]) == 1, "it is told by the files' own channels"
    text = capsys.readouterr().out
    assert "channels: 5 channels. Pass --data.in_chans 5." in text
    assert f"unreadable: {len(bad)} files (" in text


def test_bands_that_are_not_there_and_pictures_that_are_none(root, capsys, tmp_path):
    def said(**fields):
        split = list_images(section(root), labelled=False).train
        given = section(root, cache="off", **fields)
        # the same of all in one line
        _, line = faults(store_split, split, stored_size=None, data=given)
        assert line.startswith(f"  12 files ({split.items[0]}, ")
        assert " and 7 more): " in line
        return line.partition("more): ")[2]

    assert said(bands=[0, 5]) == "has 5 channels, and data.bands has 5, counted from 0"
    assert said(in_chans=4) == "has 5 channels, expected 4"
    why = "a TIFF of 5 channels (MINISBLACK), expected a page of grey, RGB or RGBA, or --data.in_chans 5"
    assert said() == why
    for flags, line in {
        ("--data.in_chans", "0"): "data.in_chans: got 0, expected greater than or equal to 1",
        ("--data.bands", "[-1]"): "data.bands[0]: got -1, expected greater than or equal to 0",
        ("--data.bands", "[0, 1]", "--data.in_chans", "3"):
            "data.in_chans: got 3 for 2 bands, expected 2, or no in_chans",
        ("--data.in_chans", "5", "--data.mean", "[0.5]"):
            "data.mean: 1 values for 5 channels, expected one per channel",
        ("--data.in_chans", "5", "--data.range", "[[0, 1]]"):
            "data.range: 1 ranges, expected one per channel, 5",
        ("--data.range", "[[0, 1], [0, 1], [0, 1]]"): "data.range: 3 ranges, expected one for pictures, [low, high]",
    }.items():  # fmt: skip
        assert refused(capsys, ["pretrain", "--out", tmp_path / "x", *flags]) == [line]


def values_of(root, split="train"):
    """[N, 5, H, W] as the files have them, in order."""
    return np.stack([tifffile.imread(path) for path in sorted(root.glob(f"{split}/*/*.tif"))])


def test_values_arrive_scaled_by_the_range_of_each_channel(root):
    raw = values_of(root)
    store = opened(root, in_chans=5)
    ends = [[int(plane.min()), int(plane.max())] for plane in raw.swapaxes(0, 1)]
    assert store.value_range == ends
    assert store.channels == 5
    assert store.image(0).dtype == torch.uint16
    low, high = np.array(ends, float).T[:, :, None, None]
    for i, image in enumerate(raw):
        np.testing.assert_array_equal(
            store.image(i).numpy(), np.rint((image - low) * (65535 / (high - low)))
        )
    two = opened(root, bands=[2, 0])
    np.testing.assert_array_equal(two.image(5).numpy(), store.image(5).numpy()[[2, 0]])
    assert two.value_range == [ends[2], ends[0]]


def test_16_bits_are_resized_as_16_bits():
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64, 1).astype(np.uint16)
    small = fitted(ramp, 16)
    wanted = ramp.reshape(16, 4, 16, 4).mean(axis=(1, 3))
    assert (
        small.dtype == np.uint16 and np.abs(small[2:-2, 2:-2, 0] - wanted[2:-2, 2:-2]).max() < 40
    ), "8 bits: 128"


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """A run of two epochs, and the same stopped in its second; to be copied."""
    folder = tmp_path_factory.mktemp("runs")
    given = {**RUN, "train__epochs": 2, "data__root": str(root)}
    assert inside("pretrain", folder / "whole", **given) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 1, 0 + 1)
        assert inside("pretrain", folder / "cut", **given) == 130
    return folder, given


def test_mean_and_std_are_measured_and_kept(runs, root):
    folder, _ = runs
    store = opened(root, in_chans=5)
    pixels = (
        np.concatenate([store.image(i).numpy().reshape(5, -1) for i in range(len(store))], axis=1)
        / 65535
    )
    found = read(folder / "whole/backbone.json")
    np.testing.assert_allclose(found["mean"], pixels.mean(axis=1), rtol=1e-5)
    np.testing.assert_allclose(found["std"], pixels.std(axis=1), rtol=1e-5)
    kept = read(folder / "whole/last/images.json")
    assert (kept["mean"], kept["std"]) == (found["mean"], found["std"])
    assert kept["range"] == found["range"]
    assert "of the channels, measured from the training images" in logged(folder / "whole")


def test_a_run_goes_on_with_what_it_measured(runs, tmp_path, capsys):
    (folder, given), run = runs, tmp_path / "run"
    shutil.copytree(folder / "cut", run)
    assert inside("pretrain", run, **given, data__mean=[0.5] * 5) == 2
    assert "data.mean: the run in" in capsys.readouterr().err
    assert inside("pretrain", run, **given) == 0
    assert metrics(run) == metrics(folder / "whole")
    assert same(run, folder / "whole")


def test_the_std_of_a_constant_channel_is_1():
    constant = np.full((2, 3, 4), 7, np.uint8)
    assert mean_and_std(moments(constant, grey=False)) == ([0.027451] * 2, [1.0] * 2)
