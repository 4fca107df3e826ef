"""What a TIFF's tags say that Pillow passes over: pages, and samples that are neither grey, RGB nor RGBA."""

import io
from collections.abc import Iterator

from PIL.TiffImagePlugin import ImageFileDirectory_v2

MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
BITS = 258
_NEW_SUBFILE, _SUBFILE, _WIDTH, _SAMPLES, _PLANAR, _FORMAT = 254, 255, 256, 277, 284, 339
_NUMBERS = {1: "integers", 2: "signed integers", 3: "floats"}


def first_picture(data: bytes) -> int | None:
    """Returns the number of the page that is read: the first, or the first that is no preview or mask of another.

    None where the file's tags cannot be read, which is for Pillow to say.
    """
    found = list(_pages(data))
    return next((number for number, page in enumerate(found) if not _beside(page)), 0) if found else None


def fault(data: bytes, mode: str | None) -> tuple[str, int] | None:
    """Says why a TIFF is not read, and how many pages it has; None where nothing speaks against it.

    ``mode`` is Pillow's for it, or None where Pillow does not know what it is.
    """
    found = list(_pages(data))
    if not found:
        return None
    count = sum(not _beside(page) for page in found)
    if count > 1:
        return f"a TIFF of {count} pages; wanted one picture a file", count
    page = next((page for page in found if not _beside(page)), found[0])
    samples, bits = page[_SAMPLES] or 1, max(page[BITS] or (1,))
    dropped = samples == 2 and mode is not None and mode not in ("LA", "La", "PA")  # the second, by Pillow
    if samples > 4 or dropped:
        return f"a TIFF of {samples} samples per pixel; wanted 1 (grey), 3 (RGB) or 4 (RGBA or CMYK)", 1
    numbers = f"{bits}-bit {_NUMBERS.get((page[_FORMAT] or (1,))[0], 'values of another kind')}"
    what = f"a TIFF of {numbers}, {samples} sample{'s' if samples > 1 else ''} per pixel"
    if mode is None and page[BITS]:
        return f"{what}, is not supported; wanted grey, RGB or RGBA of 8 bits, or grey of 16 or 32", 1
    if samples > 1 and page[_PLANAR] == 2 and bits > 8:  # Pillow takes the bytes for 8-bit samples
        return f"{what} in separate planes, is not supported; wanted the samples of a pixel side by side", 1
    return None


def _beside(page: dict) -> bool:
    """Whether a page is a smaller copy or a mask of another."""
    return bool((page[_NEW_SUBFILE] or 0) & 0b101) or page[_SUBFILE] == 2


def _pages(data: bytes) -> Iterator[dict]:
    """Yields some tags of each page, None where it has none of them, as far as they can be read."""
    if not data.startswith(MAGIC):
        return
    header = data[: 16 if data[2:3] == b"+" or data[3:4] == b"+" else 8]
    file, seen = io.BytesIO(data), set()
    try:
        place = ImageFileDirectory_v2(header).next
        while place and place not in seen:
            seen.add(place)
            file.seek(place)
            tags = ImageFileDirectory_v2(header)
            tags.load(file)
            if tags.get(_WIDTH) is None:
                return
            wanted = (_NEW_SUBFILE, _SUBFILE, BITS, _SAMPLES, _PLANAR, _FORMAT)
            yield {tag: tags.get(tag) for tag in wanted}
            place = tags.next
    except Exception:  # a broken chain; Pillow raises a dozen types
        return
