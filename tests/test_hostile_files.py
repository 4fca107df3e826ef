"""Files made to hang, to fill the memory or to be taken for another image: refused at once, by their header."""

import io
import struct
import zipfile

import numpy as np
import pytest
import tifffile
from test_channels import npy, tif

from idmm.data.formats import BadImage
from idmm.data.images import Bands, read_image


def overwritten(content, **tags):
    """A TIFF with other values in tags of its first page."""
    file = io.BytesIO(content)
    with tifffile.TiffFile(file, mode="r+b") as found:
        for name, value in tags.items():
            found.pages[0].tags[name].overwrite(value)
    return file.getvalue()


def with_shape(array, old, new):
    """An array's file whose header says another shape."""
    content = npy(array)
    assert content.count(old) == 1 and len(old) == len(new)
    return content.replace(old, new)


@pytest.mark.parametrize("bands", [None, Bands(None, (0,))], ids=["picture", "bands"])
def test_the_size_of_a_tile_counts(bands):
    tiled = tif(np.zeros((16, 16), np.uint16), planarconfig=None, tile=(16, 16), compression="zlib")
    assert read_image(tiled, 256, bands=bands).pixels.shape[:2] == (16, 16)
    huge = overwritten(tiled, TileWidth=16384, TileLength=16384)  # half a GiB, decoded
    with pytest.raises(BadImage, match="16384 x 16384 = 268435456 pixels, more than data.max_pixels 1000000"):
        read_image(huge, 10**6, bands=bands)


def test_a_chain_of_pages_may_lead_back(monkeypatch):
    content = bytearray(tif(np.arange(16, dtype=np.uint16).reshape(4, 4), planarconfig=None, metadata=None))
    (first,) = struct.unpack("<I", content[4:8])
    after = first + 2 + 12 * struct.unpack("<H", content[first : first + 2])[0]
    assert content[after : after + 4] == bytes(4)
    pixels, read = read_image(bytes(content), 100).pixels, tifffile.TiffPages._getitem
    content[after : after + 4] = struct.pack("<I", first)

    def few(self, key, *args):
        return pytest.fail("the chain is followed for ever") if key > 99 else read(self, key, *args)

    monkeypatch.setattr(tifffile.TiffPages, "_getitem", few)
    assert (read_image(bytes(content), 100).pixels == pixels).all()


def test_pages_of_other_samples_are_no_channels():
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(np.zeros((8, 8), np.uint16), photometric="minisblack", contiguous=False)
        writer.write(np.zeros((8, 8, 3), np.uint16), photometric="rgb", contiguous=False)
    with pytest.raises(BadImage, match="pages are of different sizes, samples or types"):
        read_image(file.getvalue(), 100, bands=Bands(2))


def test_a_shape_below_nothing(tmp_path):
    content = with_shape(np.zeros((10, 100), np.uint8), b"(10, 100)", b"(-1, 100)")
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", content)
    for item in (content, (tmp_path / "a.npz").read_bytes()):
        with pytest.raises(BadImage, match=r"an array of shape \[-1, 100\]; expected"):
            read_image(item, 10)


def test_a_tiff_is_decoded_without_threads_of_its_own(monkeypatch):
    deep = np.arange(512 * 512, dtype=np.uint32).reshape(512, 512) % 65536
    content = tif(deep.astype(np.uint16), planarconfig=None, tile=(128, 128), compression="zlib")
    monkeypatch.setattr(tifffile.TIFF, "MAXWORKERS", 8)
    monkeypatch.delattr(tifffile.tifffile, "ThreadPoolExecutor")
    assert (read_image(content, 10**6).pixels[..., 0] == deep).all()


def test_a_truncated_ppm_is_told_once(tmp_path, capfd):
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)
    with pytest.raises(BadImage, match="unreadable or truncated"):
        read_image(b"P6 64 64 65535\n" + bytes(100), 10**6)
    assert capfd.readouterr() == ("", "")
