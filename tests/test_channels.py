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
from helpers import (
    call,
    inside,
    inside_ok,
    logged,
    metrics,
    read,
    refused,
    same,
)
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
        file,
        array,
        **{"photometric": "minisblack", "planarconfig": "contig", **options},
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
    pixels = read_image(content, bands=Bands(5)).pixels
    np.testing.assert_array_equal(pixels, FIVE)
    assert pixels.dtype == np.uint16
    pixels = read_image(content, bands=Bands(5, (4, 0))).pixels
    np.testing.assert_array_equal(pixels, FIVE[:, :, [4, 0]])
    for share in (0.1, 0.5, 0.9):  # the file was cut short
        try:
            cut = read_image(content[: int(share * len(content))], bands=Bands(5)).pixels
        except BadImage:
            continue
        np.testing.assert_array_equal(cut, FIVE)  # what is missing was no pixel


# what 0, 50 and 100 become with the range 0 to 100; 8 bits are taken as they are
AS_THEY_ARE = np.array([0, 50, 100], np.uint8)
SCALED = np.array([0, 32768, 65535], np.uint16)
KINDS = {"uint8": AS_THEY_ARE, "bool": np.array([0, 255, 255], np.uint8)}
KINDS |= dict.fromkeys(("int16", "uint16", "int64", "float32"), SCALED)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_number(kind):
    values = np.array([0, 50, 100] * 4, dtype=kind).reshape(3, 2, 2)
    expected = np.tile(KINDS[kind], 4).reshape(3, 2, 2)
    contents = [npy(values)]
    if kind != "bool":
        contents.append(tif(values))
    for content in contents:
        pixels = read_image(content, (0, 100), Bands(2)).pixels
        assert pixels.dtype == expected.dtype
        np.testing.assert_array_equal(pixels, expected)
        if kind == "float32":
            why = "has values of type float32, which need a range, expected 8 or 16 bits"
            with pytest.raises(BadImage, match=why):
                read_image(content, bands=Bands(2))


def test_the_axes_of_an_array():
    for shape, bands in (
        ((6, 7, 5), 5),
        ((5, 6, 7), 5),
        ((6, 7), 3),
        ((6, 7, 1), 3),
        ((3, 6, 7), 3),
    ):
        content = npy(np.zeros(shape, np.uint8))
        pixels = read_image(content, bands=Bands(5) if bands == 5 else None).pixels
        assert pixels.shape == (6, 7, bands)
    with pytest.raises(BadImage, match=r"^has 6 channels, expected 5$"):
        read_image(npy(np.zeros((6, 8, 7), np.uint8)), bands=Bands(5))


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
                values = noise(
                    5,
                    4,
                    4,
                    low=100 + 500 * c,
                    high=4000,
                    seed=[seed, c, i, len(split)],
                )
                values[2] //= 3
                path = root / split / name / f"{i}.tif"
                path.parent.mkdir(parents=True, exist_ok=True)
                tifffile.imwrite(
                    path,
                    np.kron(values, np.ones((1, 5, 6), np.uint16)),
                    photometric="minisblack",
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
    argv = f"pretrain --data.root {root} --data.in_chans 5 --out {tmp_path}/run"
    lines = refused(capsys, argv)
    head = f"data.root: {len(bad)} of {12 + len(bad)} images cannot be used {HOW}"
    assert head in "\n".join(lines)
    named = [line for line in lines if line.startswith("  ")]
    for line, (name, (_, why)) in zip(named, bad.items(), strict=True):
        assert line.startswith(f"  {root}/train/a/{name}: ")
        assert why in line
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "ran").exists()
    assert call(f"data check --root {root}") == 1
    text = capsys.readouterr().out
    assert "channels: 5 channels. Pass --data.in_chans 5." in text, "those of the files"
    assert f"unreadable: {len(bad)} files (" in text


