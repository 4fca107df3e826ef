"""Faults of a dataset, found before training: unreadable files, duplicates, leakage, odd images."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import imagehash
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from idmm.config import Data
from idmm.data.decoding import measure_range
from idmm.data.formats import PICTURE_CHANNELS, BadImage, NoPicture
from idmm.data.images import (
    AUTO,
    WHITE,
    Bands,
    Decoded,
    RangeUnknown,
    ValueRange,
    composite,
    digest,
    read_image,
)
from idmm.data.list_file import decoded
from idmm.data.listing import list_images
from idmm.data.parallel import parallel_map
from idmm.data.registry import spec_of
from idmm.data.split import LabelsMissing, Listing, Split
from idmm.data.user_lists import exclude_line
from idmm.errors import Fault, UserError
from idmm.files import expand_home, write_bytes
from idmm.text import counted, one_line

HASH_BITS = 64
NEAR_BITS = 12  # of hashes that may differ before their images' thumbnails are compared
NEAR_CORRELATION = 0.9  # of the thumbnails of nearly equal images
THUMB = 16  # side of a thumbnail (pixels)
FLAT = 4.0  # a thumbnail of a smaller standard deviation has nothing to correlate (grey levels)
NEAR_MOST = 20  # near-duplicates of an image in each split: plain images are all alike
_BLOCK = 2048  # images whose hashes are compared with all at once
_SPLITS = ("unlabelled", "train", "val", "test")  # of equal images, the one in the last stays

Thumb = NDArray[np.float32]  # [THUMB, THUMB, 3]


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
        """Whether it is a fault: they are the same.

        It is none if only pretraining would see pixels of a test image.
        """
        splits = (self.first.split, self.second.split)
        return self.exact and not (self.leaks and "unlabelled" in splits)

    @property
    def disagrees(self) -> bool:
        """Whether they have different classes."""
        return len({self.first.label, self.second.label} - {None}) == 2


@dataclass(frozen=True)
class Finding:
    """An image with a fault."""

    split: str
    name: str


@dataclass(frozen=True)
class Unreadable(Finding):
    """A file that cannot be used as an image."""

    reason: str


class Floor(TypedDict):
    """What every result is compared with."""

    baseline_top1: float  # of a linear classifier on hand-made features (percent)
    largest_class: float  # of the largest class every time (percent)
    train_images: int
    images: int  # that it was tested on
    of: str  # the split of these images


@dataclass
class DatasetReport:
    """The findings, as ``check.json`` has them."""

    dataset: str
    root: str | None
    images: dict[str, int] = field(default_factory=dict)  # of each split
    layout: list[Fault] = field(default_factory=list)  # why fine-tuning would refuse the dataset
    unreadable: list[Unreadable] = field(default_factory=list)
    one_colour: list[Finding] = field(default_factory=list)  # every pixel is the same
    # names of images of more than 8 bits, all values in the lowest eighth of the range
    dark: list[str] = field(default_factory=list)
    range: ValueRange = None  # of training images of more than 8 bits under data.range auto
    bands: Bands | None = None  # channels that are used. None: the images are pictures
    # images of each class of each split
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    # smallest, median and largest short side (pixels)
    sides: dict[str, list[int]] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)  # exact ones first, then the most alike
    floor: Floor | None = None  # None: no labels
    enough_to_pretrain: bool = True  # no fault of the layout matters to pretraining

    @property
    def clean(self) -> bool:
        """Whether there is nothing to fix. Near-duplicates and the like may be intended."""
        return (
            self.enough_to_pretrain
            and not self.unreadable
            and not any(pair.certain for pair in self.pairs)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        pairs = []
        for pair in self.pairs:
            pairs.append({**asdict(pair), "leaks": pair.leaks, "labels_differ": pair.disagrees})
        layout = list(map(str, self.layout))
        return {**asdict(self), "layout": layout, "pairs": pairs, "clean": self.clean}


@dataclass(frozen=True)
class _Summary:
    """Facts about an image for the search for pairs."""

    ref: ImageRef
    file: bytes  # digest
    pixels: bytes  # digest
    side: int  # the short one (pixels)
    one_colour: bool
    dark: bool
    hash: NDArray[np.bool_]  # [HASH_BITS]
    thumb: Thumb


def check(data: Data) -> tuple[DatasetReport, Listing]:
    """Read every image of a dataset. Faults of images raise nothing.

    Raises:
        UserError: The dataset cannot be opened at all, or a list of the user's is bad.
    """
    report = DatasetReport(spec_of(data.name).name, data.root)
    listing = _open(data, report)
    report.bands = _usual_bands(listing.train)
    every = []
    for part, split in listing.parts.items():
        report.images[part] = len(split)
        if split.labels is not None:
            labels = split.labels[split.labels >= 0]
            counts = np.bincount(labels, minlength=len(split.class_names)).tolist()
            report.classes[part] = dict(zip(split.class_names, counts, strict=True))
        sides = []
        for name, result in zip(split.names, _summaries(report, part, split), strict=True):
            if isinstance(result, BadImage):
                report.unreadable.append(Unreadable(part, name, result.reason))
                continue
            every.append(result)
            sides.append(result.side)
            if result.one_colour:
                report.one_colour.append(Finding(part, name))
            if result.dark:
                report.dark.append(name)
        if sides:
            report.sides[part] = [min(sides), int(np.median(sides)), max(sides)]
    report.pairs = _pairs(every)
    return report, listing


def _open(data: Data, report: DatasetReport) -> Listing:
    """Open the dataset as fine-tuning does, else as pretraining does.

    ``report`` gets what fine-tuning lacks.
    """
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
            read_image(item, [0.0, 1.0])
            counts.append(0)
        except NoPicture as error:
            counts.append(error.channels)
        except BadImage:
            pass
    usual = max(counts, key=counts.count, default=0)
    if not usual:
        return None
    if usual in PICTURE_CHANNELS:
        return Bands(usual, tuple(range(usual)))
    return Bands(usual)


def _summaries(report: DatasetReport, part: str, split: Split) -> list[_Summary | BadImage]:
    """Read a split's images.

    The first one of more than 8 bits has the value range measured, then all start again.
    """

    def summaries(value_range: ValueRange) -> list[_Summary | BadImage]:
        def summary(i: int) -> _Summary:
            decoded = read_image(split.items[i], value_range, report.bands)
            return _summary(ImageRef(part, i, split.names[i], split.class_name(i)), decoded)

        return list(parallel_map(summary, split.places, f"checking {part}"))

    try:
        return summaries(report.range or AUTO)
    except RangeUnknown:
        value_range = measure_range(split, report.bands)
        if part == "train":
            report.range = value_range
        return summaries(value_range)


def _summary(ref: ImageRef, decoded: Decoded) -> _Summary:
    pixels = decoded.pixels  # [H, W, C]
    picture = Image.fromarray(composite(pixels))
    thumb = picture.resize((THUMB, THUMB), Image.Resampling.BOX)
    return _Summary(
        ref=ref,
        file=decoded.digest,
        pixels=digest(repr(pixels.shape).encode() + pixels.tobytes()),
        side=min(pixels.shape[:2]),
        one_colour=bool((pixels == pixels[0, 0]).all()),
        dark=bool(pixels.itemsize > 1 and pixels.max() < WHITE / 8),
        hash=perceptual_hash(picture),
        thumb=np.asarray(thumb, dtype=np.float32),
    )


# ---------------------------------------------------------------------- images that are alike
def perceptual_hash(picture: Image.Image) -> NDArray[np.bool_]:
    """Return the signs of the lowest coefficients of an image's cosine transform, bool [64]."""
    return np.ravel(imagehash.phash(picture).hash)


