"""Image files of every common kind decode to the right pixels, and bad ones say why."""

import collections
import io
import struct
import sys
import threading
import time
import zlib

import imagecodecs
import numpy as np
import pillow_heif
import pytest
import tifffile
from folders import section, tree
from helpers import call, call_ok
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from PIL import Image

from idmm.data import formats, parallel
from idmm.data.formats import BadImage
from idmm.data.images import fitted, image_size, read_image
from idmm.data.listing import list_images

RED = [255, 0, 0]
WHITE = [255, 255, 255]


def encode(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, depth, colour_type, raw, trns=b""):
    """Writes a PNG by hand, for what Pillow does not write; raw: rows without filter bytes."""

    stride = len(raw) // height
    rows = b"".join(b"\0" + raw[i * stride : (i + 1) * stride] for i in range(height))
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))]
    parts += [chunk(b"tRNS", trns)] if trns else []
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [*parts, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    )


def pixels(data, dtype=np.uint8):
    array = read_image(data).pixels
    assert array.dtype == dtype
    assert array.ndim == 3
    assert array.shape[2] == 3
    assert array.flags.writeable
    assert array.flags.c_contiguous
    return array


def depth_of(name):
    if "16 bits" in name:
        return np.uint16
    return np.uint8


def image(values, mode=None, dtype=np.uint8):
    return Image.fromarray(np.array(values, dtype=dtype), mode)


def test_pictures_of_8_bits():
    expected = default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    for format in ("PNG", "BMP", "TIFF", "PPM"):
        assert_array_equal(pixels(encode(Image.fromarray(expected), format)), expected)
    for format in ("JPEG", "WEBP", "JPEG2000", "GIF", "ICO", "AVIF"):
        picture = Image.new("RGB", (32, 32) if format == "ICO" else (32, 16), (200, 40, 90))
        array = pixels(encode(picture, format))
        assert array.shape[:2] == picture.size[::-1]
        assert np.abs(array.astype(int) - [200, 40, 90]).max() <= 6


DEEP = [
    [0, 257, 25700],
    [32768, 65278, 65535],
]


def white_is_0(values):
    file = io.BytesIO()
    tifffile.imwrite(file, values, photometric="miniswhite")
    return file.getvalue()


GREYS = {  # a file, and its grey levels
    **{
        f"16 bits {format}": (lambda f=format: encode(image(DEEP, dtype=np.uint16), f), DEEP)
        for format in ("PNG", "TIFF")
    },
    "16 bits JPEG 2000": (
        lambda: imagecodecs.jpeg2k_encode(np.array(DEEP, np.uint16), level=0),
        DEEP,
    ),
    "8 bits TIFF whose 0 is white": (
        lambda: white_is_0(np.uint8([[0, 9]])),
        [[255, 246]],
    ),
    "16 bits TIFF whose 0 is white": (
        lambda: white_is_0(np.uint16([[0, 9]])),
        [[65535, 65526]],
    ),
    "16 bits PGM": (
        lambda: b"P5 2 1 65535\n" + struct.pack(">HH", 0, 25700),
        [[0, 25700]],
    ),
}


@pytest.mark.parametrize("name", GREYS)
def test_grey_keeps_its_bits(name):
    file, expected = GREYS[name]
    array = pixels(file(), depth_of(name))
    assert array[:, :, 0].tolist() == expected
    assert (array == array[:, :, :1]).all()


def palette_image():
    palette = Image.new("P", (3, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255, 0, 255, 0])
    for x in range(3):
        palette.putpixel((x, 0), x)
    return palette


