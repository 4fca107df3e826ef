"""What is wrong with a dataset, found before it is trained on: unreadable files, duplicates, leakage, odd classes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace

import imagehash
import numpy as np
from PIL import Image

from idmm import config
from idmm.data.formats import BadImage, RangeUnknown
from idmm.data.image_store import measure_range
from idmm.data.images import Bands, CentreCrop, composite, digest, header, read_image
from idmm.data.listing import read_splits
from idmm.data.parallel import parallel_map
from idmm.data.split import LabelsMissing, Listing, Split
from idmm.data.user_lists import BadList
from idmm.data.values import AUTO, MinMax, ValueRange, common_range
from idmm.errors import UserError

HASH_BITS = 64
NEAR_BITS = 12  # perceptual hashes that differ in so few bits are looked at more closely
NEAR_CORRELATION = 0.9  # of the thumbnails, from which on two images count as nearly the same
THUMB = 16  # their side (pixels)
FLAT = 4.0  # a thumbnail of a smaller standard deviation has nothing to correlate (grey levels)
CROP = CentreCrop(64, 0.875)  # of the images for the baseline
SKEWED = 10.0  # largest class over smallest from which the balance is remarked on
NEAR_MOST = 20  # near-duplicates of an image that are named in each split: of plain ones all are alike
_BLOCK = 2048
_SAMPLE = 64  # files whose headers say whether the images are pictures


@dataclass(frozen=True)
class ImageRef:
    """An image: its split, its number there, its name, and its class if there are labels."""

    split: str
    index: int
    name: str
    label: str | None


@dataclass(frozen=True)
class Pair:
    """Two images that are the same or nearly so; across splits, the training image comes first."""

    kind: str  # same file, same pixels or near
    first: ImageRef
    second: ImageRef
    similarity: float  # correlation of their thumbnails, at most 1

    @property
    def exact(self) -> bool:
        """Whether they are the same to the last pixel."""
        return self.kind.startswith("same")

    @property
    def leaks(self) -> bool:
        """Whether one is trained on and the other evaluated on."""
        splits = {self.first.split, self.second.split}
        return len(splits) > 1 and splits != {"train", "unlabelled"}

    @property
    def certain(self) -> bool:
        """Whether something is wrong for sure: they are the same, unless pretraining would see the pixels of an image
        to evaluate on, without its label."""
        return self.exact and not (self.leaks and "unlabelled" in (self.first.split, self.second.split))

    @property
    def disagrees(self) -> bool:
        """Whether they have different classes."""
        return None not in (self.first.label, self.second.label) and self.first.label != self.second.label


@dataclass
class Checkup:
    """What was found."""

    dataset: str
    root: str | None
    images: dict[str, int] = field(default_factory=dict)  # of each split
    layout: list[str] = field(default_factory=list)  # why fine-tuning would refuse the dataset
    suffices: bool = True  # for pretraining: no fault of the layout has to be mended for that
    unreadable: list[dict] = field(default_factory=list)  # {"split", "name", "reason"} each
    transparent: list[dict] = field(default_factory=list)  # {"split", "name"}: opacity 0 everywhere, colours are read
    one_colour: list[dict] = field(default_factory=list)  # {"split", "name"}: as read, every pixel is the same
    range: ValueRange | None = (
        None  # of images of more than 8 bits under data.range auto; None: there are none in train
    )
    bands: Bands | None = None  # which channels are used; None: the images are pictures
    classes: dict[str, dict[str, int]] = field(default_factory=dict)  # number of images of each class of each split
    sides: dict[str, list[int]] = field(default_factory=dict)  # smallest, median and largest short side (pixels)
    pairs: list[Pair] = field(default_factory=list)  # exact ones first, then the most alike
    # centre crops of those that can be used and are to be kept, by split and name
    seen: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    # what needs no network: {"baseline_top1", "largest_class", "train_images", "images", "of"}; None: no labels
    floor: dict | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing was found that should be mended; near-duplicates and the like may be as they should."""
        wrong = any(pair.certain for pair in self.pairs)
        return self.suffices and not (self.unreadable or wrong)

    def plain(self) -> dict:
        """Returns it for JSON."""
        result = asdict(replace(self, seen={}))
        del result["seen"], result["suffices"]
        pairs = [{**asdict(p), "leaks": p.leaks, "labels_differ": p.disagrees} for p in self.pairs]
        return {**result, "pairs": pairs, "clean": self.clean}


