"""What is wrong with a dataset, found before it is trained on: unreadable files, duplicates, leakage, odd classes."""

from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from PIL import Image
from scipy.fft import dctn

from idmm import config
from idmm.data.datasets import open_splits
from idmm.data.images import BadImage, decode, digest, in_order, read
from idmm.data.readers.folder import read_all
from idmm.data.readers.layout import root_folder
from idmm.data.split import LabelsMissing, Split, Splits
from idmm.errors import UserError

HASH_SIDE, HASH_BITS = 32, 64  # pixels that are transformed, coefficients that are kept
NEAR_BITS = 12  # perceptual hashes that differ in so few bits are looked at more closely
# Correlation of the thumbnails from which on two images count as nearly the same; symmetric scenes are common.
NEAR_CORRELATION = {"near": 0.9, "mirrored": 0.95}
THUMB = 16  # their side (pixels)
FLAT = 4.0  # a thumbnail of a smaller standard deviation has nothing to correlate (grey levels)
SKEWED = 10.0  # largest class over smallest from which the balance is remarked on
_BLOCK = 2048


@dataclass(frozen=True)
class Where:
    """An image: its split, its number there, its name, and its class if there are labels."""

    split: str
    index: int
    name: str
    label: str | None


@dataclass(frozen=True)
class Pair:
    """Two images that are the same or nearly so.

    Attributes:
        kind: ``same file``, ``same pixels``, ``near`` or ``mirrored`` (nearly the same, left and right exchanged).
        first, second: The images; across splits, the training image comes first.
        similarity: Correlation of their thumbnails, at most 1.
    """

    kind: str
    first: Where
    second: Where
    similarity: float

    @property
    def exact(self) -> bool:
        """Whether they are the same to the last pixel."""
        return self.kind.startswith("same")

    @property
    def leaks(self) -> bool:
        """Whether one is trained on and the other evaluated on."""
        return self.first.split != self.second.split

    @property
    def disagrees(self) -> bool:
        """Whether they have different classes."""
        return None not in (self.first.label, self.second.label) and self.first.label != self.second.label


