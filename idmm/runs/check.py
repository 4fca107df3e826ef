"""``idmm data``: downloading a dataset, and finding its faults."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from idmm import config
from idmm.config.base import CROP_MODES
from idmm.config.commands import DataCheckConfig, DataDownloadConfig, ProbeConfig
from idmm.data.check import (
    DatasetReport,
    Floor,
    ImageRef,
    Pair,
    check,
    exclusions,
    one_of_each,
    write_exclusions,
)
from idmm.data.formats import BadImage, channels_flag
from idmm.data.image_store import choose_crop_mode
from idmm.data.images import WHITE, PerChannel, composite, read_image
from idmm.data.listing import list_images
from idmm.data.registry import DATASETS, fetch, resolve_name, spec_of
from idmm.data.split import Listing, Split
from idmm.errors import UserError
from idmm.evaluation import Floats, baseline
from idmm.evaluation.network import Network, pooled
from idmm.files import made_folder, write_json
from idmm.models.hog import SIDE, Hog
from idmm.models.weights import CROP_PCT
from idmm.progress import log
from idmm.runs.resolve import check_out_of_images
from idmm.text import by_reason, counted, listed, nearest, one_line

_NAMED = 5  # images or pairs that a line names
_DRAWN = 12  # pairs on the sheet
FEW = 3  # images of a class that is too small to learn or to test
SKEWED = 10.0  # ratio of the largest to the smallest class from which the balance gets a remark
HELD_OUT = 0.2  # share of the training images that the baseline is tested on if there are no others
BATCH = 64  # images per call of the hand-made features


def download(command: DataDownloadConfig) -> str:
    """Fetch a dataset unless it is there, and check its sizes. Errors as of `fetch` and
    `list_images`."""
    fetch(spec_of(command.name), command.root)
    listing = list_images(config.Data(name=command.name, root=command.root), labelled=True)
    counts = ", ".join(f"{len(split):,} {name}" for name, split in listing.parts.items())
    return f"{command.name}: {counts}, all as in the protocol"


def checkup(command: DataCheckConfig) -> int:
    """Read every image of a dataset, print the findings, and write check.json, check.png and
    exclude.txt to ``command.out``.

    Returns:
        The exit code, 1 if there is something to fix.

    Raises:
        UserError: The dataset cannot be opened at all, or ``command.out`` cannot be written.
    """
    root = command.root
    name = command.name
    is_folder = (
        name and name not in DATASETS and (os.path.isdir(name) or not nearest(name, DATASETS))
    )
    if is_folder and root in (None, name):  # two folders are refused below
        root = name
        name = None
    data, notes = resolve_name(
        config.Data(name=name, root=root, exclude=command.exclude, labels=command.labels)
    )
    for note in notes:
        log.info(note)
    if command.out is not None:
        check_out_of_images(ProbeConfig(out=command.out, data=data))
    report, listing = check(data)
    log.info("measuring the baseline")
    report.floor = _baseline(report, listing, data)
    print("\n".join(map(one_line, report_lines(report))))
    if command.out is not None:
        out = made_folder(command.out)
        write_json(out / "check.json", report.to_dict())
        (out / "check.png").unlink(missing_ok=True)  # of an earlier check
        if report.pairs:
            _draw(report, listing, out / "check.png")
        call = " ".join(filter(None, ["idmm data check", name, root and f"--root {root}"]))
        lines = exclusions(report.pairs, report.unreadable, report.one_colour)
        print(f"written: {write_exclusions(call, command.exclude, lines, out / 'exclude.txt')}")
    return int(not report.clean)


# ---------------------------------------------------------------------- the text
def report_lines(report: DatasetReport) -> list[str]:
    """Return the findings as text: facts, then one line per finding, then what to do."""
    counts = ", ".join(f"{n:,} {name}" for name, n in report.images.items())
    lines = [f"{report.dataset}{f' in {report.root}' if report.root else ''}: {counts} images"]
    if report.bands and report.bands.count:
        channels = report.bands.count
        lines.append(f"channels: {counted(channels, 'channel')}. Pass {channels_flag(channels)}.")
    lines += _classes_and_sizes(report)
    floor = report.floor
    if floor:
        split = "held-out training" if floor["of"] == "train" else floor["of"]
        lines.append(
            f"baseline: {floor['baseline_top1']:.1f} % top-1 by logistic regression on hand-made "
            f"features (the largest class every time: {floor['largest_class']:.1f} %), fitted to "
            f"{floor['train_images']:,} training images, on {floor['images']:,} {split} images at "
            f"{SIDE} px"
        )
    if report.range:
        lines.append(
            f"values of images of more than 8 bits: {report.range} is 0 to 1. "
            "Pass --data.range '[LOW, HIGH]' to set another range"
        )
    if report.layout:
        use = "pretraining can use all"
        if floor and floor["of"] == "train":
            use = "idmm train tests on a fifth"
        refusal = "fine-tuning would refuse them"
        if report.enough_to_pretrain:
            refusal = "fine-tuning needs more"
        lines.append(f"layout: {use} of these images, {refusal}:")
        lines += [f"  {fault}" for fault in report.layout]
    certain = [] if report.enough_to_pretrain else ["layout"]
    suspected = []
    are_listed = True
    for finding in _findings(report):
        if not finding.examples:
            continue
        examples = listed(finding.examples, _NAMED)
        lines.append(f"{finding.kind}: {finding.counts} ({examples}). {finding.advice}")
        are_listed = are_listed and len(finding.examples) <= _NAMED
        if finding.is_certain:
            certain.append(finding.kind)
        else:
            suspected.append(finding.kind)
    if not are_listed:
        lines.append("check.json in your --out folder lists all of these images.")
    verdicts = []
    if certain:
        verdicts.append(f"Fix: {', '.join(certain)}.")
    if suspected:
        verdicts.append(f"Look at: {', '.join(suspected)}.")
    return [*lines, " ".join(verdicts) or "Nothing to fix."]


class _Finding(NamedTuple):
    """A kind of fault."""

    kind: str
    counts: str
    examples: list[str]  # all of them
    advice: str
    is_certain: bool = False  # something to fix


def _findings(report: DatasetReport) -> Iterator[_Finding]:
    """Yield each kind of fault, also those without an example."""
    conflicts = [pair for pair in report.pairs if pair.disagrees and not pair.exact]
    yield _Finding(
        "labels differ",
        counted(len(conflicts), "pair"),
        [*map(_both, conflicts)],
        "They are nearly the same, but of two classes. "
        "Look at check.png in your --out folder, and correct labels.",
    )
    unreadable = report.unreadable
    yield _Finding(
        "unreadable",
        counted(len(unreadable), "file"),
        by_reason([file.name for file in unreadable], [file.reason for file in unreadable]),
        "Most commands stop on them. "
        "Replace them, or leave them out by exclude.txt of your --out folder.",
        is_certain=True,
    )
    yield _Finding(
        "one colour",
        counted(len(report.one_colour), "image"),
        [image.name for image in report.one_colour],
        "All their pixels are equal. Look if they are broken.",
    )
    yield _Finding(
        "dark",
        counted(len(report.dark), "image"),
        report.dark,
        "Their values are in the lowest eighth of the range, as 12 bits are among 16. "
        "Scale these files.",
    )
    small = []
    for name, images in report.classes.get("train", {}).items():
        if images <= FEW:
            small.append(f"{name}: {images}")
    yield _Finding(
        "small classes",
        f"{len(small)} of at most {counted(FEW, 'image')}",
        small,
        "If no folder is test, one image of each is tested, and none of a class of one image. "
        "Add images.",
    )
    yield from _pair_findings(report, conflicts)


def _pair_findings(report: DatasetReport, conflicts: list[Pair]) -> Iterator[_Finding]:
    """Yield each kind of pairs, without the ``conflicts``."""
    groups = defaultdict(list)
    for pair in sorted(report.pairs, key=lambda pair: not pair.disagrees):
        groups[pair.leaks, pair.certain if pair.leaks else pair.exact].append(pair)
    for kind, key, advice in (
        ("duplicates", (False, True), "Keep one of each."),
        ("near-duplicates", (False, False), "A few within a split do no harm."),
        (
            "leakage",
            (True, True),
            "The same image is in two splits, so accuracies come out too high. Remove one.",
        ),
        (
            "suspected leakage",
            (True, False),
            "They are in two splits. Look at check.png in your --out folder.",
        ),
    ):
        pairs = [pair for pair in groups[key] if pair not in conflicts]
        _, is_certain = key
        yield _Finding(kind, counted(len(pairs), "pair"), [*map(_both, pairs)], advice, is_certain)


def _classes_and_sizes(report: DatasetReport) -> Iterator[str]:
    for split, classes in report.classes.items():
        ordered = sorted(classes.items(), key=lambda item: item[1])
        (small, least), (large, most) = ordered[0], ordered[-1]
        middle = int(np.median(list(classes.values())))
        span = f"{most} images each"
        if least < most:
            span = f"{least} ('{small}') to {most} ('{large}') images, median {middle}"
        skewed = ""
        if most > SKEWED * max(1, least):
            skewed = ". Fine-tuning will favour the large ones"
        yield f"classes of {split}: {len(classes)}, with {span}{skewed}"
    for split, (least, middle, most) in report.sides.items():
        yield f"sizes of {split}: short sides of {least} to {most} px, median {middle}"


def _both(pair: Pair) -> str:
    return f"{_name(pair.first)} and {_name(pair.second)}: {_kind(pair)}"


def _kind(pair: Pair) -> str:
    kind = pair.kind
    if not pair.exact:
        kind = f"{kind} {pair.similarity:.3f}"
    if pair.disagrees:
        return f"{kind}, labels differ"
    return kind


def _name(image: ImageRef) -> str:
    if image.name.startswith(image.split):
        return image.name
    return f"{image.split} {image.name}"


# ---------------------------------------------------------------------- the baseline
def _baseline(report: DatasetReport, listing: Listing, data: config.Data) -> Floor | None:
    """Return the accuracy of the baseline and of the largest class.

    They are on the split that results would be reported on. If there is none, they are on a fifth
    of the training images. None: there are no labels for that.
    """
    if listing.train.labels is None:
        return None
    part = "train"
    held_out = None
    for name in ("val", "test"):
        split = listing.parts.get(name)
        if split is not None and split.labels is not None:
            part = name
            held_out = split
    if held_out is None:
        try:
            listing = list_images(replace(data, val_fraction=HELD_OUT), labelled=True)
        except UserError:  # of one class, or what the layout's faults say
            return None
        held_out = listing.test
    assert held_out is not None
    train = listing.train.take(baseline.sample_to_fit(listing.train.known_labels))
    crop_mode = CROP_MODES[choose_crop_mode(listing.train)]
    train, features = _features(report, train, crop_mode)
    test = held_out.take(np.flatnonzero(held_out.known_labels >= 0))
    test, test_features = _features(report, test, crop_mode)
    labels = train.known_labels
    truth = test.known_labels
    if len(np.unique(labels)) < 2 or not len(test):
        return None
    return {
        "baseline_top1": baseline.measure(
            features, labels, test_features, truth, groups=train.groups
        ),
        "largest_class": baseline.largest_class(truth),
        "train_images": len(train),
        "images": len(test),
        "of": part,
    }


def _features(report: DatasetReport, split: Split, crop_mode: str) -> tuple[Split, Floats]:
    """Return the readable images of a split, and the baseline's features of them [N, d]."""
    channels = 3 if report.bands is None else report.bands.used
    mean: PerChannel = config.IMAGENET_MEAN
    std: PerChannel = config.IMAGENET_STD
    if channels != 3:
        mean = [0.0] * channels
        std = [1.0] * channels
    model = Hog(channels, num_classes=0)
    model.set_statistics(mean, std)
    network = Network(
        model,
        SIDE,
        CROP_PCT,
        mean,
        std,
        "cpu",
        BATCH,
        "the baseline",
        report.range or [0, WHITE],
        report.bands,
        crop_mode,
    )
    return network.readable(split, pooled, "features for the baseline")


# ---------------------------------------------------------------------- the sheet
def _draw(report: DatasetReport, listing: Listing, path: Path) -> None:
    """Draw the worst pair of each group of images that are alike.

    Labels that disagree come first, then leaks, then the rest.
    """
    from idmm.report.sheets import LARGE, Tile, caption_sheet, in_rows

    order = sorted(
        report.pairs, key=lambda p: (not p.disagrees, not p.leaks, not p.exact, -p.similarity)
    )
    tiles = []
    for pair in one_of_each(order)[:_DRAWN]:
        first_kind = f"{pair.kind}, leaks" if pair.leaks else pair.kind
        row = []
        # test images may be of another type than the training images, whose range is known
        with contextlib.suppress(BadImage):
            for image, kind in ((pair.first, first_kind), (pair.second, _kind(pair))):
                item = listing.parts[image.split].items[image.index]
                picture = composite(read_image(item, report.range, report.bands).pixels)
                row.append(Tile(picture, f"{kind}\n{_name(image)}\n{image.label or ''}"))
            tiles += row
    title = (
        f"{report.dataset}: {counted(len(order), 'pair')} of images that look the same, "
        "each image in one"
    )
    if tiles:
        caption_sheet(in_rows(tiles), path, title, cell=LARGE)