@dataclass(frozen=True)
class _Summary:
    """What is kept of an image for the search for pairs."""

    ref: ImageRef
    file: bytes
    pixels: bytes
    size: tuple[int, int]
    transparent: bool  # its opacity is 0 everywhere
    one_colour: bool
    ends: tuple[MinMax, ...]  # smallest and largest value of more than 8 bits
    hash: np.ndarray  # bool [HASH_BITS]
    thumb: np.ndarray  # float32 [THUMB, THUMB, 3]
    crop: np.ndarray | None  # its CROP, [64, 64, C]; None if it is not to be kept


def check(
    data: config.Data, keep: Callable[[np.ndarray], np.ndarray] | None = None, progress: bool = False
) -> tuple[Checkup, Listing]:
    """Looks at every image of a dataset.

    Args:
        data: The ``data`` section of a config.
        keep: Returns by the labels of a split the numbers of the images whose centre crops are kept;
            None: of none.
        progress: Show a bar on standard error.

    Raises:
        UserError: The dataset cannot be opened at all, or a list of the user's is bad.
    """
    found = Checkup(data.name, data.root)
    splits = _opened(data, found)
    found.bands = _bands(splits.train, data.max_pixels, progress)
    seen = []
    for name, split in splits.parts.items():
        found.images[name] = len(split)
        if split.labels is not None:
            counts = np.bincount(split.labels[split.labels >= 0], minlength=len(split.classes))
            found.classes[name] = dict(zip(split.classes, counts.tolist(), strict=True))
        kept = frozenset(keep(split.labels).tolist() if keep and split.labels is not None else ())
        looks = list(_summaries(found, name, split, kept, data.max_pixels, progress))
        if name == "train":
            found.range = common_range([look.ends for look in looks], found.bands is not None)
        if sides := [min(look.size) for look in looks]:
            found.sides[name] = [min(sides), int(np.median(sides)), max(sides)]
        found.seen[name] = {look.ref.name: look.crop for look in looks if look.crop is not None}
        seen += looks
    found.pairs = _pairs(seen)
    return found, splits


def _bands(train: Split, max_pixels: int, progress: bool) -> Bands | None:
    """Returns the channels that most files have if most are no pictures."""
    numbers = np.unique(np.linspace(0, len(train) - 1, _SAMPLE).astype(int))
    given = (len(numbers), lambda i: train.place(numbers[i]), "reading headers", progress)
    looks = parallel_map(lambda i: header(train.items[numbers[i]], max_pixels), *given)
    known = [look for look in looks if not isinstance(look, BadImage)]
    odd = [look.channels for look in known if look.fault]
    if 2 * len(odd) <= len(known):
        return None
    usual = max(odd, key=odd.count)
    return Bands(usual, tuple(range(usual)) if usual in (1, 3) else None)


def _opened(data: config.Data, found: Checkup) -> Listing:
    """Opens the dataset as fine-tuning does; if that fails as pretraining does, and notes what fine-tuning lacks."""
    try:
        return read_splits(data, labelled=True, evaluated=True, unlabelled=True)
    except BadList:
        raise
    except UserError as error:
        found.layout, found.suffices = list(error.faults), isinstance(error, LabelsMissing)
    # with a CSV file of labels all that is missing may be something to evaluate on
    return read_splits(data, found.suffices and data.labels is not None, evaluated=False, unlabelled=True)


