"""What a TIFF's tags say that Pillow passes over: pages, and samples that are neither grey, RGB nor RGBA."""

import io
from collections.abc import Iterator

from PIL.TiffImagePlugin import ImageFileDirectory_v2

BITS = 258
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the last two: BigTIFF
_NEW_SUBFILE, _SUBFILE, _WIDTH, _SAMPLES, _PLANAR, _FORMAT = 254, 255, 256, 277, 284, 339
_NUMBERS = {1: "integers", 2: "signed integers", 3: "floats"}


def pages(data: bytes) -> tuple[int, int, dict] | None:
    """Reads the tags of a file; None where they cannot be read, or it is no TIFF.

    Returns:
        How many pictures it holds, less previews and masks of them; the number of the page to read, the first that is
        neither; and the tags of that page, None where it lacks one.
    """
    if not (found := list(_directories(data))):
        return None
    whole = [number for number, tags in enumerate(found) if not _beside(tags)] or [0]
    return len(whole), whole[0], found[whole[0]]


def fault(count: int, tags: dict, mode: str | None) -> str | None:
    """Says why a TIFF of so many pictures is not read; ``mode`` is Pillow's, None where Pillow does not know it."""
    if count > 1:
        return f"a TIFF of {count} pages; wanted one picture a file"
    samples, bits = tags[_SAMPLES] or 1, max(tags[BITS] or (1,))
    dropped = samples == 2 and mode is not None and mode not in ("LA", "La", "PA")  # the second, by Pillow
    if samples > 4 or dropped:
        return f"a TIFF of {samples} samples per pixel; wanted 1 (grey), 3 (RGB) or 4 (RGBA or CMYK)"
    numbers = f"{bits}-bit {_NUMBERS.get((tags[_FORMAT] or (1,))[0], 'values of another kind')}"
    what = f"a TIFF of {numbers}, {samples} sample{'s' if samples > 1 else ''} per pixel"
    if mode is None and tags[BITS]:
        return f"{what}, is not supported; wanted grey, RGB or RGBA of 8 bits, or grey of 16 or 32"
    if samples > 1 and tags[_PLANAR] == 2 and bits > 8:  # Pillow takes the bytes for 8-bit samples
        return f"{what} in separate planes, is not supported; wanted the samples of a pixel side by side"
    return None


def _beside(tags: dict) -> bool:
    """Whether a page is a smaller copy or a mask of another."""
    return bool((tags[_NEW_SUBFILE] or 0) & 0b101) or tags[_SUBFILE] == 2


def _directories(data: bytes) -> Iterator[dict]:
    """Yields some tags of each page, as far as they can be read."""
    if not data.startswith(_MAGIC):
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
            yield {tag: tags.get(tag) for tag in (_NEW_SUBFILE, _SUBFILE, BITS, _SAMPLES, _PLANAR, _FORMAT)}
            place = tags.next
    except Exception:  # a broken chain; Pillow raises a dozen types
        return
