"""The images that a config means: a dataset's splits, without those excluded and not drawn.

Nothing is decoded here. :data:`idmm.data.registry.DATASETS` has the datasets themselves.
"""

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from idmm.config import Data, Subset
from idmm.data.fingerprint import digests
from idmm.data.folder import FilesMissing, read_unlabelled, root_folder
from idmm.data.images import digest
from idmm.data.registry import Spec, read_dataset, resolve_name, spec_of
from idmm.data.split import Labels, LabelsMissing, Listing, Split, names_of, with_unlabelled
from idmm.data.stratify import divide, units_per_class
from idmm.data.user_lists import groups_of, leave_out, read_groups, with_groups, without
from idmm.errors import Fault, UserError
from idmm.seeding import numpy_rng
from idmm.text import counted, listed

log = logging.getLogger(__name__)


def list_images(
    data: Data,
    labelled: bool,
    evaluated: bool = True,
    unlabelled: bool | None = None,
    joined: bool = True,
    least_classes: int | None = None,
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
        least_classes: Classes that must have training images, if others need none. None: all of
            them must, and two at least.

    Returns:
        ``train``, ``val`` and ``test`` or None, and ``unlabelled`` or None. A single evaluation
        split is ``test``.

    Raises:
        UserError: Unknown dataset, missing or damaged files, sizes that are not the protocol's,
            classes that do not agree, nothing to evaluate on, a bad list of the user's, a subset or
            folds that cannot be drawn. All faults of a folder in one.
    """
    data, _ = resolve_name(data)
    if unlabelled is None:
        unlabelled = not labelled
    splits = _read(data, labelled, unlabelled, least_classes)
    splits = narrowed(splits, data, labelled, least_classes is None)
    splits = divided(splits, data, labelled, labelled and evaluated)
    train = drawn(splits.train, data, labelled and least_classes is None)
    splits = replace(splits, train=train)
    if joined:
        return with_unlabelled(splits)
    return splits


def divided(splits: Listing, data: Data, labelled: bool, is_tested: bool) -> Listing:
    """Hold images out, and leave out those of their groups.

    ``is_tested``: There must be images to evaluate on.
    """
    if data.folds is not None:
        splits = _hold_out_fold(splits, data.folds, data.fold or 1, is_tested)
    splits = hold_out(splits, data.val_fraction)
    if data.groups is not None:
        splits = _without_held_groups(splits, data, data.groups, labelled)
    if not is_tested or splits.test is not None:
        return splits
    root = f"'{data.root}'"
    if data.labels is not None:
        root = f"{root} with data.labels '{data.labels}'"
    raise LabelsMissing.of(
        "data.root",
        f"{root} has no 'val' or 'test' images to evaluate on",
        "Add some, hold out a share of train with --data.val_fraction, e.g. 0.2, "
        "or give --data.folds 5",
    )


# ---------------------------------------------------------------------- the dataset
def _read(data: Data, labelled: bool, unlabelled: bool, least_classes: int | None) -> Listing:
    """Read a dataset.

    Raises:
        UserError: Its files are missing, or its sizes are not those of its protocol.
    """
    spec = spec_of(data.name)
    if data.labels is not None and spec.name != "folder":
        raise UserError.of(
            "data.labels",
            f"'{data.labels}' is for data.name folder, and {spec.name} has classes of its own",
        )
    try:
        splits = read_dataset(data, labelled, least_classes)
    except FilesMissing as error:
        root = data.root or "DIR"
        faults = list(error.faults)
        if spec.archives:
            command = f"idmm data download {spec.name} --root {root}"
            faults.append(Fault("data.root", f"'{command}' fetches {spec.name}"))
        elif spec.manual:
            steps = spec.manual.replace("ROOT", root)
            faults.append(Fault("data.root", f"{spec.name} cannot be downloaded: {steps}"))
        raise UserError(*faults) from None
    _check_sizes(splits, spec)
    if not unlabelled or spec.name != "folder":
        return replace(splits, unlabelled=None)
    if data.labels is None:  # else its reader has listed them with the others
        splits = replace(splits, unlabelled=read_unlabelled(str(root_folder(data))))
    if splits.unlabelled is not None:
        log.info(
            f"data.root: '{data.root}' has {len(splits.train)} images, and "
            f"{len(splits.unlabelled)} more without labels"
        )
    return splits


def _check_sizes(splits: Listing, spec: Spec) -> None:
    """Raise UserError if the sizes of a dataset are not those of its protocol."""
    faults = []
    for unit, count, expected in (
        ("training images", len(splits.train), spec.train_size),
        ("test images", len(splits.test or ()), spec.test_size),
        ("classes", len(splits.train.class_names), spec.num_classes),
    ):
        if expected not in (None, count):
            faults.append(
                Fault("data.root", f"{spec.name}: {count} {unit}, its protocol has {expected}")
            )
    if faults:
        raise UserError(*faults)


def narrowed(splits: Listing, data: Data, labelled: bool, all_classes: bool = True) -> Listing:
    """Return the splits less ``data.exclude``, each image with its group of ``data.groups``.

    Raises:
        UserError: A bad list. With ``all_classes``, no training image of a class is left.
    """
    root = _root_of_names(data)
    if data.exclude is not None:
        splits = leave_out(splits, data.exclude, root)
    if data.groups is not None and (labelled or data.val_fraction):
        splits = with_groups(splits, data.groups, root)
    trained = _groups_of([splits.train])
    if shared := sorted(trained & _groups_of(splits.evaluated)):
        log.warning(
            f"data.groups: {counted(len(shared), 'group')} with images both in train and in val or "
            f"test, so accuracies come out too high: {listed(shared)}"
        )
    if data.exclude and labelled and all_classes and (empty := splits.train.empty_classes):
        raise UserError.of(
            "data.exclude",
            f"'{data.exclude}' leaves no training image of {listed(empty)}, "
            "expected at least one per class",
        )
    return splits


def _groups_of(parts: Iterable[Split]) -> set[str]:
    """Return the names of the groups of images, if they have some."""
    names = set()
    for part in parts:
        if part.groups is not None:
            names.update(part.groups.tolist())
    return names


def _root_of_names(data: Data) -> str | None:
    """Return the folder that names are relative to. None: that of official images is below it."""
    if data.name == "folder":
        return data.root
    return None


def _without_held_groups(splits: Listing, data: Data, groups: str, labelled: bool) -> Listing:
    """Leave out images without labels whose group by ``data.groups`` has images in val or test."""
    evaluated = splits.evaluated
    with_labels = splits.train
    if not labelled:  # val and test are listed here only if the folders of train are classes
        everything = replace(data, val_fraction=0.0, subset=None, labelled=None)
        with contextlib.suppress(UserError):  # no labels
            listing = list_images(everything, labelled=True, evaluated=False, unlabelled=False)
            evaluated += listing.evaluated
            with_labels = listing.train
    held = [*names_of(evaluated), *splits.aside]
    without_labels = {*splits.train.names}.difference(with_labels.names)
    if splits.unlabelled:
        without_labels.update(splits.unlabelled.names)
    names = [*held, *without_labels, *with_labels.names]
    group_of = read_groups(groups, names, _root_of_names(data))
    held_groups = {group_of.get(name) for name in held} - {None, ""}
    left_out = {name for name in without_labels if group_of.get(name) in held_groups}
    if not left_out:
        return splits
    log.info(
        f"data.groups: left out {counted(len(left_out), 'image')} without labels, "
        "of groups in val or test"
    )
    parts = splits.parts
    for key in parts.keys() & {"train", "unlabelled"}:
        parts[key] = without(parts[key], left_out)
    return splits.with_parts(parts)


# --------------------------------------------------------------------- parts of the training images
def drawn(train: Split, data: Data, labelled: bool) -> Split:
    """Return the images that ``data.subset`` draws, with the labels that ``data.labelled`` draws.

    ``labelled``: Classes without an image get a warning.
    """
    if data.subset is not None:
        train = draw_subset(train, data.subset)
    if data.labelled is not None:
        train = _with_labels_of(train, data.labelled)
    if labelled and (empty := train.empty_classes):
        log.warning(
            f"data: {len(empty)} of {len(train.class_names)} classes have no training image: "
            f"{listed(empty)}"
        )
    return train


def draw_subset(split: Split, subset: Subset) -> Split:
    """Draw a part of a split, in its original order.

    With one seed, a smaller subset is part of a larger one.

    Raises:
        UserError: More than there is, or per_class without labels.
    """
    return split.take(_drawn_from(split, subset, "data.subset"))


def _with_labels_of(train: Split, drawn: Subset) -> Split:
    """Return training images with the labels of those only that a draw names, the others' -1."""
    numbers = _drawn_from(train, drawn, "data.labelled")
    labels = np.full(len(train), -1)
    labels[numbers] = train.known_labels[numbers]
    classes = np.unique(labels[numbers]).tolist()
    if len(classes) < 2:
        only = train.class_names[classes[0]]
        raise UserError.of(
            "data.labelled",
            f"the images that are drawn are all of class '{only}'",
            "A classifier needs two or more",
        )
    return replace(train, labels=labels)


def _drawn_from(split: Split, subset: Subset, field: str) -> Labels:
    """Return the numbers of a subset's images in order, int64 [M].

    Errors are as of :func:`draw_subset`, with the key ``field``.
    """
    total = subset.total
    count = subset.per_class
    groups = [np.arange(len(split))]
    if split.labels is None:
        if count is not None:
            raise UserError.of(
                f"{field}.per_class", "these images have no labels, expected total or fraction"
            )
    elif total is None:
        classes = range(len(split.class_names))
        groups = [np.flatnonzero(split.labels == label) for label in classes]
    if total is not None and total > len(split):
        raise UserError.of(
            f"{field}.total", f"{total} is more than the {len(split)} training images"
        )
    least, label = min((len(group), label) for label, group in enumerate(groups))
    if count is not None and count > least:
        raise UserError.of(
            f"{field}.per_class",
            f"{count} is more than the {least} training images of class "
            f"'{split.class_names[label]}', expected up to {least}",
        )
    rng = numpy_rng(subset.seed, "subset")
    drawn = []
    for group in groups:
        if subset.fraction is not None:
            count = max(1, int(subset.fraction * len(group) + 0.5))
        drawn.append(rng.permutation(group)[: total or count])
    return np.sort(np.concatenate(drawn))


def hold_out(splits: Listing, fraction: float | None) -> Listing:
    """Move a share of each class from train to the missing evaluation split.

    An image's side depends on its content, or its group's name, and hardly on the other images, see
    :func:`_held_units`. No seed changes it.
    """
    if not fraction:
        return splits
    train = splits.train
    if splits.val is not None:
        log.warning(
            f"data.val_fraction: {fraction:g} is not used, as the dataset has a 'val' split"
        )
        return splits
    if train.labels is None:
        log.warning(
            f"data.val_fraction: {fraction:g} is not used, as there are no labels to evaluate with"
        )
        return splits
    if train.groups is None:
        units = digests(train)
        fault = f"{fraction:g} holds out no image, as no class has two different images"
    else:
        names = train.groups.tolist()
        units = [digest(name.encode("utf-8", "surrogateescape")) for name in names]
        fault = f"{fraction:g} holds out no image, as all images are of one group ('{names[0]}')"
    held_units = _held_units(units, train.labels.tolist(), fraction)
    # each group is a whole class
    if not held_units and train.groups is not None and len(set(units)) > 1:
        held_units = {min(units)}
    if not held_units:
        raise UserError.of("data.val_fraction", fault, "Add images to train, or a folder test")
    is_held = np.array([unit in held_units for unit in units])
    held = train.take(np.flatnonzero(is_held))
    if train.groups is not None:
        log.info(
            f"data.val_fraction: held out are {groups_of(train.groups[is_held])} of "
            f"{groups_of(train.groups)}, {len(held)} of {len(train)} images"
        )
    parts = splits.parts | {"train": train.take(np.flatnonzero(~is_held))}
    parts["test" if splits.test is None else "val"] = held
    return splits.with_parts(parts)


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
    counts_of: dict[bytes, Counter[int]] = defaultdict(Counter)
    for unit, label in zip(units, labels, strict=True):
        counts_of[unit][label] += 1
    totals = Counter(labels)
    held: Counter[int] = Counter()
    chosen: set[bytes] = set()

    def beyond(label: int, more: int = 0) -> float:
        """Return by how many images a class is beyond its share."""
        return held[label] + more - fraction * totals[label]

    def within_share(counts: Counter[int]) -> bool:
        return all(beyond(label, count) <= 0.5 for label, count in counts.items())

    def nearer_to_share(counts: Counter[int]) -> bool:
        return (
            sum(abs(beyond(label)) - abs(beyond(label, count)) for label, count in counts.items())
            > 0
        )

    def first_of_class(counts: Counter[int]) -> bool:
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
            f"data.folds: {folds} is not used, as pretraining takes all training images "
            "and is not tested"
        )
        return splits
    unit = "images" if train.groups is None else "groups"
    counts = units_per_class(train.labels, train.groups, len(train.class_names)).tolist()
    few = []
    for count, name in sorted(zip(counts, train.class_names, strict=True)):
        if count < folds:
            few.append(f"'{name}' has {count}")
    if few:
        raise UserError.of(
            "data.folds", f"{folds} folds need {folds} training {unit} of each class: {listed(few)}"
        )
    numbers = divide(train.labels, train.groups, folds)[fold - 1]
    held = train.take(numbers.held_out)
    in_groups = ""
    if train.groups is not None:
        held_groups = groups_of(train.groups[numbers.held_out])
        in_groups = f" ({held_groups} of {groups_of(train.groups)})"
    unused = ""
    if splits.test is not None:
        unused = f". The {len(splits.test)} test images of the dataset are not used"
    log.info(
        f"data.folds: fold {fold} of {folds} is tested on {len(held)} of {len(train)} training "
        f"images{in_groups}{unused}"
    )
    return replace(splits, train=train.take(numbers.train), test=held)
