"""``idmm data``: downloading a dataset, and finding its faults."""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm import config
from idmm.config.commands import DataCheckConfig, DataDownloadConfig, ProbeConfig
from idmm.data.check import (
    DatasetReport,
    ImageRef,
    Pair,
    check,
    exclusions,
    one_of_each,
    write_exclusions,
)
from idmm.data.formats import BadImage, channels_flag
from idmm.data.images import WHITE, composite, read_image
from idmm.data.listing import list_images
from idmm.data.registry import DATASETS, fetch, resolve_name, spec_of
from idmm.data.split import Listing, Split
from idmm.errors import UserError
from idmm.evaluation import baseline
from idmm.evaluation.network import Network, pooled
from idmm.files import made_folder, write_json
from idmm.models import create_backbone
from idmm.models.hog import SIDE
from idmm.models.weights import CROP_PCT
from idmm.progress import log
from idmm.runs.outputs import largest_class
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
        log.info("%s", note)
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
    if report.bands:
        lines.append(
            f"channels: {counted(report.bands.count, 'channel')}. Pass {channels_flag(report.bands.count)}."
        )
    lines += _classes_and_sizes(report)
    if floor := report.floor:
        if floor["of"] == "train":
            of = "held-out training"
        else:
            of = floor["of"]
        text = "baseline: {baseline_top1:.1f} % top-1 by logistic regression on hand-made features "
        text += "(the largest class every time: {largest_class:.1f} %), fitted to {train_images:,} training images"
        lines.append(f"{text.format(**floor)}, on {floor['images']:,} {of} images at {SIDE} px")
    if report.range:
        what = f"{report.range} is 0 to 1. Pass --data.range '[LOW, HIGH]' to set another range"
        lines.append(f"values of images of more than 8 bits: {what}")
    if report.layout:
        if floor and floor["of"] == "train":
            use = "idmm train tests on a fifth"
        else:
            use = "pretraining can use all"
        if report.enough_to_pretrain:
            how = "fine-tuning needs more"
        else:
            how = "fine-tuning would refuse them"
        lines += [
            f"layout: {use} of these images, {how}:",
            *(f"  {line}" for line in report.layout),
        ]
    certain = [] if report.enough_to_pretrain else ["layout"]
    suspected = []
    are_listed = True
    for kind, count, examples, advice, is_certain in _findings(report):
        if examples:
            lines.append(f"{kind}: {count} ({listed(examples, _NAMED)}). {advice}")
            (certain if is_certain else suspected).append(kind)
            are_listed = are_listed and len(examples) <= _NAMED
    if not are_listed:
        lines.append("check.json in your --out folder lists all of these images.")
    verdicts = [
        f"{verb}: {', '.join(kinds)}."
        for verb, kinds in (("Fix", certain), ("Look at", suspected))
        if kinds
    ]
    return [*lines, " ".join(verdicts) or "Nothing to fix."]


def _findings(report: DatasetReport) -> Iterator[tuple]:
    """Yield each kind of fault, its count, examples, advice, and whether it is certain, something
    to fix."""
    conflicts = [pair for pair in report.pairs if pair.disagrees and not pair.exact]
    advice = "They are nearly the same, but of two classes. Look at check.png in your --out folder, and correct labels."
    yield (
        "labels differ",
        counted(len(conflicts), "pair"),
        list(map(_both, conflicts)),
        advice,
        False,
    )
    bad = report.unreadable
    reasons = by_reason([file.name for file in bad], [file.reason for file in bad])
    advice = "Most commands stop on them. Replace them, or leave them out by exclude.txt of your --out folder."
    yield "unreadable", counted(len(bad), "file"), reasons, advice, True
    names = [image.name for image in report.one_colour]
    advice = "All their pixels are equal. Look if they are broken."
    yield "one colour", counted(len(names), "image"), names, advice, False
    advice = "Their values are in the lowest eighth of the range, as 12 bits are among 16. Scale these files."
    yield "dark", counted(len(report.dark), "image"), report.dark, advice, False
    small = [
        f"{name}: {count}"
        for name, count in report.classes.get("train", {}).items()
        if count <= FEW
    ]
    advice = "If no folder is test, one image of each is tested, and none of a class of one image. Add images."
    yield "small classes", f"{len(small)} of at most {counted(FEW, 'image')}", small, advice, False
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
        yield kind, counted(len(pairs), "pair"), list(map(_both, pairs)), advice, key[1]