@dataclass
class Checkup:
    """What was found.

    Attributes:
        dataset, root: What was looked at.
        images: Number of images of each split.
        layout: What is wrong with the folders, so that fine-tuning would refuse the dataset.
        remarks: What fine-tuning would need beside what is there; pretraining is fine without.
        size_mismatch: What is not as the protocol has it: ``{"train": [found, wanted]}``.
        unreadable: ``{"split", "name", "reason"}`` each.
        classes: For each split the number of images of each class.
        tiny: ``{"split", "name", "height", "width"}`` of images whose short side is under ``tiny_below`` pixels.
        pairs: Duplicates, exact ones first, then the most alike.
        near_skipped: Whether there were too many images to look for near-duplicates.
    """

    dataset: str
    root: str | None
    images: dict[str, int] = field(default_factory=dict)
    layout: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    size_mismatch: dict[str, list[int]] = field(default_factory=dict)
    unreadable: list[dict] = field(default_factory=list)
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    tiny_below: int = 0
    tiny: list[dict] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    near_skipped: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing was found that should be mended; near-duplicates and the like may be as they should."""
        exact = any(pair.exact for pair in self.pairs)
        return not (self.layout or self.size_mismatch or self.unreadable or exact)

    def plain(self) -> dict:
        """Returns it for JSON, the pairs sorted into ``duplicates near_duplicates leakage conflicts``."""
        result = {key: value for key, value in asdict(self).items() if key != "pairs"}
        for name, pairs in self.sorted_pairs().items():
            result[name] = [asdict(pair) for pair in pairs]
        return {**result, "clean": self.clean}

    def sorted_pairs(self) -> dict[str, list[Pair]]:
        """Returns pairs within a split, pairs across splits, and, of both, those whose classes differ."""
        within = [pair for pair in self.pairs if not pair.leaks]
        return {
            "duplicates": [pair for pair in within if pair.exact],
            "near_duplicates": [pair for pair in within if not pair.exact],
            "leakage": [pair for pair in self.pairs if pair.leaks],
            "conflicts": [pair for pair in self.pairs if pair.disagrees],
        }


@dataclass(frozen=True)
class _Seen:
    """What is kept of an image once it was looked at."""

    file: bytes
    pixels: bytes
    size: tuple[int, int]
    hashes: tuple[int, int]  # of the image and of its mirror image
    thumb: np.ndarray  # float32 [T, T, 3]


def check(data: config.Data, tiny: int, near_limit: int, progress: bool = False) -> tuple[Checkup, Splits]:
    """Looks at every image of a dataset.

    Args:
        data: Names the dataset; sizes are reported, not insisted on.
        tiny: Short sides under this are reported (pixels).
        near_limit: Near-duplicates are not looked for among more images than this.
        progress: Show a bar on standard error.

    Returns:
        What was found, and the dataset.

    Raises:
        UserError: The dataset cannot be opened at all.
    """
    data = replace(data, allow_size_mismatch=True, val_fraction=0.0, subset=None)
    splits, layout, remarks = _opened(data)
    about = {"layout": layout, "remarks": remarks}
    found = Checkup(data.name, data.root, **about, size_mismatch=splits.size_mismatch, tiny_below=tiny)
    where, seen = [], []
    for name, split in (("train", splits.train), ("val", splits.val), ("test", splits.test)):
        if split is not None:
            found.images[name] = len(split)
            if split.labels is not None:
                counts = np.bincount(split.labels[split.labels >= 0], minlength=len(split.classes))
                found.classes[name] = dict(zip(split.classes, counts.tolist(), strict=True))
            _look(found, name, split, data.max_pixels, where, seen, progress)
    found.pairs, found.near_skipped = _pairs(where, seen, near_limit)
    return found, splits


def _opened(data: config.Data) -> tuple[Splits, list[str], list[str]]:
    """Opens the dataset as fine-tuning does; where that fails, all that is there, with faults or remarks on it."""
    try:
        return open_splits(data, labelled=True), [], []
    except UserError as error:
        fault = error
    splits = read_all(str(root_folder(data))) if data.name == "folder" else open_splits(data, labelled=False)
    lines = list(fault.faults)
    return (splits, [], lines) if isinstance(fault, LabelsMissing) else (splits, lines, [])


def _look(found: Checkup, name: str, split: Split, max_pixels: int, where: list, seen: list, progress: bool) -> None:
    """Reads a split's images; what can be used goes to ``where`` and ``seen``."""
    looks = in_order(lambda i: _seen(split.items[i], max_pixels), len(split), f"checking {name}", progress)
    for i, look in enumerate(looks):
        if isinstance(look, BadImage):
            found.unreadable.append({"split": name, "name": split.names[i], "reason": look.reason})
            continue
        if min(look.size) < found.tiny_below:
            size = {"height": look.size[0], "width": look.size[1]}
            found.tiny.append({"split": name, "name": split.names[i], **size})
        label = None if split.labels is None or split.labels[i] < 0 else split.classes[split.labels[i]]
        where.append(Where(name, i, split.names[i], label))
        seen.append(look)


def _seen(item, max_pixels: int) -> _Seen | BadImage:
    try:
        content = item.tobytes() if isinstance(item, np.ndarray) else read(item) if isinstance(item, str) else item
        image = item if isinstance(item, np.ndarray) else decode(content, max_pixels)  # [H, W, 3]
    except BadImage as error:
        return error
    pixels = repr(image.shape).encode() + image.tobytes()
    picture = Image.fromarray(image)
    thumb = np.asarray(picture.resize((THUMB, THUMB), Image.Resampling.BOX), dtype=np.float32)
    return _Seen(digest(content), digest(pixels), image.shape[:2], perceptual_hashes(picture), thumb)