def _pairs(summaries: list[_Summary]) -> list[Pair]:
    """Return all pairs, exact ones first."""
    groups: dict[bytes, list[_Summary]] = defaultdict(list)
    for summary in summaries:
        groups[summary.pixels].append(summary)
    exact = []
    unique = []
    for first, *others in groups.values():
        stays = first  # of the first one's split, see exclusions()
        for other in others:
            kind = "same file" if other.file == first.file else "same pixels"
            exact.append(Pair(kind, first.ref, other.ref, 1.0))
            is_shorter = len(other.ref.name) < len(stays.ref.name)
            if is_shorter and other.ref.split == first.ref.split:
                stays = other
        unique.append(stays)
    return exact + sorted(_near_pairs(unique), key=lambda pair: -pair.similarity)


def _near_pairs(summaries: list[_Summary]) -> list[Pair]:
    """Return the pairs that agree in hashes and thumbnails: hashes are coarse for plain images.

    Each image is paired with at most :data:`NEAR_MOST` later ones of a split, so memory does not
    grow with the square.
    """
    hashes = np.array([summary.hash for summary in summaries]).reshape(-1, HASH_BITS)
    signs = np.where(hashes, 1, -1).astype(np.float32)  # [N, 64]
    pairs = []
    counts: Counter[tuple[int, str]] = Counter()  # of pairs, by first image and second's split
    for start in range(0, len(summaries), _BLOCK):
        # [R, M]: bits that agree less those that differ
        agreeing = signs[start : start + _BLOCK] @ signs[start:].T
        near = np.argwhere(agreeing >= HASH_BITS - 2 * NEAR_BITS) + start
        for i, j in near[near[:, 0] < near[:, 1]].tolist():  # a pair is found from its first
            first = summaries[i]
            second = summaries[j]
            key = (i, second.ref.split)
            if counts[key] >= NEAR_MOST:
                continue
            correlation = similarity(first.thumb, second.thumb)
            if correlation >= NEAR_CORRELATION:
                counts[key] += 1
                pairs.append(Pair("near", first.ref, second.ref, round(correlation, 4)))
    return pairs


