"""Images of more than 8 bits are scaled by one range for a whole data set, which travels; pages are
named."""

import io

import numpy as np
import pytest
import tifffile
from folders import TINY, opened, section, tuned_ok
from helpers import inside_ok, logged, read
from PIL import Image
from test_channels import noise, pages, tif

import idmm
from idmm.data.formats import BadImage
from idmm.data.images import read_image
from idmm.data.listing import list_images
from idmm.data.store import store_images


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
                deep(
                    root / split / name / f"{i}.png",
                    low + i,
                    high - (name == "b"),
                    seed=i,
                )
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return twelve_bits(
        tmp_path_factory.mktemp("deep") / "d",
        {"train": (3, 4012), "val": (0, 4095)},
    )


@pytest.fixture(scope="module")
def runs(root, tmp_path_factory):
    """Pretrained by auto with a cache of its own; nothing may be written to it."""
    folder = tmp_path_factory.mktemp("runs")
    own = {"data__root": root, "data__cache_dir": folder / "cache-auto"}
    inside_ok("pretrain", folder / "auto", **TINY, **own)
    return folder


def info(run, stem="backbone"):
    return read(run / f"{stem}.json")


def test_twelve_bits_use_all_levels_and_the_log_says_how(runs):
    (pixels,) = (runs / "cache-auto").glob("*/*.pixels")
    levels = np.unique(np.fromfile(pixels, dtype=np.uint16))
    assert len(levels) > 2000, "they are not cut to 8 bits"
    assert (levels.min(), levels.max()) == (0, 65535)
    text = "8 of 8 train images have more than 8 bits. Their values [3, 4012] become 0 to 1"
    assert text in logged(runs / "auto")
    assert info(runs / "auto")["range"] == [3, 4012]
    assert idmm.load_backbone(runs / "auto").pretrained_cfg["range"] == [
        3,
        4012,
    ]


def test_deep_test_images_next_to_others_are_read_as_by_predict(tmp_path):
    root = twelve_bits(tmp_path / "d", {"test": (21, 3985)})
    for name in "ab":
        deep(root / "train" / name / "0.png", 0, 255, kind=np.uint8)
    data = section(root, cache="off")
    stores = store_images(list_images(data, labelled=True), data, 24, {24: None}).at(24)
    expected = read_image(root / "test/a/0.png").pixels
    np.testing.assert_array_equal(stores.test.image(0).permute(1, 2, 0).numpy(), expected)


def test_fine_tuning_takes_the_checkpoints_range(runs, root, tmp_path):
    other = twelve_bits(tmp_path / "other", {"train": (100, 2000), "val": (0, 5000)})
    changes = {
        "model__name": None,
        "model__kwargs": None,
        "init": runs / "auto",
    }
    tuned_ok(tmp_path / "b", other, **changes)
    assert info(tmp_path / "b")["range"] == info(tmp_path / "b", "model")["range"] == [3, 4012]
    line = "8 of 8 test images have more than 8 bits. Their values [3, 4012] become 0 to 1"
    assert line in logged(tmp_path / "b")
    tuned_ok(tmp_path / "c", other, **changes, data__range=[50, 3000])
    assert info(tmp_path / "c", "model")["range"] == [50, 3000]


def test_hot_and_dead_pixels_do_not_set_it(tmp_path):
    path = deep(tmp_path / "d/train/0.png", 100, 4000, shape=(128, 128))
    pixels = np.array(Image.open(path))
    pixels[3, 5], pixels[7, 9] = 65535, 0
    Image.fromarray(pixels).save(path)
    deep(tmp_path / "d/train/1.png", 100, 4000, shape=(24, 30))
    store = opened(tmp_path / "d")
    assert store.value_range == [100, 4000]
    assert store.image(0)[0, 3, 5] == 65535
    assert store.image(0)[0, 7, 9] == 0


REFUSED = {
    "pages": (
        pages(noise(8, 8, 3)),
        "a TIFF of 3 channels (MINISBLACK), expected a page of grey, RGB or RGBA, or "
        "--data.bands '[0, 1, 2]'",
    ),
    "16-bit CMYK": (
        tif(noise(8, 8, 4), photometric="separated"),
        "a TIFF of 4 channels (SEPARATED), expected a page of grey, RGB or RGBA, or "
        "--data.in_chans 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tiff_that_would_lose_something_is_named(name):
    content, reason = REFUSED[name]
    with pytest.raises(BadImage) as caught:
        read_image(content)
    assert caught.value.reason == reason


def test_previews_are_no_pages():
    image = noise(8, 8, 3, high=256, dtype=np.uint8)
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(image[:4, :4], subfiletype=1)
        writer.write(image)
    np.testing.assert_array_equal(read_image(file.getvalue()).pixels, image)