def test_bands_that_are_not_there_and_pictures_that_are_none(root, capsys, tmp_path):
    def reason(**fields):
        """What is wrong with all files, in one line."""
        split = list_images(section(root), labelled=False).train
        data = section(root, cache="off", **fields)
        _, line = faults(store_split, split, stored_size=None, data=data)
        files, _, reason = line.partition(" and 7 more): ")
        assert files.startswith(f"  12 files ({split.items[0]}, ")
        return reason

    assert reason(bands=[0, 5]) == "has 5 channels, and data.bands has 5, counted from 0"
    assert reason(in_chans=4) == "has 5 channels, expected 4"
    kinds = "expected a page of grey, RGB or RGBA, or --data.in_chans 5"
    assert reason() == f"a TIFF of 5 channels (MINISBLACK), {kinds}"
    for flags, line in {
        (
            "--data.in_chans",
            "0",
        ): "data.in_chans: got 0, expected greater than or equal to 1",
        (
            "--data.bands",
            "[-1]",
        ): "data.bands[0]: got -1, expected greater than or equal to 0",
        (
            "--data.bands",
            "[0, 1]",
            "--data.in_chans",
            "3",
        ): "data.in_chans: got 3 for 2 bands, expected 2, or no in_chans",
        (
            "--data.in_chans",
            "5",
            "--data.mean",
            "[0.5]",
        ): "data.mean: 1 values for 5 channels, expected one per channel",
        (
            "--data.in_chans",
            "5",
            "--data.range",
            "[[0, 1]]",
        ): "data.range: 1 ranges, expected one per channel, 5",
        (
            "--data.range",
            "[[0, 1], [0, 1], [0, 1]]",
        ): "data.range: 3 ranges, expected one for pictures, [low, high]",
    }.items():
        assert refused(capsys, ["pretrain", "--out", tmp_path / "x", *flags]) == [line]


def test_values_arrive_scaled_by_the_range_of_each_channel(root):
    files = sorted(root.glob("train/*/*.tif"))
    raw = np.stack([tifffile.imread(path) for path in files])  # [N, 5, H, W]
    store = opened(root, in_chans=5)
    low = raw.min((0, 2, 3))
    high = raw.max((0, 2, 3))
    ends = np.stack([low, high], axis=1).tolist()
    assert store.value_range == ends
    assert store.image(0).dtype == torch.uint16
    scale = 65535 / (high.astype(float) - low)
    for i, image in enumerate(raw):
        expected = np.rint((image - low[:, None, None]) * scale[:, None, None])
        np.testing.assert_array_equal(store.image(i).numpy(), expected)
    two = opened(root, bands=[2, 0])
    np.testing.assert_array_equal(two.image(5).numpy(), store.image(5).numpy()[[2, 0]])
    assert two.value_range == [ends[2], ends[0]]


def test_16_bits_are_resized_as_16_bits():
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64, 1).astype(np.uint16)
    small = fitted(ramp, 16)
    expected = ramp.reshape(16, 4, 16, 4).mean(axis=(1, 3))
    difference = small[:, :, 0] - expected
    assert np.abs(difference[2:-2, 2:-2]).max() < 40, "8 bits: 128"


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """A run of two epochs, and the same stopped in its second; to be copied."""
    folder = tmp_path_factory.mktemp("runs")
    changes = {**RUN, "train__epochs": 2, "data__root": root}
    inside_ok("pretrain", folder / "whole", **changes)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 1, 0 + 1)
        assert inside("pretrain", folder / "cut", **changes) == 130
    return folder, changes


def test_mean_and_std_are_measured_and_kept(runs, root):
    run = runs[0] / "whole"
    store = opened(root, in_chans=5)
    pixels = np.stack([store.image(i).numpy() for i in range(len(store))]) / 65535
    info = read(run / "backbone.json")
    np.testing.assert_allclose(info["mean"], pixels.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(info["std"], pixels.std((0, 2, 3)), rtol=1e-5)
    images = read(run / "last/images.json")
    for key in ("mean", "std", "range"):
        assert images[key] == info[key]
    assert "of the channels, measured from the training images" in logged(run)


def test_a_run_goes_on_with_what_it_measured(runs, tmp_path, capsys):
    (folder, changes), run = runs, tmp_path / "run"
    shutil.copytree(folder / "cut", run)
    assert inside("pretrain", run, **changes, data__mean=[0.5] * 5) == 2
    assert "data.mean: the run in" in capsys.readouterr().err
    inside_ok("pretrain", run, **changes)
    assert metrics(run) == metrics(folder / "whole")
    assert same(run, folder / "whole")


def test_the_std_of_a_constant_channel_is_1():
    constant = np.full((2, 3, 4), 7, np.uint8)
    assert mean_and_std(moments(constant, grey=False)) == (
        [0.027451] * 2,
        [1.0] * 2,
    )
