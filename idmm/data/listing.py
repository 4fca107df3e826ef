"""The images that a config means: a dataset's splits, less those excluded, held out, and drawn
from.

Nothing is decoded here. :data:`idmm.data.registry.DATASETS` has the datasets themselves.
"""

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.fingerprint import digests
from idmm.data.folder import FilesMissing, read_unlabelled, root_folder
from idmm.data.images import digest
from idmm.data.registry import read_dataset, resolve_name, spec_of
from idmm.data.split import LabelsMissing, Listing, Split, with_unlabelled
from idmm.data.stratify import divide, units_per_class
from idmm.data.user_lists import groups_of, leave_out, read_groups, with_groups, without
from idmm.errors import UserError
from idmm.seeding import numpy_rng
from idmm.text import counted, listed

log = logging.getLogger(__name__)


def list_images(
    data: config.Data,
    labelled: bool,
    evaluated: bool = True,
    unlabelled: bool | None = None,
    joined: bool = True,
) -> Listing:
    """List a dataset's images.

    In this order: the images of ``data.exclude`` are left out, ``data.fold`` and
    ``data.val_fraction`` held out, ``data.subset`` is drawn from the remaining training images, and
    ``data.labelled`` from these: the others lose their labels.

    Args:
        data: The ``data`` section of a config.
        labelled: True: every split has labels. False (pretraining): any images will do. Labels, val
            and test come along if the dataset has them.
        evaluated: Whether labelled images to evaluate on are needed, too. Then ``data.folds`` makes
            one fold ``test`` (the first if ``data.fold`` is None), which replaces the dataset's
            own.
        unlabelled: Whether images for pretraining only are listed, too: those of ROOT/unlabelled,
            and if ``labelled`` those without a row in ``data.labels``. Nothing is held out or drawn
            of them, but those whose group by ``data.groups`` is in val or test are left out. None:
            not ``labelled``.
        joined: Append these to the images to train on, with the label -1.

    Returns:
        ``train``, ``val`` and ``test`` or None, and ``unlabelled`` or None. A single evaluation
        split is ``test``.

    Raises:
        UserError: Unknown dataset, missing or damaged files, sizes that are not the protocol's,
            classes that do not agree, nothing to evaluate on, a bad list of the user's, a subset or
            folds that cannot be drawn. All faults of a folder in one.
    """
    data = resolve_name(data)[0]
    splits = _read(data, labelled, not labelled if unlabelled is None else unlabelled)
    splits = narrowed(splits, data, labelled)
    if data.exclude and labelled and (empty := _empty_classes(splits.train)):
        raise UserError(
            f"data.exclude: '{data.exclude}' leaves no training image of {listed(empty)}, "
            "expected at least one per class"
        )
    if data.folds is not None:
        splits = _hold_out_fold(splits, data.folds, data.fold or 1, labelled and evaluated)
    splits = hold_out(splits, data.val_fraction)
    if data.groups is not None:
        splits = _without_held_groups(splits, data, labelled)
    if labelled and evaluated and splits.test is None:
        if data.labels is None:
            root = f"'{data.root}'"
        else:
            root = f"'{data.root}' with data.labels '{data.labels}'"
        raise LabelsMissing(
            f"data.root: {root} has no 'val' or 'test' images to evaluate on. "
            "Add some, hold out a share of train with --data.val_fraction, e.g. 0.2, or give --data.folds 5"
        )
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
    if data.labelled is not None:
        splits = replace(splits, train=_with_labels_of(splits.train, data.labelled))
    if labelled and (empty := _empty_classes(splits.train)):
        classes = f"{len(empty)} of {len(splits.train.classes)} classes"
        log.warning("data: %s have no training image: %s", classes, listed(empty))
    if joined:
        return with_unlabelled(splits)
    return splits


# ---------------------------------------------------------------------- the dataset
def _read(data: config.Data, labelled: bool, unlabelled: bool) -> Listing:
    """Read a dataset. UserError if its files are missing, or its sizes are not those of its
    protocol."""
    spec = spec_of(data.name)
    if data.labels is not None and spec.name != "folder":
        raise UserError(
            f"data.labels: '{data.labels}' is for data.name folder, and {spec.name} has classes of its own"
        )
    try:
        splits = read_dataset(data, labelled)
    except FilesMissing as error:
        how = []
        if spec.archives:
            how = [
                f"data.root: 'idmm data download {spec.name} --root {data.root or 'DIR'}' fetches {spec.name}"
            ]
        elif spec.manual:
            how = [
                f"data.root: {spec.name} cannot be downloaded: {spec.manual.replace('ROOT', data.root or 'DIR')}"
            ]
        raise UserError(*error.faults, *how) from None
    faults = [
        f"data.root: {spec.name}: {count} {what}, its protocol has {expected}"
        for what, count, expected in (
            ("training images", len(splits.train), spec.train_size),
            ("test images", len(splits.test or ()), spec.test_size),
            ("classes", len(splits.train.classes or ()), spec.num_classes),
        )
        if expected not in (None, count)
    ]
    if faults:
        raise UserError(*faults)
    if not unlabelled or data.name != "folder":
        return replace(splits, unlabelled=None)
    if data.labels is None:  # else its reader has listed them with the others
        splits = replace(splits, unlabelled=read_unlabelled(str(root_folder(data))))
    if splits.unlabelled is not None:
        images = f"{len(splits.train)} images, and {len(splits.unlabelled)} more without labels"
        log.info("data.root: '%s' has %s, for pretraining only", data.root, images)
    return splits


