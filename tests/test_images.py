"""Image files of every common kind decode to the right pixels, and bad ones say why."""

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from idmm.data.images import BadImage, bound_short_side, decode, probe, quiet_pillow, read

MANY = 100_000_000
RED, WHITE = [255, 0, 0], [255, 255, 255]


def encode(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(width, height, depth, colour_type, raw, trns=b""):
    """Writes a PNG by hand, for what Pillow does not write; raw: rows without filter bytes."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    stride = len(raw) // height
    rows = b"".join(b"\0" + raw[i * stride : (i + 1) * stride] for i in range(height))
    parts = [chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0))]
    parts += [chunk(b"tRNS", trns)] if trns else []
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


def pixels(data):
    array = decode(data, MANY)
    assert array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3
    assert array.flags.writeable and array.flags.c_contiguous
    return array


def test_rgb_is_exact_in_height_width_order():
    wanted = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    for format in ("PNG", "BMP", "TIFF", "PPM"):
        np.testing.assert_array_equal(pixels(encode(Image.fromarray(wanted), format)), wanted)


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "JPEG2000", "GIF", "ICO"])
def test_other_formats_are_close(format):
    image = Image.new("RGB", (32, 16), (200, 40, 90)) if format != "ICO" else Image.new("RGB", (32, 32), (200, 40, 90))
    array = pixels(encode(image, format))
    assert array.shape[:2] == image.size[::-1]
    assert np.abs(array.astype(int) - [200, 40, 90]).max() <= 6


def test_grey_and_one_bit():
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    np.testing.assert_array_equal(pixels(encode(Image.fromarray(grey))), np.repeat(grey[..., None], 3, 2))
    bits = Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).convert("1")
    assert pixels(encode(bits))[:, :, 1].tolist() == [[0, 255], [255, 0]]


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_and_not_clipped(format):
    values = np.array([[0, 257, 25700], [32768, 65278, 65535]], dtype=np.uint16)
    array = pixels(encode(Image.fromarray(values), format))
    assert array[:, :, 0].tolist() == [[0, 1, 100], [128, 254, 255]]
    assert (array == array[:, :, :1]).all()


def test_sixteen_bit_pgm_and_big_endian_tiff():
    pgm = b"P5 2 1 65535\n" + struct.pack(">HH", 0, 25700)
    assert pixels(pgm)[0, :, 0].tolist() == [0, 100]
    tiff = encode(Image.fromarray(np.array([[0, 25700]], dtype=">u2").astype(">u2")), "TIFF")
    assert pixels(tiff)[0, :, 0].tolist() == [0, 100]


def test_sixteen_bit_rgb():
    raw = struct.pack(">6H", 65535, 0, 25700, 0, 65535, 257)
    assert pixels(png(2, 1, 16, 2, raw)).tolist() == [[[255, 0, 100], [0, 255, 1]]]


@pytest.mark.parametrize(
    "values, wanted",
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 255.0], [0, 100, 255]),
        ([0.0, 25700.0, 65535.0], [0, 100, 255]),
        ([-2.0, 0.0, 2.0], [0, 128, 255]),
        ([0.0, np.nan, 1.0], [0, 0, 255]),
    ],
)
def test_floats_are_scaled_from_the_range_that_holds_them(values, wanted):
    array = pixels(encode(Image.fromarray(np.array([values], dtype=np.float32)), "TIFF"))
    assert array[0, :, 0].tolist() == wanted


def test_wide_integers_are_scaled_from_least_to_greatest():
    array = pixels(encode(Image.fromarray(np.array([[0, 500_000, 1_000_000]], dtype=np.int32)), "TIFF"))
    assert array[0, :, 0].tolist() == [0, 128, 255]
    constant = pixels(encode(Image.fromarray(np.full((1, 2), 70_000, dtype=np.int32)), "TIFF"))
    assert constant[0, :, 0].tolist() == [0, 0]


def test_alpha_is_composited_on_white():
    rgba = Image.fromarray(np.array([[[255, 0, 0, 255], [255, 0, 0, 0], [255, 0, 0, 128]]], dtype=np.uint8), "RGBA")
    assert pixels(encode(rgba)).tolist() == [[RED, WHITE, [255, 127, 127]]]
    la = Image.merge("LA", [Image.new("L", (2, 1), 10), Image.fromarray(np.array([[255, 0]], dtype=np.uint8))])
    assert pixels(encode(la)).tolist() == [[[10, 10, 10], WHITE]]


def palette_image():
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 0, 255, 0, 255, 0])
    for x in range(3):
        image.putpixel((x, 0), x)
    return image


def test_palette_with_and_without_transparency():
    assert pixels(encode(palette_image())).tolist() == [[RED, [0, 0, 255], [0, 255, 0]]]
    one = encode(palette_image(), transparency=1)
    assert pixels(one).tolist() == [[RED, WHITE, [0, 255, 0]]]
    several = encode(palette_image(), transparency=bytes([255, 0, 128]))
    assert pixels(several).tolist() == [[RED, WHITE, [127, 255, 127]]]
    gif = encode(palette_image(), "GIF", transparency=0)
    assert pixels(gif).tolist() == [[WHITE, [0, 0, 255], [0, 255, 0]]]


def test_palette_with_alpha_channel():
    alpha = Image.fromarray(np.array([[255, 0, 255]], dtype=np.uint8))
    image = palette_image().convert("PA")
    image.putalpha(alpha)
    with_channel = pixels_of_mode(image)
    assert with_channel.tolist() == [[RED, WHITE, [0, 255, 0]]]


def pixels_of_mode(image):
    """For modes that no file format of ours writes."""
    from idmm.data.images import _rgb

    return _rgb(image)


def test_premultiplied_alpha_and_palette_of_rgba():
    rgba = Image.fromarray(np.array([[[255, 0, 0, 255], [0, 0, 0, 0]]], dtype=np.uint8), "RGBA")
    assert pixels_of_mode(rgba.convert("RGBa")).tolist() == [[RED, WHITE]]
    assert pixels_of_mode(rgba.convert("LA").convert("La")).tolist() == [[[76, 76, 76], WHITE]]
    image = palette_image()
    image.putpalette([255, 0, 0, 255, 0, 0, 255, 0, 0, 255, 0, 255], "RGBA")
    assert pixels_of_mode(image).tolist() == [[RED, WHITE, [0, 255, 0]]]


def test_transparent_colour_of_rgb_and_grey():
    rgb = Image.fromarray(np.array([[RED, [0, 0, 255]]], dtype=np.uint8))
    assert pixels(encode(rgb, transparency=(0, 0, 255))).tolist() == [[RED, WHITE]]
    grey = Image.fromarray(np.array([[10, 20]], dtype=np.uint8))
    assert pixels(encode(grey, transparency=20)).tolist() == [[[10] * 3, WHITE]]
    deep = png(2, 1, 16, 2, struct.pack(">6H", 65535, 0, 0, 0, 0, 65535), trns=struct.pack(">3H", 0, 0, 65535))
    assert pixels(deep).tolist() == [[RED, WHITE]]


def test_cmyk_jpeg_plain_and_adobe():
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = encode(cmyk, "JPEG", quality=95)
    assert b"Adobe" in data  # Pillow writes the inverted kind
    assert np.abs(pixels(data).astype(int) - RED).max() <= 4
    assert np.abs(pixels(encode(cmyk, "TIFF")).astype(int) - RED).max() == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    upright = np.zeros((16, 32, 3), dtype=np.uint8)
    upright[:8, :16], upright[8:, 16:] = RED, [0, 0, 255]
    undo = {  # how a camera stores it
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }.get(orientation, lambda a: a)
    exif = Image.Exif()
    exif[0x0112] = orientation
    for format, options in (("JPEG", {"quality": 100, "subsampling": 0}), ("PNG", {}), ("WEBP", {"lossless": True})):
        array = pixels(encode(Image.fromarray(np.ascontiguousarray(undo(upright))), format, exif=exif, **options))
        assert array.shape == upright.shape
        assert np.abs(array.astype(int) - upright).max() <= 6


def test_broken_exif_is_passed_over():
    data = encode(Image.new("RGB", (8, 8), "red"), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert pixels(data).shape == (8, 8, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_their_first_frame(format):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "lime")]
    data = encode(frames[0], format, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(data).astype(int) - RED).max() <= 4


def test_paths_of_any_alphabet_and_wrong_suffixes(tmp_path):
    path = tmp_path / "Grüße 猫 🐈.png"
    path.write_bytes(encode(Image.new("RGB", (4, 4), "red"), "GIF"))
    assert decode(path, MANY).tolist() == decode(str(path), MANY).tolist() == [[RED] * 4] * 4


def test_bad_files_say_why(tmp_path):
    def reason(data):
        with pytest.raises(BadImage) as caught:
            decode(data, MANY)
        assert str(caught.value) == caught.value.reason
        return caught.value.reason

    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    assert reason(b"") == "empty file"
    assert reason(b"just some text\n" * 20) == "not an image"
    assert reason(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n") == "not an image"
    for format in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"):
        data = encode(noise, format)
        assert reason(data[: len(data) // 2]).startswith(("unreadable or truncated (", "not an image")), format
    assert reason(encode(noise, "JPEG")[:2000]).startswith("unreadable or truncated (image file is truncated")
    assert reason(tmp_path / "gone.png") == "no such file or directory"
    assert reason(tmp_path) == "is a directory"
    (tmp_path / "empty.png").touch()
    assert reason(tmp_path / "empty.png") == "empty file"
    with pytest.raises(BadImage, match="^empty file$"):
        read(tmp_path / "empty.png")


def test_bombs_are_refused_by_their_header():
    huge = png(60_000, 50_000, 8, 2, b"")  # 9 GB, if it were decoded
    with pytest.raises(BadImage, match=r"^60000 x 50000 = 3000000000 pixels, more than data.max_pixels 100000000$"):
        decode(huge, MANY)
    small = encode(Image.new("RGB", (10, 10)))
    assert decode(small, 100).shape == (10, 10, 3)
    with pytest.raises(BadImage, match=r"^10 x 10 = 100 pixels, more than data.max_pixels 99$"):
        decode(small, 99)


def test_a_bomb_inside_an_icon_is_refused():
    ico = struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 24, 1000, 22)
    with pytest.raises(BadImage, match=r"^60000 x 50000 = 3000000000 pixels"):
        decode(ico + png(60_000, 50_000, 8, 2, b""), MANY)


def test_pillows_own_limit_neither_warns_nor_refuses_and_is_left_alone(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    data = encode(Image.new("RGB", (10, 10)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        with ThreadPoolExecutor(8) as pool:
            assert all(a.shape == (10, 10, 3) for a in pool.map(lambda _: decode(data, MANY), range(200)))
        with quiet_pillow(), pytest.raises(BadImage):
            decode(b"text", MANY)
        assert warnings.filters == before
    assert Image.MAX_IMAGE_PIXELS == 20
    with pytest.raises(Image.DecompressionBombError):
        Image.open(io.BytesIO(data))


def test_short_side_is_bounded_and_never_enlarged():
    array = np.zeros((30, 90, 3), dtype=np.uint8)
    assert bound_short_side(array, 10).shape == (10, 30, 3)
    assert bound_short_side(array.transpose(1, 0, 2), 10).shape == (30, 10, 3)
    assert bound_short_side(np.zeros((100, 151, 3), dtype=np.uint8), 50).shape == (50, 76, 3)
    assert bound_short_side(array, None) is array
    assert bound_short_side(array, 30) is array
    assert bound_short_side(array, 400) is array
    assert bound_short_side(np.zeros((40, 40, 3), dtype=np.uint8), 7).shape == (7, 7, 3)


def test_shrinking_is_antialiased():
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = bound_short_side(stripes, 16)
    assert np.abs(small[:, 2:-2].astype(int) - 127).max() <= 8  # without it: black or white
    assert small.flags.writeable and small.dtype == np.uint8


def test_probe_reads_the_header_and_refuses_bombs(tmp_path):
    picture = Image.new("RGB", (30, 20))
    for name in ("a.png", "a.ico", "a.jpg"):
        picture.save(tmp_path / name, **({"sizes": [(30, 20)]} if name == "a.ico" else {}))
        assert probe(tmp_path / name, 600) == (20, 30)
        assert probe((tmp_path / name).read_bytes(), 600) == (20, 30)
        with pytest.raises(BadImage, match="more than data.max_pixels 599"):
            probe(tmp_path / name, 599)
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    assert probe(tmp_path / "b.png", 600) == (20, 30), "the pixels are not looked at"
    with pytest.raises(BadImage, match="not an image"):
        probe(b"nothing", 600)