BLUE = [0, 0, 255]
GREEN = [0, 255, 0]
DEEP_RGB = struct.pack(">6H", 65535, 0, 25700, 0, 65535, 257)
ALPHA = [
    [
        [255, 0, 0, 255],
        [255, 0, 0, 0],
        [255, 0, 0, 128],
    ]
]
COLOURS = {  # a file and its pixels
    "16 bits": (
        lambda: png(2, 1, 16, 2, DEEP_RGB),
        [
            [
                [65535, 0, 25700],
                [0, 65535, 257],
            ]
        ],
    ),
    "alpha, 16 bits": (
        lambda: png(2, 1, 16, 6, struct.pack(">8H", 65535, 0, 0, 65535, 9, 9, 9, 0)),
        [[[65535, 0, 0], [65535] * 3]],
    ),
    "alpha": (
        lambda: encode(image(ALPHA, "RGBA")),
        [[RED, WHITE, [255, 127, 127]]],
    ),
    "grey with alpha": (
        lambda: encode(
            Image.merge(
                "LA",
                [
                    Image.new("L", (2, 1), 10),
                    image([[255, 0]]),
                ],
            )
        ),
        [[[10] * 3, WHITE]],
    ),
    "palette": (
        lambda: encode(palette_image()),
        [[RED, BLUE, GREEN]],
    ),
    "one transparent": (
        lambda: encode(palette_image(), transparency=1),
        [[RED, WHITE, GREEN]],
    ),
    "some transparent": (
        lambda: encode(palette_image(), transparency=bytes([255, 0, 128])),
        [[RED, WHITE, [127, 255, 127]]],
    ),
    "transparent GIF": (
        lambda: encode(palette_image(), "GIF", transparency=0),
        [[WHITE, BLUE, GREEN]],
    ),
    "transparent colour": (
        lambda: encode(image([[RED, BLUE]]), transparency=(0, 0, 255)),
        [[RED, WHITE]],
    ),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colours_and_transparency_on_white(name):
    content = COLOURS[name][0]()
    expected = COLOURS[name][1]
    assert pixels(content, depth_of(name)).tolist() == expected


def test_cmyk_jpeg_plain_and_adobe():
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = encode(cmyk, "JPEG", quality=95)
    assert b"Adobe" in data  # Pillow writes the inverted kind
    assert np.abs(pixels(data).astype(int) - RED).max() <= 4
    assert np.abs(pixels(encode(cmyk, "TIFF")).astype(int) - RED).max() == 0


UPRIGHT = {  # what a viewer makes of stored pixels, by EXIF's orientation
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a.swapaxes(0, 1), 2),
    8: lambda a: np.rot90(a, 1),
}
SQUARES = np.kron(default_rng(1).integers(0, 256, (2, 4, 3)), np.ones((8, 8, 1))).astype(np.uint8)
DEEP_SQUARES = SQUARES.astype(np.uint16) * 257


def by_tifffile(array, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, array, photometric="rgb", **options)
    return file.getvalue()


def tagged(array, orientation, **options):
    return by_tifffile(array, extratags=[(0x0112, "H", 1, orientation, True)], **options)


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def with_exif(orientation):
    """A PNG of 16 bits with an eXIf chunk behind its header."""
    content = imagecodecs.png_encode(DEEP_SQUARES)
    return content[:33] + chunk(b"eXIf", exif_of(orientation).tobytes()[6:]) + content[33:]


def heic(picture, **options):
    """A file of a phone. pillow_heif itself is registered by reading only."""
    file = io.BytesIO()
    heif = pillow_heif.from_pillow(picture)
    heif.save(
        file,
        quality=-1,
        chroma=444,
        matrix_coefficients=0,
        **options,
    )
    return file.getvalue()


def by_pillow(format, **options):
    return lambda o: encode(
        Image.fromarray(SQUARES),
        format,
        exif=exif_of(o),
        **options,
    )


TURNED = {  # files of SQUARES by their orientation
    "JPEG": by_pillow("JPEG", quality=100, subsampling=0),
    "AVIF": by_pillow("AVIF", quality=100, subsampling="4:4:4"),
    "HEIC": lambda o: heic(Image.fromarray(SQUARES), exif=exif_of(o).tobytes()),
    "TIFF, strips": lambda o: tagged(SQUARES, o, rowsperstrip=5),
    "TIFF, zlib tiles": lambda o: tagged(
        SQUARES, o, compression="zlib", predictor=True, tile=(16, 16)
    ),
    "TIFF, 16-bit strips": lambda o: tagged(DEEP_SQUARES, o, rowsperstrip=5),
    "PNG, 16 bits": with_exif,
}


@pytest.mark.parametrize("name", TURNED)
def test_exif_orientation_is_applied(name, tmp_path):
    deep = "16" in name
    for orientation, turn in UPRIGHT.items():
        array = pixels(TURNED[name](orientation), np.uint16 if deep else np.uint8)
        expected = turn(DEEP_SQUARES if deep else SQUARES)
        assert array.shape == expected.shape
        assert np.abs(array.astype(int) - expected).max() <= (
            12 if name in ("JPEG", "AVIF", "HEIC") else 0
        ), orientation
        (tmp_path / "file").write_bytes(TURNED[name](orientation))
        assert image_size(tmp_path / "file") == expected.shape[:2]