def narrowed(splits: Listing, data: config.Data, labelled: bool) -> Listing:
    """Return the splits less ``data.exclude``, each image with its group of ``data.groups``.
    UserError: a bad list."""
    root = _root_of_names(data)
    if data.exclude is not None:
        splits = leave_out(splits, data.exclude, root)
    if data.groups is not None and (labelled or data.val_fraction):
        splits = with_groups(splits, data.groups, root)
    held = {
        str(name)
        for part in (splits.val, splits.test)
        if part and part.groups is not None
        for name in part.groups
    }
    if splits.train.groups is not None and (
        shared := sorted(held.intersection(splits.train.groups))
    ):
        what = f"{counted(len(shared), 'group')} with images both in train and in val or test"
        log.warning("data.groups: %s, so accuracies come out too high: %s", what, listed(shared))
    return splits


def _root_of_names(data: config.Data) -> str | None:
    """Return the folder that names of images are relative to. None: official images, which lie in
    folders below it."""
    if data.name == "folder":
        return data.root
    return None


def _without_held_groups(splits: Listing, data: config.Data, labelled: bool) -> Listing:
    """Leave out images without labels whose group by ``data.groups`` has images in val or test."""
    parts = [splits.val, splits.test]
    with_labels = splits.train
    if not labelled:  # val and test are listed here only if the folders of train are classes
        everything = replace(data, val_fraction=0.0, subset=None, labelled=None)
        with contextlib.suppress(UserError):  # no labels
            listing = list_images(everything, labelled=True, evaluated=False, unlabelled=False)
            parts = [*parts, listing.val, listing.test]
            with_labels = listing.train
    held = [name for part in parts if part is not None for name in part.names]
    without_labels = set(splits.train.names) - set(with_labels.names)
    without_labels.update(splits.unlabelled.names if splits.unlabelled else ())
    names = [*held, *without_labels, *with_labels.names]
    group = read_groups(data.groups, names, _root_of_names(data))
    held_groups = {group[name] for name in held if group.get(name)}
    out = {name for name in without_labels if group.get(name) in held_groups}
    if not out:
        return splits
    log.info(
        "data.groups: left out %s without labels, of groups in val or test",
        counted(len(out), "image"),
    )
    unlabelled = splits.unlabelled and without(splits.unlabelled, out)
    return replace(splits, train=without(splits.train, out), unlabelled=unlabelled)


# --------------------------------------------------------------------- parts of the training images
def draw_subset(split: Split, subset: config.Subset) -> Split:
    """Draw a part of a split, in its original order. With one seed, a smaller subset is part of a
    larger one.

    Raises:
        UserError: More than there is, or per_class without labels.
    """
    return split.take(_drawn_from(split, subset, "data.subset"))


def _with_labels_of(train: Split, drawn: config.Subset) -> Split:
    """Return training images with the labels of those only that a draw names. The others' are
    -1."""
    numbers = _drawn_from(train, drawn, "data.labelled")
    if len(classes := np.unique(train.labels[numbers])) < 2:
        raise UserError(
            f"data.labelled: the images that are drawn are all of class '{train.classes[classes[0]]}'. "
            "A classifier needs two or more"
        )
    labels = np.full(len(train), -1)
    labels[numbers] = train.labels[numbers]
    return replace(train, labels=labels)


def _drawn_from(split: Split, subset: config.Subset, field: str) -> np.ndarray:
    """Return the numbers of a subset's images in order. Errors as of :func:`draw_subset`, with the
    key ``field``."""
    if subset.per_class is not None and split.labels is None:
        raise UserError(
            f"{field}.per_class: these images have no labels, expected total or fraction"
        )
    if subset.total is not None and subset.total > len(split):
        raise UserError(
            f"{field}.total: {subset.total} is more than the {len(split)} training images"
        )
    groups = [np.arange(len(split))]
    if subset.total is None and split.labels is not None:
        groups = [np.flatnonzero(split.labels == label) for label in range(len(split.classes))]
    sizes = [len(group) for group in groups]
    least = min(sizes)
    if subset.per_class is not None and subset.per_class > least:
        raise UserError(
            f"{field}.per_class: {subset.per_class} is more than the {least} training images of class "
            f"'{split.classes[sizes.index(least)]}', expected up to {least}"
        )
    rng = numpy_rng(subset.seed, "subset")
    drawn = []
    for group in groups:
        count = subset.total or subset.per_class or max(1, int(subset.fraction * len(group) + 0.5))
        drawn.append(rng.permutation(group)[:count])
    return np.sort(np.concatenate(drawn))


