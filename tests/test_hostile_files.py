"""Files made to hang, to fill the memory or to be taken for another image: refused at once, by their header."""

import io
import struct

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


def test_the_size_of_a_tile_counts():
    tiled = tif(np.zeros((16, 16), np.uint16), planarconfig=None, tile=(16, 16), compression="zlib")
    assert read_image(tiled, 256).pixels.shape[:2] == (16, 16)
    huge = overwritten(tiled, TileWidth=16384, TileLength=16384)  # half a GiB, decoded
    with pytest.raises(BadImage, match="16384 x 16384 = 268435456 pixels, more than data.max_pixels 1000000"):
        read_image(huge, 10**6)


def test_a_chain_of_pages_may_lead_back():
    content = bytearray(tif(np.arange(16, dtype=np.uint16).reshape(4, 4), planarconfig=None, metadata=None))
    (first,) = struct.unpack("<I", content[4:8])
    after = first + 2 + 12 * struct.unpack("<H", content[first : first + 2])[0]
    assert content[after : after + 4] == bytes(4)
    pixels = read_image(bytes(content), 100).pixels
    content[after : after + 4] = struct.pack("<I", first)
    assert (read_image(bytes(content), 100).pixels == pixels).all()


def test_pages_of_other_samples_are_no_channels():
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(np.zeros((8, 8), np.uint16), photometric="minisblack", contiguous=False)
        writer.write(np.zeros((8, 8, 3), np.uint16), photometric="rgb", contiguous=False)
    with pytest.raises(BadImage, match="pages are of different sizes, samples or types"):
        read_image(file.getvalue(), 100, bands=Bands(2))


def test_a_shape_below_nothing():
    content = npy(np.zeros((10, 100), np.uint8)).replace(b"(10, 100)", b"(-1, 100)")
    with pytest.raises(BadImage, match=r"an array of shape \[-1, 100\]; expected"):
        read_image(content, 10)


def test_a_truncated_ppm_is_told_once(tmp_path, capfd):
    import cv2

    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)
    with pytest.raises(BadImage, match="unreadable or truncated"):
        read_image(b"P6 64 64 65535\n" + bytes(100), 10**6)
    assert capfd.readouterr() == ("", "")
