"""Faults of a dataset, found before training: unreadable files, duplicates, leakage, odd images and
classes."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import imagehash
import numpy as np
from numpy import ndarray
from PIL import Image

from idmm import config
from idmm.data.formats import BadImage, NoPicture
from idmm.data.image_store import measure_range
from idmm.data.images import (
    AUTO,
    WHITE,
    Bands,
    RangeUnknown,
    ValueRange,
    composite,
    digest,
    read_image,
)
from idmm.data.listing import list_images
from idmm.data.parallel import parallel_map
from idmm.data.split import LabelsMissing, Listing, Split
from idmm.data.user_lists import decoded, exclude_line
from idmm.errors import UserError
from idmm.files import expand_home, write_bytes
from idmm.text import counted, one_line

HASH_BITS = 64
# perceptual hashes that differ in at most so many bits are compared by their thumbnails
NEAR_BITS = 12
NEAR_CORRELATION = 0.9  # of the thumbnails of nearly equal images
THUMB = 16  # side of a thumbnail (pixels)
FLAT = 4.0  # a thumbnail of a smaller standard deviation has nothing to correlate (grey levels)
# near-duplicates of an image that are listed in each split: plain images are all alike
NEAR_MOST = 20
_BLOCK = 2048
# of equal images, the one in the last of these stays
_SPLITS = ("unlabelled", "train", "val", "test")


@dataclass(frozen=True)
class ImageRef:
    """An image: its split, its number there, its name, and its class if there are labels."""

    split: str
    index: int
    name: str
    label: str | None


@dataclass(frozen=True)
class Pair:
    """Two images that are the same or nearly so. Across splits, the training image comes first."""

    kind: str  # same file, same pixels or near
    first: ImageRef
    second: ImageRef
    similarity: float  # correlation of their thumbnails, at most 1

    @property
    def exact(self) -> bool:
        """Whether they are the same to the last pixel."""
        return self.kind != "near"

    @property
    def leaks(self) -> bool:
        """Whether one is trained on and the other evaluated on."""
        splits = {self.first.split, self.second.split}
        return len(splits) > 1 and splits != {"train", "unlabelled"}

    @property
    def certain(self) -> bool:
        """Whether it is a fault: they are the same, and not only pretraining would see pixels of a
        test image."""
        return self.exact and not (
            self.leaks and "unlabelled" in (self.first.split, self.second.split)
        )

    @property
    def disagrees(self) -> bool:
        """Whether they have different classes."""
        return len({self.first.label, self.second.label} - {None}) == 2


@dataclass
class DatasetReport:
    """The findings, as ``check.json`` has them."""

    dataset: str
    root: str | None
    images: dict[str, int] = field(default_factory=dict)  # of each split
    layout: list[str] = field(default_factory=list)  # why fine-tuning would refuse the dataset
    unreadable: list[dict] = field(default_factory=list)  # {"split", "name", "reason"} each
    # {"split", "name"}: every pixel is the same
    one_colour: list[dict] = field(default_factory=list)
    # more than 8 bits, all values in the lowest eighth of the range
    dark: list[str] = field(default_factory=list)
    range: ValueRange = None  # of training images of more than 8 bits under data.range auto
    bands: Bands | None = None  # channels that are used. None: the images are pictures
    # images of each class of each split
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    # smallest, median and largest short side (pixels)
    sides: dict[str, list[int]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)  # exact ones first, then the most alike
    # the baseline: {"baseline_top1", "largest_class", "train_images", "images", "of"}. None: no
    # labels
    floor: dict | None = None
    enough_to_pretrain: bool = True  # no fault of the layout matters to pretraining

    @property
    def clean(self) -> bool:
        """Whether there is nothing to fix. Near-duplicates and the like may be intended."""
        return (
            self.enough_to_pretrain
            and not self.unreadable
            and not any(pair.certain for pair in self.pairs)
        )

    def to_dict(self) -> dict:
        """Return it for JSON."""
        pairs = [{**asdict(p), "leaks": p.leaks, "labels_differ": p.disagrees} for p in self.pairs]
        return {**asdict(self), "pairs": pairs, "clean": self.clean}


@dataclass(frozen=True)
class _Summary:
    """Facts about an image for the search for pairs."""

    ref: ImageRef
    file: bytes
    pixels: bytes
    size: tuple[int, int]
    one_colour: bool
    dark: bool
    hash: ndarray  # bool [HASH_BITS]
    thumb: ndarray  # float32 [THUMB, THUMB, 3]


def check(data: config.Data) -> tuple[DatasetReport, Listing]:
    """Read every image of a dataset. Faults of images raise nothing.

    Raises:
        UserError: The dataset cannot be opened at all, or a list of the user's is bad.
    """
    report = DatasetReport(data.name, data.root)
    listing = _open(data, report)
    report.bands = _usual_bands(listing.train)
    every = []
    for part, split in listing.parts.items():
        report.images[part] = len(split)
        if split.labels is not None:
            counts = np.bincount(split.labels[split.labels >= 0], minlength=len(split.classes))
            report.classes[part] = dict(zip(split.classes, counts.tolist(), strict=True))
        sides = []
        for name, result in zip(split.names, _summaries(report, part, split), strict=True):
            place = {"split": part, "name": name}
            if isinstance(result, BadImage):
                report.unreadable.append(place | {"reason": result.reason})
                continue
            every.append(result)
            sides.append(min(result.size))
            if result.one_colour:
                report.one_colour.append(place)
            if result.dark:
                report.dark.append(name)
        if sides:
            report.sides[part] = [min(sides), int(np.median(sides)), max(sides)]
    report.pairs = _pairs(every)
    return report, listing


def _open(data: config.Data, report: DatasetReport) -> Listing:
    """Open the dataset as fine-tuning does. If that fails as pretraining does, and note what
    fine-tuning lacks."""
    try:
        return list_images(data, labelled=True, unlabelled=True, joined=False)
    except UserError as error:
        report.layout = list(error.faults)
        report.enough_to_pretrain = isinstance(error, LabelsMissing)
    # with a CSV file of labels, all that is missing may be something to evaluate on
    labelled = report.enough_to_pretrain and data.labels is not None
    return list_images(data, labelled, evaluated=False, unlabelled=True, joined=False)


def _usual_bands(train: Split) -> Bands | None:
    """Return the channels of most files of a sample, if most are no pictures."""
    counts = []  # channels of each file, 0 if it is a picture
    for item in train.sample():
        try:
            read_image(item, (0, 1))
            counts.append(0)
        except NoPicture as error:
            counts.append(error.channels)
        except BadImage:
            pass
    usual = max(counts, key=counts.count, default=0)
    if usual:
        return Bands(usual, tuple(range(usual)) if usual in (1, 3) else None)
    return None


def _summaries(report: DatasetReport, part: str, split: Split) -> list[_Summary | BadImage]:
    """Read a split's images. The first one of more than 8 bits has the value range measured, then
    all start again."""

    def summary(i: int, value_range: ValueRange) -> _Summary:
        decoded = read_image(split.items[i], value_range, report.bands)
        # [H, W, C]
        image = decoded.pixels
        picture = Image.fromarray(composite(decoded.pixels))
        if split.labels is None or split.labels[i] < 0:
            label = None
        else:
            label = split.classes[split.labels[i]]
        return _Summary(
            ref=ImageRef(part, i, split.names[i], label),
            file=decoded.digest,
            pixels=digest(repr(image.shape).encode() + image.tobytes()),
            size=image.shape[:2],
            one_colour=bool((image == image[0, 0]).all()),
            dark=bool(image.itemsize > 1 and image.max() < WHITE / 8),
            hash=perceptual_hash(picture),
            thumb=np.asarray(
                picture.resize((THUMB, THUMB), Image.Resampling.BOX), dtype=np.float32
            ),
        )

    def summaries(value_range: ValueRange) -> list[_Summary | BadImage]:
        return [
            *parallel_map(
                lambda i: summary(i, value_range), len(split), split.place, f"checking {part}"
            )
        ]

    try:
        return summaries(report.range or AUTO)
    except RangeUnknown:
        measured = measure_range(split, report.bands)
        report.range = measured if part == "train" else report.range
        return summaries(measured)


# ---------------------------------------------------------------------- images that are alike
def perceptual_hash(picture: Image.Image) -> ndarray:
    """Return an image's perceptual hash, bool [64]: the signs of the lowest coefficients of its
    cosine transform."""
    return imagehash.phash(picture).hash.ravel()


def _pairs(summaries: list[_Summary]) -> list[Pair]:
    """Return all pairs, exact ones first.

    Each image is paired with at most :data:`NEAR_MOST` later ones of a split, so memory does not
    grow with the square.
    """
    same: dict[bytes, list[_Summary]] = defaultdict(list)
    for summary in summaries:
        same[summary.pixels].append(summary)
    exact = [
        Pair("same file" if first.file == other.file else "same pixels", first.ref, other.ref, 1.0)
        for first, *others in same.values()
        for other in others
    ]
    # near ones agree in hashes and thumbnails, as a hash is coarse, above all for plain images
    unique = [
        min(
            (one for one in group if one.ref.split == group[0].ref.split),
            key=lambda one: len(one.ref.name),
        )
        for group in same.values()  # the one that stays, see exclusions()
    ]
    # [N, 64]
    signs = (
        np.array([summary.hash for summary in unique], dtype=np.float32).reshape(-1, HASH_BITS) * 2
        - 1
    )
    pairs: list[Pair] = []
    counts: Counter = Counter()  # pairs so far, by first image and split of the second
    for start in range(0, len(unique), _BLOCK):
        # [R, M]: bits that agree less those that differ
        agreeing = signs[start : start + _BLOCK] @ signs[start:].T
        for i, j in np.argwhere(agreeing >= HASH_BITS - 2 * NEAR_BITS) + start:
            first = unique[i]
            second = unique[j]
            place = (i, second.ref.split)
            if i >= j or counts[place] >= NEAR_MOST:  # a pair is found from its earlier image
                continue
            correlation = similarity(first.thumb, second.thumb)
            if correlation >= NEAR_CORRELATION:
                counts[place] += 1
                pairs.append(Pair("near", first.ref, second.ref, round(correlation, 4)))
    return exact + sorted(pairs, key=lambda pair: -pair.similarity)


def similarity(one: ndarray, two: ndarray) -> float:
    """Return the correlation of two thumbnails [T, T, 3], each colour about its mean. Of plain
    ones, 1 or 0."""
    means = one.mean((0, 1)) - two.mean((0, 1))  # [3]
    a = one - one.mean((0, 1))
    b = two - two.mean((0, 1))
    if min(a.std(), b.std()) < FLAT:
        return float(max(a.std(), b.std()) < FLAT and np.abs(means).max() < 2 * FLAT)
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


# ---------------------------------------------------------------------- the file for data.exclude
def exclusions(
    pairs: Sequence[Pair], unreadable: Sequence[dict] = (), one_colour: Sequence[dict] = ()
) -> list[str]:
    """Return the lines of a file for ``data.exclude``, each under a comment with all reasons.

    Broken files come first, then images that are the same, then those that are nearly so. Of images
    that are the same one stays: that with the shortest name in the test split, else in val, else in
    train. If those of that split are of different classes none stays, as one of them is wrong.
    Nearly equal ones are commented out: of a pair across splits the training image, else the
    second. Those of different classes come first. So are images of one colour.
    """
    reasons: dict[str, list[str]] = defaultdict(list)
    for bad in unreadable:
        reasons[bad["name"]].append(f"unreadable ({bad['reason']})")
    same: dict[ImageRef, list[ImageRef]] = {}
    for pair in pairs:
        if pair.exact:
            same.setdefault(pair.first, [pair.first]).append(pair.second)
    for images in same.values():
        last = max((image.split for image in images), key=_SPLITS.index)
        remaining = [image for image in images if image.split == last]
        conflict = len({image.label for image in remaining} - {None}) > 1
        stays = min(remaining, key=lambda image: len(image.name))  # not "x (copy).jpg"
        for image in images:
            other = stays
            why = ""
            if conflict and image in remaining:
                other = next(other for other in remaining if other.label != image.label)
                why = f", but of class '{image.label}', not '{other.label}': one is wrong"
            if image != other:
                reasons[image.name].append(f"the same as {other.name}{why}")
    certain = set(reasons)
    for image in one_colour:
        reasons[image["name"]].append("of one colour")
    for pair in sorted(pairs, key=lambda pair: not pair.disagrees):
        if not pair.exact:
            out, other = (pair.first, pair.second) if pair.leaks else (pair.second, pair.first)
            why = f"nearly the same as {other.name} ({pair.similarity:.3f})"
            if pair.disagrees:
                why += f", but of class '{out.label}', not '{other.label}': one may be wrong"
            reasons[out.name].append(why)
    if reasons.keys() - certain:
        lines = ["# a # before a path: only suspected, left out once you remove it"]
    else:
        lines = []
    for name, why in reasons.items():
        lines.append(
            f"# {one_line('; '.join(why))}\n{'' if name in certain else '#'}{exclude_line(name)}"
        )
    return lines


def write_exclusions(command: str, before: str | None, lines: list[str], path: Path) -> str:
    """Write the ``lines`` of :func:`exclusions`, which ``command`` found, to a file and return a
    line on its use.

    They follow the lines of ``before``, the file of the images that are left out already, if there
    is one.
    """
    head = one_line(f"# for --data.exclude: the findings of '{command}'")
    if before is not None:
        head = decoded(expand_home(before).read_bytes()).rstrip("\n")
    content = "\n".join([head, *lines, ""]).encode("utf-8", "surrogateescape")
    if path.exists() and path.read_bytes() != content:  # it may have been edited
        old = path
        number = 0
        while old.exists():
            number += 1
            old = path.with_suffix(f".old{number}.txt")
        path.replace(old)
    write_bytes(path, content)
    certain = sum(not line.rpartition("\n")[2].startswith("#") for line in lines)
    if certain:
        return f"{path}: {counted(certain, 'image')} to leave out. Pass --data.exclude {path}"
    if lines:
        return f"{path}: suspected images, each after a #. Remove the # to leave one out"
    return f"{path}: {'nothing more' if before else 'nothing'} to leave out"