def perceptual_hashes(picture: Image.Image) -> tuple[int, int]:
    """Returns 64-bit perceptual hashes of an image and of its mirror image.

    The signs, against their median, of the 8 x 8 lowest coefficients of the cosine transform of 32 x 32 grey pixels
    (Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions, 2010). Mirroring changes the sign of
    every other column of coefficients, so that no second transform is needed.
    """
    grey = picture.convert("L").resize((HASH_SIDE, HASH_SIDE), Image.Resampling.LANCZOS)
    low = dctn(np.asarray(grey, dtype=np.float64))[:8, :8]  # [8, 8]
    low[0, 0] = 0.0  # the mean grey says nothing
    mirrored = low * np.where(np.arange(8) % 2, -1.0, 1.0)
    return tuple(int("".join("1" if bit else "0" for bit in c.ravel() > np.median(c)), 2) for c in (low, mirrored))


def _pairs(where: list[Where], seen: list[_Seen], near_limit: int) -> tuple[list[Pair], bool]:
    """Returns all pairs, and whether the search for near ones was left out."""
    exact, distinct = _exact_pairs(where, seen)
    if len(distinct) > near_limit:
        return exact, True
    near = _near_pairs([where[i] for i in distinct], [seen[i] for i in distinct])
    return exact + sorted(near, key=lambda pair: -pair.similarity), False


def _exact_pairs(where: list[Where], seen: list[_Seen]) -> tuple[list[Pair], list[int]]:
    """Pairs the first of equal images with each of the others; returns the firsts, too."""
    same: dict[bytes, list[int]] = defaultdict(list)
    for i, look in enumerate(seen):
        same[look.pixels].append(i)
    pairs = []
    for first, *others in same.values():
        for other in others:
            kind = "same file" if seen[first].file == seen[other].file else "same pixels"
            pairs.append(Pair(kind, where[first], where[other], 1.0))
    return pairs, [group[0] for group in same.values()]


def _near_pairs(where: list[Where], seen: list[_Seen]) -> list[Pair]:
    hashes = np.array([look.hashes for look in seen], dtype=np.uint64).reshape(-1, 2)  # [N, 2]
    pairs = []
    for start in range(0, len(seen), _BLOCK):
        rows = hashes[start : start + _BLOCK, 0]  # [R]
        for side, kind in enumerate(NEAR_CORRELATION):
            others = hashes[start:, side]  # a pair is found from its earlier image
            for i, j in np.argwhere(_bits(rows[:, None] ^ others[None, :]) <= NEAR_BITS):
                if i < j:
                    pair = _confirmed(kind, where, seen, start + i, start + j)
                    pairs += [] if pair is None else [pair]
    best: dict[tuple, Pair] = {}
    for pair in pairs:  # a symmetric image is near and mirrored
        key = (pair.first, pair.second)
        if key not in best or pair.similarity > best[key].similarity:
            best[key] = pair
    return list(best.values())


def _bits(numbers: np.ndarray) -> np.ndarray:
    """Counts the bits that are set, uint64 -> uint8 of the same shape."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(numbers)
    return np.unpackbits(numbers[..., None].view(np.uint8), axis=-1).sum(-1)


def _confirmed(kind: str, where: list[Where], seen: list[_Seen], i: int, j: int) -> Pair | None:
    """A hash is coarse, above all for plain images: the thumbnails have to agree as well."""
    one, two = seen[i].thumb, seen[j].thumb
    likeness = similarity(one, two[:, ::-1] if kind == "mirrored" else two)
    return Pair(kind, where[i], where[j], round(likeness, 4)) if likeness >= NEAR_CORRELATION[kind] else None


def similarity(one: np.ndarray, two: np.ndarray) -> float:
    """Returns the correlation of two thumbnails [T, T, 3], each colour about its mean; of plain ones, 1 or 0."""
    means = one.mean((0, 1)) - two.mean((0, 1))  # [3]
    a, b = one - one.mean((0, 1)), two - two.mean((0, 1))
    if min(a.std(), b.std()) < FLAT:
        return float(max(a.std(), b.std()) < FLAT and np.abs(means).max() < 2 * FLAT)
    return float((a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean()))