def similarity(one: Thumb, two: Thumb) -> float:
    """Return the correlation of two thumbnails [T, T, 3], each colour about its mean.

    Of plain ones it is 1 or 0.
    """
    means = one.mean((0, 1)) - two.mean((0, 1))  # [3]
    a = one - one.mean((0, 1))
    b = two - two.mean((0, 1))
    if min(a.std(), b.std()) < FLAT:
        return float(max(a.std(), b.std()) < FLAT and np.abs(means).max() < 2 * FLAT)
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def one_of_each(pairs: Iterable[Pair]) -> list[Pair]:
    """Return the pairs none of whose images is in an earlier one."""
    earlier: set[ImageRef] = set()
    chosen = []
    for pair in pairs:
        images = {pair.first, pair.second}
        if earlier.isdisjoint(images):
            chosen.append(pair)
        earlier |= images
    return chosen


# ---------------------------------------------------------------------- the file for data.exclude
def exclusions(
    pairs: Sequence[Pair],
    unreadable: Sequence[Unreadable] = (),
    one_colour: Sequence[Finding] = (),
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
        reasons[bad.name].append(f"unreadable ({bad.reason})")
    same: dict[ImageRef, list[ImageRef]] = {}
    for pair in pairs:
        if pair.exact:
            same.setdefault(pair.first, [pair.first]).append(pair.second)
    for images in same.values():
        for name, reason in _copies(images):
            reasons[name].append(reason)
    certain = set(reasons)
    for image in one_colour:
        reasons[image.name].append("of one colour")
    for pair in sorted(pairs, key=lambda pair: not pair.disagrees):
        if pair.exact:
            continue
        out = pair.second
        other = pair.first
        if pair.leaks:
            out = pair.first
            other = pair.second
        reason = f"nearly the same as {other.name} ({pair.similarity:.3f})"
        if pair.disagrees:
            reason += f", but of class '{out.label}', not '{other.label}': one may be wrong"
        reasons[out.name].append(reason)
    lines = []
    if len(reasons) > len(certain):
        lines.append("# a # before a path: only suspected, left out once you remove it")
    for name in reasons:
        mark = "" if name in certain else "#"
        comment = one_line("; ".join(reasons[name]))
        lines.append(f"# {comment}\n{mark}{exclude_line(name)}")
    return lines


def _copies(images: list[ImageRef]) -> Iterator[tuple[str, str]]:
    """Yield the name of each of some equal images that is left out, and why."""
    last = max((image.split for image in images), key=_SPLITS.index)
    remaining = [image for image in images if image.split == last]
    stays = min(remaining, key=lambda image: len(image.name))  # not "x (copy).jpg"
    has_conflict = len({image.label for image in remaining} - {None}) > 1
    for image in images:
        if has_conflict and image.split == last:
            other = next(other for other in remaining if other.label != image.label)
            yield (
                image.name,
                f"the same as {other.name}, but of class '{image.label}', not '{other.label}': "
                "one is wrong",
            )
        elif image != stays:
            yield image.name, f"the same as {stays.name}"


def write_exclusions(command: str, before: str | None, lines: list[str], path: Path) -> str:
    """Write the ``lines`` of :func:`exclusions` to a file and return a line on its use.

    Args:
        command: What found them.
        before: File of the images that are left out already, whose lines come first, if any.
        lines: What is written.
        path: The file.
    """
    head = one_line(f"# for --data.exclude: the findings of '{command}'")
    if before is not None:
        head = decoded(expand_home(before).read_bytes()).rstrip("\n")
    content = "\n".join([head, *lines, ""]).encode("utf-8", "surrogateescape")
    if path.exists() and path.read_bytes() != content:  # it may have been edited
        number = 1
        while path.with_suffix(f".old{number}.txt").exists():
            number += 1
        path.replace(path.with_suffix(f".old{number}.txt"))
    write_bytes(path, content)
    certain = sum(not line.rpartition("\n")[2].startswith("#") for line in lines)
    if certain:
        return f"{path}: {counted(certain, 'image')} to leave out. Pass --data.exclude {path}"
    if lines:
        return f"{path}: suspected images, each after a #. Remove the # to leave one out"
    if before:
        return f"{path}: nothing more to leave out"
    return f"{path}: nothing to leave out"