def _empty_classes(split: Split) -> list[str]:
    return [split.classes[label] for label in np.setdiff1d(range(len(split.classes)), split.labels)]


def hold_out(splits: Listing, fraction: float | None) -> Listing:
    """Move a share of each class from train to the missing evaluation split, by
    :func:`_held_units`.

    An image's side depends on its content, or its group's name, and hardly on the other images. No
    seed changes it.
    """
    if not fraction:
        return splits
    train = splits.train
    if splits.val is not None or train.labels is None:
        if splits.val is None:
            why = "there are no labels to evaluate with"
        else:
            why = "the dataset has a 'val' split"
        log.warning("data.val_fraction: %g is not used, as %s", fraction, why)
        return splits
    if train.groups is None:
        units = digests(train)
        lacking = "no class has two different images"
    else:
        units = [digest(str(name).encode("utf-8", "surrogateescape")) for name in train.groups]
        lacking = f"all images are of one group ('{train.groups[0]}')"
    held_units = _held_units(units, train.labels.tolist(), fraction)
    # each group is a whole class
    if not held_units and train.groups is not None and len(set(units)) > 1:
        held_units = {min(units)}
    if not held_units:
        raise UserError(
            f"data.val_fraction: {fraction:g} holds out no image, as {lacking}. Add images to train, or a folder test"
        )
    is_held = np.array([unit in held_units for unit in units])
    held = train.take(np.flatnonzero(is_held))
    if train.groups is not None:
        share = f"{groups_of(held)} of {groups_of(train)}, {len(held)} of {len(train)} images"
        log.info("data.val_fraction: held out are %s", share)
    part = "test" if splits.test is None else "val"
    return replace(splits, train=train.take(np.flatnonzero(~is_held)), **{part: held})


def _held_units(units: Sequence[bytes], labels: Sequence[int], fraction: float) -> set[bytes]:
    """Choose the units with the smallest digests, until a share of each class is held out.

    A unit is all images of one content or one group, so copies are on one side. Each class keeps
    images to train on. One corrected label therefore moves no more than one other unit of each
    class.

    Args:
        units: Digest of each image's unit.
        labels: Class of each image.
        fraction: Share of each class.
    """
    counts_of: dict[bytes, Counter] = defaultdict(Counter)
    for unit, label in zip(units, labels, strict=True):
        counts_of[unit][label] += 1
    totals = Counter(labels)
    held: Counter = Counter()
    chosen: set[bytes] = set()

    def beyond(label: int, more: int = 0) -> float:
        """Return by how many images a class is beyond its share."""
        return held[label] + more - fraction * totals[label]

    def within_share(counts: Counter) -> bool:
        return all(beyond(label, count) <= 0.5 for label, count in counts.items())

    def nearer_to_share(counts: Counter) -> bool:
        return (
            sum(abs(beyond(label)) - abs(beyond(label, count)) for label, count in counts.items())
            > 0
        )

    def first_of_class(counts: Counter) -> bool:
        return not all(held[label] for label in counts)

    for is_needed in (within_share, nearer_to_share, first_of_class):
        for unit in sorted(counts_of):
            counts = counts_of[unit]
            leaves_some = all(
                held[label] + count < totals[label] for label, count in counts.items()
            )
            if unit not in chosen and leaves_some and is_needed(counts):
                chosen.add(unit)
                held.update(counts)
    return chosen


def _hold_out_fold(splits: Listing, folds: int, fold: int, evaluated: bool) -> Listing:
    """Make a fold of the training images ``test``. A test split of the dataset is not used then."""
    train = splits.train
    if train.labels is None or not evaluated:
        log.warning(
            "data.folds: %d is not used, as pretraining takes all training images and is not tested",
            folds,
        )
        return splits
    unit = "images" if train.groups is None else "groups"
    counts = units_per_class(train.labels, train.groups, len(train.classes)).tolist()
    few = [pair for pair in sorted(zip(counts, train.classes, strict=True)) if pair[0] < folds]
    if few:
        what = listed(f"'{name}' has {count}" for count, name in few)
        raise UserError(
            f"data.folds: {folds} folds need {folds} training {unit} of each class: {what}"
        )
    remaining, held = map(train.take, divide(train.labels, train.groups, folds)[fold - 1])
    if train.groups is None:
        groups = ""
    else:
        groups = f" ({groups_of(held)} of {groups_of(train)})"
    if splits.test is None:
        aside = ""
    else:
        aside = f". The {len(splits.test)} test images of the dataset are not used"
    what = f"tested on {len(held)} of {len(train)} training images{groups}{aside}"
    log.info("data.folds: fold %d of %d is %s", fold, folds, what)
    return replace(splits, train=remaining, test=held)