def _summaries(
    found: Checkup, name: str, split: Split, kept: frozenset[int], max_pixels: int, progress: bool
) -> Iterator[_Summary]:
    """Reads a split's images; yields those that can be used."""

    def summaries(value_range: ValueRange) -> list[_Summary | BadImage]:
        def work(i: int) -> _Summary:
            return _summary(name, split, i, i in kept, max_pixels, value_range, found.bands)

        return list(parallel_map(work, len(split), split.place, f"checking {name}", progress))

    try:
        looks = summaries(found.range or AUTO)
    except RangeUnknown:
        looks = summaries(measure_range(split, max_pixels, found.bands, progress))
    for i, look in enumerate(looks):
        if isinstance(look, BadImage):
            found.unreadable.append({"split": name, "name": split.names[i], "reason": look.reason})
            continue
        for kind in ("transparent", "one_colour"):
            if getattr(look, kind):
                getattr(found, kind).append({"split": name, "name": split.names[i]})
        yield look


def _summary(
    name: str, split: Split, i: int, kept: bool, max_pixels: int, value_range: ValueRange, bands: Bands | None
) -> _Summary:
    label = None if split.labels is None or split.labels[i] < 0 else split.classes[split.labels[i]]
    image, ends, file, transparent = read_image(split.items[i], max_pixels, value_range, bands)  # [H, W, C]
    picture = Image.fromarray(composite(image))
    return _Summary(
        ref=ImageRef(name, i, split.names[i], label),
        file=file,
        pixels=digest(repr(image.shape).encode() + image.tobytes()),
        size=image.shape[:2],
        transparent=transparent,
        one_colour=bool((image == image[0, 0]).all()),
        ends=ends,
        hash=perceptual_hash(picture),
        thumb=np.asarray(picture.resize((THUMB, THUMB), Image.Resampling.BOX), dtype=np.float32),
        crop=CROP(image) if kept else None,
    )


def perceptual_hash(picture: Image.Image) -> np.ndarray:
    """Returns an image's perceptual hash, bool [64]: the signs of the lowest coefficients of its cosine transform."""
    return imagehash.phash(picture).hash.ravel()


def _pairs(seen: list[_Summary]) -> list[Pair]:
    """Returns all pairs, exact ones first."""
    same: dict[bytes, list[_Summary]] = defaultdict(list)
    for look in seen:
        same[look.pixels].append(look)
    exact = []
    for first, *others in same.values():
        kinds = ["same file" if first.file == other.file else "same pixels" for other in others]
        exact += [Pair(kind, first.ref, other.ref, 1.0) for kind, other in zip(kinds, others, strict=True)]
    near = _near_pairs([group[0] for group in same.values()])
    return exact + sorted(near, key=lambda pair: -pair.similarity)


def _near_pairs(seen: list[_Summary]) -> list[Pair]:
    """Returns pairs of which both hashes and thumbnails agree, as a hash is coarse, above all for plain images; of each
    image :data:`NEAR_MOST` at most with later ones of a split, lest memory grows with the square."""
    signs = np.array([look.hash for look in seen], dtype=np.float32).reshape(-1, HASH_BITS) * 2 - 1  # [N, 64]
    pairs: list[Pair] = []
    named: Counter = Counter()  # pairs so far, by first image and split of the second
    for start in range(0, len(seen), _BLOCK):
        agreeing = signs[start : start + _BLOCK] @ signs[start:].T  # [R, M]: bits that agree less those that differ
        for i, j in np.argwhere(agreeing >= HASH_BITS - 2 * NEAR_BITS) + start:
            place = (i, seen[j].ref.split)
            if i >= j or named[place] >= NEAR_MOST:  # a pair is found from its earlier image
                continue
            likeness = similarity(seen[i].thumb, seen[j].thumb)
            if likeness >= NEAR_CORRELATION:
                named[place] += 1
                pairs.append(Pair("near", seen[i].ref, seen[j].ref, round(likeness, 4)))
    return pairs


def similarity(one: np.ndarray, two: np.ndarray) -> float:
    """Returns the correlation of two thumbnails [T, T, 3], each colour about its mean; of plain ones, 1 or 0."""
    means = one.mean((0, 1)) - two.mean((0, 1))  # [3]
    a, b = one - one.mean((0, 1)), two - two.mean((0, 1))
    if min(a.std(), b.std()) < FLAT:
        return float(max(a.std(), b.std()) < FLAT and np.abs(means).max() < 2 * FLAT)
    return float((a * b).mean() / np.sqrt((a * a).mean() * (b * b).mean()))
