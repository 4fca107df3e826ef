"""TIFF, by tifffile: pages and samples are channels, in any type, order and compression; previews are passed over."""

import contextlib
import io
import struct
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import tifffile
from PIL import Image, UnidentifiedImageError

from idmm.data.raw import ORIENTATION, BadImage, Opened, as_bands, check_pixels, numbers, plain

_OLD_SUBFILE = 255
_LAB = (8, 9, 10, 32844, 32845)  # colour spaces of brightness and two differences


def opened_tiff(
    stack: contextlib.ExitStack,
    content: bytes,
    max_pixels: int,
    pillow: Callable[[], Image.Image],
    of_pillow: Callable[[Image.Image], Opened],
) -> Opened | None:
    """Reads the header of a TIFF; ``stack`` closes it.

    Args:
        stack: Closes the file.
        content: Of the file.
        max_pixels: As for :func:`idmm.data.formats.opened`.
        pillow: Opens it by Pillow, which reads pictures of 8 bits.
        of_pillow: Makes of that what is returned, for palettes and less than 8 bits.

    Returns:
        None where tifffile cannot open it.
    """
    try:
        tif = stack.enter_context(tifffile.TiffFile(io.BytesIO(content)))
        pages = list(_pages(tif))
    except Exception:  # which Pillow may read, or says what is wrong with it
        return None
    whole = [(number, page) for number, page in pages if not _beside(page)] or pages[:1]
    number, page = whole[0]
    bits = max(np.atleast_1d(page.bitspersample).tolist())
    check_pixels([(page.imagewidth, page.imagelength)], max_pixels)
    check_pixels([(each.tilewidth, each.tilelength * each.tiledepth) for _, each in whole], max_pixels)
    sole = len(whole) == 1
    eight = bits <= 8 and page.sampleformat in (1, 4) and sole
    picture = None
    if eight:
        with contextlib.suppress(UnidentifiedImageError):
            picture = pillow()
            picture.seek(number)
        if picture is not None and (bits < 8 or page.photometric == tifffile.PHOTOMETRIC.PALETTE):
            return of_pillow(picture)
    if page.dtype is None:
        raise BadImage(f"a TIFF of {bits}-bit values of a kind that is not known; wanted integers or floats")
    text, full = numbers(page.dtype, bits if bits > 8 else None)
    _check_chain(tif, [page.offset for _, page in pages])
    samples = page.samplesperpixel
    return Opened(
        page.imagelength,
        page.imagewidth,
        samples * len(whole),
        text,
        partial(_page_values, [page for _, page in whole]),
        (lambda: picture) if picture is not None else None,
        full,
        _no_picture(len(whole), page, readable=picture is not None),
        len(whole),
        lambda: page.tags.valueof(ORIENTATION, 1),
        cmyk=page.photometric == tifffile.PHOTOMETRIC.SEPARATED,
        shape=f"a TIFF of {len(whole)} pages" if len(whole) > 1 else f"a TIFF of {samples} samples per pixel",
    )


def _pages(tif) -> Iterator[tuple[int, tifffile.TiffPage]]:
    """Yields the pages with their numbers, each once: a broken chain may lead back to one."""
    seen = set()
    for number, page in enumerate(tif.pages):
        if page.offset in seen:
            return
        seen.add(page.offset)
        yield number, page


def _beside(page) -> bool:
    """Whether a page is a smaller copy or a mask of another."""
    return bool(int(page.subfiletype) & 0b101) or page.tags.valueof(_OLD_SUBFILE) == 2


def _check_chain(tif, offsets: list[int]) -> None:
    """Raises BadImage where the last page that could be read names another one: the file was cut short."""
    form, file = tif.tiff, tif.filehandle
    file.seek(offsets[-1])
    (count,) = struct.unpack(form.tagnoformat, file.read(form.tagnosize))
    file.seek(offsets[-1] + form.tagnosize + count * form.tagsize)
    (after,) = struct.unpack(form.offsetformat, file.read(form.offsetsize))
    if after and after not in offsets:
        raise BadImage("unreadable or truncated (pages are missing)")


def _no_picture(count: int, page, readable: bool) -> str | None:
    """Says why a TIFF of so many pages is no picture; ``readable``: by Pillow."""
    samples = page.samplesperpixel
    if count > 1:
        return f"a TIFF of {count} pages; wanted one picture a file, or {as_bands(count * samples)}"
    opaque = samples == 2 and not any(int(kind) in (1, 2) for kind in page.extrasamples)
    if samples > 4 or opaque:
        wanted = f"wanted 1 (grey), 3 (RGB) or 4 (RGBA or CMYK), or {as_bands(samples)}"
        return f"a TIFF of {samples} samples per pixel; {wanted}"
    if int(page.photometric) in _LAB and not readable:
        return f"a TIFF of the colour space {page.photometric.name}; wanted grey, RGB, RGBA or CMYK"
    return None


def _page_values(pages: list) -> np.ndarray:
    """Reads the samples of all pages, [H, W, C]."""
    first, found = pages[0], []
    for page in pages:
        planes, depth, height, width, samples = page.shaped
        if depth != 1 or _kind(page) != _kind(first):
            raise BadImage("a TIFF whose pages are of different sizes, samples or types")
        # one thread: images side by side are the parallel part
        values = page.asarray(squeeze=False, maxworkers=1).reshape(planes, height, width, samples)
        values = values.transpose(1, 2, 0, 3).reshape(height, width, -1)  # [H, W, S]
        if page.photometric == tifffile.PHOTOMETRIC.MINISWHITE and values.dtype in (bool, np.uint8):
            values = ~values
        found.append(plain(values))
    return np.concatenate(found, axis=2) if len(found) > 1 else found[0]


def _kind(page) -> tuple:
    return page.imagelength, page.imagewidth, page.samplesperpixel, page.dtype