def test_heic_without_its_library_names_the_extra(monkeypatch, tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    (root / "train/a/phone.HEIC").write_bytes(heic(Image.fromarray(SQUARES)))
    call_ok(f"data check --root {root}")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    assert call(f"data check --root {root}") == 1
    line = (
        "train/a/phone.HEIC: HEIC, which needs pillow-heif. Install it with: pip install "
        "-e '.[heic]'"
    )
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("write", [np.save, tifffile.imwrite])
def test_only_one_large_image_is_in_memory(write, monkeypatch):
    """In any format. Small ones are read by all threads together."""
    monkeypatch.setattr(parallel, "cores", lambda: 4)
    monkeypatch.setattr(formats, "MAX_PIXELS", 8 * 100)
    counts = collections.Counter()
    most = collections.Counter()
    lock = threading.Lock()
    for side in (10, 11):
        array = np.zeros((side, side), np.uint8)
        file = io.BytesIO()
        write(file, array)
        content = file.getvalue()

        def work(_, content=content, side=side):
            decoded = read_image(content)
            with lock:
                counts[side] += 1
                most[side] = max(most[side], counts[side])
            time.sleep(0.05)
            with lock:
                counts[side] -= 1
            return decoded

        assert len([*parallel.parallel_map(work, list("12345678"), None)]) == 8
    assert most[11] == 1
    assert most[10] > 1
    huge = encode(Image.new("1", (40, 30)))
    with pytest.raises(BadImage, match="40 x 30 pixels are more than 800, expected smaller tiles"):
        read_image(huge)


def test_other_kinds_of_files_are_named(tmp_path, caplog):
    root = tree(tmp_path / "d", train={"a": 2})
    for name in ("1.CR2", "2.cr2", "3.svg", "Makefile"):
        (root / "train/a" / name).write_bytes(b"x")
    list_images(section(root), labelled=False)
    line = (
        "skipped 4 files of other kinds (2 .cr2, 1 .svg, 1 without ending). Convert images "
        "among them to PNG"
    )
    assert line in caplog.text


LONG = {  # chunks with texts of megabytes
    b"iTXt": b"XML:com.adobe.xmp\0" + b"\1\0\0\0" + zlib.compress(b"a" * 3_000_000),
    b"iCCP": b"icc\0\0" + zlib.compress(bytes(3_000_000)),
}


@pytest.mark.parametrize("kind", LONG)
def test_long_texts_of_a_png_are_passed_over(kind):
    extra = chunk(kind, LONG[kind])
    for content, expected in (
        (encode(Image.fromarray(SQUARES)), SQUARES),
        (imagecodecs.png_encode(DEEP_SQUARES), DEEP_SQUARES),
    ):
        assert_array_equal(pixels(content[:33] + extra + content[33:], expected.dtype), expected)


def rgba(opacity, dtype=np.uint8):
    """Colours with one opacity everywhere."""
    colours = SQUARES if dtype == np.uint8 else DEEP_SQUARES
    return np.concatenate([colours, np.full_like(colours[:, :, :1], opacity)], axis=2)


CLEAR = {  # files whose opacity is 0 everywhere, and what is shown
    "PNG": (encode(Image.fromarray(rgba(0))), SQUARES),
    "TIFF, zlib tiles": (
        by_tifffile(
            rgba(0),
            compression="zlib",
            predictor=True,
            tile=(16, 16),
        ),
        SQUARES,
    ),
    "palette": (
        encode(palette_image(), transparency=bytes(3)),
        [[RED, BLUE, GREEN]],
    ),
    "PNG, 16 bits": (imagecodecs.png_encode(rgba(0, np.uint16)), DEEP_SQUARES),
    "array": (rgba(0, np.uint16), DEEP_SQUARES),
}


@pytest.mark.parametrize("name", CLEAR)
def test_an_opacity_of_0_everywhere_is_none(name):
    content, expected = CLEAR[name]
    assert_array_equal(read_image(content).pixels, expected)


def test_one_pixel_of_some_opacity_leaves_the_others_white():
    array = rgba(0, np.uint16)
    array[3, 5] = [0, 0, 0, 65535]
    decoded = read_image(imagecodecs.png_encode(array))
    assert (decoded.pixels != 65535).any(axis=2).sum() == 1


def test_paths_of_any_alphabet_and_wrong_suffixes(tmp_path):
    path = tmp_path / "Grüße 猫 🐈.png"
    path.write_bytes(encode(Image.new("RGB", (4, 4), "red"), "GIF"))
    assert read_image(path).pixels.tolist() == [[RED] * 4] * 4


def test_bad_files_say_why(tmp_path):
    def reason(data):
        with pytest.raises(BadImage) as caught:
            read_image(data)
        assert str(caught.value) == caught.value.reason
        return caught.value.reason

    noise = Image.fromarray(default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    assert reason(b"just some text\n" * 20) == "not an image"
    assert reason(encode(noise, "JPEG")[:2000]).startswith(
        "unreadable or truncated (image file is truncated"
    )
    assert reason(tmp_path / "gone.png") == "no such file or directory"
    (tmp_path / "empty.png").touch()
    assert reason(tmp_path / "empty.png") == "empty file"


def test_bombs_are_refused_by_their_header():
    """Also where Pillow refuses them first."""
    huge = png(60_000, 50_000, 8, 2, b"")  # 9 GB, if it were decoded
    icon = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 24, 1000, 22)
    for data in (huge, icon + huge):
        with pytest.raises(
            BadImage, match=r"^has more than 268435456 pixels, expected smaller tiles$"
        ):
            read_image(data)


def test_short_side_is_bounded_and_never_enlarged():
    for size, bound, expected in (
        ((90, 30), 10, (30, 10)),
        ((100, 151), 50, (50, 76)),
    ):
        assert fitted(np.zeros((*size, 3), dtype=np.uint8), bound).shape == (*expected, 3)
    array = np.zeros((30, 90, 3), dtype=np.uint8)
    assert all(fitted(array, bound) is array for bound in (None, 30, 400))