def _classes_and_sizes(report: DatasetReport) -> Iterator[str]:
    for split, classes in report.classes.items():
        ordered = sorted(classes.items(), key=lambda item: item[1])
        (small, least), (large, most) = ordered[0], ordered[-1]
        middle = int(np.median(list(classes.values())))
        span = f"{least} ('{small}') to {most} ('{large}') images, median {middle}"
        if most > SKEWED * max(1, least):
            skewed = ". Fine-tuning will favour the large ones"
        else:
            skewed = ""
        yield f"classes of {split}: {len(classes)}, with {span if least < most else f'{most} images each'}{skewed}"
    for split, (least, middle, most) in report.sides.items():
        yield f"sizes of {split}: short sides of {least} to {most} px, median {middle}"


def _both(pair: Pair) -> str:
    return f"{_name(pair.first)} and {_name(pair.second)}: {_kind(pair)}"


def _kind(pair: Pair) -> str:
    if pair.exact:
        kind = pair.kind
    else:
        kind = f"{pair.kind} {pair.similarity:.3f}"
    if pair.disagrees:
        return f"{kind}, labels differ"
    return kind


def _name(image: ImageRef) -> str:
    if image.name.startswith(image.split):
        return image.name
    return f"{image.split} {image.name}"


# ---------------------------------------------------------------------- the baseline
def _baseline(report: DatasetReport, listing: Listing, data: config.Data) -> dict | None:
    """Return the accuracy of the baseline and of the largest class, on the split that results would
    be reported on.

    If there is none, they are of a fifth of the training images. None: there are no labels for
    that.
    """
    if listing.train.labels is None:
        return None
    with_labels = (
        name
        for name in ("test", "val")
        if (part := listing.parts.get(name)) and part.labels is not None
    )
    of = next(with_labels, "train")
    train = listing.train
    held_out = listing.parts[of]
    if of == "train":
        try:
            divided = list_images(replace(data, val_fraction=HELD_OUT), labelled=True)
        except UserError:  # of one class, or what the layout's faults say
            return None
        train = divided.train
        held_out = divided.test
    train = train.take(baseline.sample_to_fit(train.labels))
    train, features = _features(report, train)
    tested, held_out_features = _features(
        report, held_out.take(np.flatnonzero(held_out.labels >= 0))
    )
    if len(np.unique(train.labels)) < 2 or not len(tested):
        return None
    top1 = baseline.measure(
        features, train.labels, held_out_features, tested.labels, groups=train.groups
    )
    sizes = {"train_images": len(train), "images": len(tested), "of": of}
    return {"baseline_top1": top1, "largest_class": largest_class(tested.labels), **sizes}


def _features(report: DatasetReport, split: Split) -> tuple[Split, np.ndarray]:
    """Return the readable images of a split, and the baseline's features of them [N, d]."""
    channels = 3 if report.bands is None else report.bands.used
    statistics = [0.0] * channels, [1.0] * channels
    model = create_backbone("hog", in_chans=channels)
    model.set_statistics(*statistics)
    values = report.range or [0, WHITE], report.bands
    network = Network(model, SIDE, CROP_PCT, *statistics, "cpu", BATCH, "the baseline", *values)
    return network.readable(split, pooled, "features for the baseline")


# ---------------------------------------------------------------------- the sheet
def _draw(report: DatasetReport, listing: Listing, path: Path) -> None:
    """Draw the worst pair of each group of images that are alike: labels that disagree, then leaks,
    then the rest."""
    from idmm.report.sheets import LARGE, Tile, caption_sheet, in_rows

    order = sorted(
        report.pairs, key=lambda p: (not p.disagrees, not p.leaks, not p.exact, -p.similarity)
    )
    tiles = []
    for pair in one_of_each(order)[:_DRAWN]:
        first_kind = f"{pair.kind}, leaks" if pair.leaks else pair.kind
        items = [
            getattr(listing, image.split).items[image.index] for image in (pair.first, pair.second)
        ]
        try:
            pixels = [
                composite(read_image(item, report.range, report.bands).pixels) for item in items
            ]
        # of test images of another type than the training images, whose range is known
        except BadImage:
            continue
        for image, kind, picture in zip(
            (pair.first, pair.second), (first_kind, _kind(pair)), pixels, strict=True
        ):
            tiles.append(Tile(picture, f"{kind}\n{_name(image)}\n{image.label or ''}"))
    title = f"{report.dataset}: {counted(len(order), 'pair')} of images that look the same, each image in one"
    if tiles:
        caption_sheet(in_rows(tiles), path, title, cell=LARGE)
