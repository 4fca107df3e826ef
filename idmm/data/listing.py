"""Which images a config means: a dataset's splits, checked against its protocol, less those excluded, held out, and
drawn from.

Nothing is decoded here. The datasets themselves are rows of :data:`idmm.data.registry.DATASETS`.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from idmm import config
from idmm.data.readers.folder import read_unlabelled
from idmm.data.readers.layout import FilesMissing, root_folder
from idmm.data.registry import Spec, resolve_name, spec_of
from idmm.data.split import LabelsMissing, Listing, Split, counted, together
from idmm.data.user_lists import groups_of, leave_out, shared_groups, with_groups
from idmm.errors import UserError, listed
from idmm.seeding import derive, numpy_rng

log = logging.getLogger(__name__)

_DRAWS = 200  # random draws of groups, of which the one with the best shares of the classes is held out


def list_images(data: config.Data, labelled: bool, evaluated: bool = True, unlabelled: bool | None = None) -> Listing:
    """Returns what :func:`read_splits` does, images without labels among those to train on.

    Args:
        data: The ``data`` section of a config.
        labelled: See :func:`read_splits`.
        evaluated: Likewise.
        unlabelled: Whether images without labels come along, too; None: where labels are not needed.
    """
    unlabelled = not labelled if unlabelled is None else unlabelled
    return together(read_splits(data, labelled, evaluated, unlabelled))


def read_splits(data: config.Data, labelled: bool, evaluated: bool, unlabelled: bool) -> Listing:
    """Lists a dataset's images, less those of ``data.exclude``; holds out ``data.fold`` and ``data.val_fraction`` and
    draws ``data.subset`` from the training images and, from what that leaves, ``data.labelled``, whose labels are kept.

    Args:
        data: The ``data`` section of a config.
        labelled: True: every split has labels. False (pretraining): any images will do; labels, val and test come
            along where the dataset happens to have them.
        evaluated: Whether labelled images to evaluate on are needed, too. Then ``data.folds`` makes one fold ``test``
            (the first where ``data.fold`` is None), in the place of what the dataset has.
        unlabelled: Whether images for pretraining alone are listed, too: those of the folder ``unlabelled`` beside
            ``train``, and where ``labelled`` those without a row in ``data.labels``. Nothing is held out or drawn of
            them.

    Returns:
        ``train``, ``val`` and ``test`` or None, and ``unlabelled`` or None. A single evaluation split is ``test``.

    Raises:
        UserError: Unknown dataset, missing or damaged files, sizes that are not the protocol's, classes that do not
            agree, nothing to evaluate on, a subset or folds that cannot be drawn; all faults of a folder in one.
            BadList: one of the user's lists is bad.
    """
    data = resolve_name(data)[0]
    spec = spec_of(data.name)
    splits = _read(spec, data, labelled)
    _check_sizes(spec, splits)
    splits = narrowed(_with_unlabelled(splits, data, unlabelled), data, labelled)
    if data.exclude is not None and labelled and splits.train.labels is not None:
        if empty := _empty_classes(splits.train):
            raise UserError(f"data.exclude: '{data.exclude}' leaves no training image of {listed(empty)}; wanted some")
    if data.folds is not None:
        splits = _hold_out_fold(splits, data.folds, data.fold or 1, labelled and evaluated)
    splits = hold_out(splits, data.val_fraction)
    if labelled and splits.train.labels is None:
        raise LabelsMissing(f"data.name: '{data.name}' has no labels; fine-tuning needs them")
    if labelled and evaluated and splits.test is None:
        where = f"'{data.root}'" if data.labels is None else f"'{data.root}' with data.labels '{data.labels}'"
        what = f"{where} has no 'val' or 'test' images to evaluate on; add some, hold out a share of train"
        raise LabelsMissing(f"data.root: {what} with --data.val_fraction, e.g. 0.2, or give --data.folds 5")
    if data.subset is not None:
        splits = replace(splits, train=draw_subset(splits.train, data.subset))
    if data.labelled is not None:
        splits = replace(splits, train=_with_labels_of(splits.train, data.labelled))
    if labelled and (empty := _empty_classes(splits.train)):
        classes = f"{len(empty)} of {len(splits.train.classes)} classes"
        log.warning("data: %s have no training image: %s", classes, listed(empty))
    return splits


def _with_unlabelled(splits: Listing, data: config.Data, wanted: bool) -> Listing:
    """Lists the images without labels that are for pretraining alone, where they are wanted."""
    if not wanted or data.name != "folder":
        return replace(splits, unlabelled=None)
    if data.labels is None:  # whose reader lists them with the others
        splits = replace(splits, unlabelled=read_unlabelled(str(root_folder(data))))
    if splits.unlabelled is not None:
        images = f"{len(splits.train)} images, and {len(splits.unlabelled)} more without labels"
        log.info("data.root: '%s' has %s, for pretraining alone", data.root, images)
    return splits


def _with_labels_of(train: Split, drawn: config.Subset) -> Split:
    """Returns training images with the labels of those alone that a draw names; the others' are -1."""
    numbers = drawn_from(train, drawn, "data.labelled")
    if len(found := np.unique(train.labels[numbers])) < 2:
        only = f"the images that are drawn are all of class '{train.classes[found[0]]}'"
        raise UserError(f"data.labelled: {only}; a classifier wants two or more")
    labels = np.full(len(train), -1)
    labels[numbers] = train.labels[numbers]
    return replace(train, labels=labels)


def narrowed(splits: Listing, data: config.Data, labelled: bool) -> Listing:
    """Returns the splits without the images of ``data.exclude``, each with its group where ``data.groups`` says it.

    Raises:
        BadList: One of them is bad.
    """
    if data.exclude is not None:
        splits = leave_out(splits, data.exclude, data.root)
    if data.groups is not None and (labelled or data.val_fraction):
        splits = with_groups(splits, data.groups, data.root)
    if splits.train.groups is not None and (shared := shared_groups(splits)):
        what = f"{counted(len(shared), 'group')} with images both in train and in val or test"
        log.warning("data.groups: %s, so accuracies come out too high: %s", what, listed(shared))
    return splits


def _read(spec: Spec, data: config.Data, labelled: bool) -> Listing:
    if data.labels is not None and spec.name != "folder":
        raise UserError(f"data.labels: '{data.labels}' is for data.name folder; {spec.name} has classes of its own")
    try:
        return spec.read(data, labelled)
    except FilesMissing as error:
        how = []
        if spec.archives:
            how = [f"data.root: 'idmm data download {spec.name} --root {data.root or 'DIR'}' fetches {spec.name}"]
        elif spec.manual:
            how = [f"data.root: {spec.name} cannot be downloaded: {spec.manual}"]
        raise UserError(*error.faults, *how) from None


def _check_sizes(spec: Spec, splits: Listing) -> None:
    """Raises UserError if the sizes are not those of the dataset's protocol."""
    figures = {
        "train": [len(splits.train), spec.train_size],
        "test": [len(splits.test or ()), spec.test_size],
        "classes": [len(splits.train.classes or ()), spec.num_classes],
    }
    lines = []
    for key, (found, wanted) in figures.items():
        if wanted not in (None, found):
            what = f"has {found} classes" if key == "classes" else f"the split '{key}' has {found} images"
            lines.append(f"data.root: {spec.name}: {what}, its protocol {wanted}")
    if lines:
        raise UserError(*lines)


def draw_subset(split: Split, subset: config.Subset) -> Split:
    """Draws a part of a split, in its original order; with one seed, a smaller subset is part of a larger one.

    Raises:
        UserError: More than there is, or per_class without labels.
    """
    drawn = split.take(drawn_from(split, subset, "data.subset"))
    return replace(drawn, drawn=f"{split.drawn} {subset!r}")


def drawn_from(split: Split, subset: config.Subset, field: str) -> np.ndarray:
    """Returns the numbers of the images that a subset is of, in order; errors as of :func:`draw_subset`, with ``field``
    for the config's key."""
    if subset.per_class is not None and split.labels is None:
        raise UserError(f"{field}.per_class: these images have no labels; wanted total or fraction")
    if subset.total is not None and subset.total > len(split):
        raise UserError(f"{field}.total: {subset.total} is more than the {len(split)} training images")
    whole = subset.total is not None or split.labels is None
    groups = [np.arange(len(split))] if whole else _by_class(split)
    if subset.per_class is not None:
        few = [(len(of), name) for of, name in zip(groups, split.classes, strict=True) if len(of) < subset.per_class]
        if few:
            (least, name), others = min(few), f" and of {len(few) - 1} more" if len(few) > 1 else ""
            what = f"{subset.per_class} is more than the {least} training images of class '{name}'{others}"
            raise UserError(f"{field}.per_class: {what}; wanted up to {least}")
    counts = [subset.total or subset.per_class or max(1, _share(subset.fraction, len(g))) for g in groups]
    return _draw(groups, counts, numpy_rng(subset.seed, "subset"))


def _empty_classes(split: Split) -> list[str]:
    there = set(split.labels.tolist())
    return [name for label, name in enumerate(split.classes) if label not in there]


def hold_out(splits: Listing, fraction: float) -> Listing:
    """Moves a share of each class from train to the evaluation split that is missing."""
    if not fraction:
        return splits
    if splits.val is not None or splits.train.labels is None:
        own = "the dataset has a 'val' split of its own"
        why = "the images have no labels to evaluate with" if splits.val is None else own
        log.warning("data.val_fraction: %g is not used, as %s", fraction, why)
        return splits
    held = (_whole_groups if splits.train.groups is not None else _of_each_class)(splits.train, fraction)
    train, held = _parted(splits.train, held, repr(fraction))
    if train.groups is not None:
        share = f"{groups_of(held)} of {groups_of(splits.train)}, {len(held)} of {len(splits.train)} images"
        log.info("data.val_fraction: held out are %s", share)
    return replace(splits, train=train, **{"test" if splits.test is None else "val": held})


def _parted(train: Split, held: np.ndarray, how: str) -> tuple[Split, Split]:
    """Takes the images ``held`` (numbers) out of a split; returns what is left, and them."""
    kept = np.setdiff1d(np.arange(len(train)), held)
    left = replace(train.take(kept), drawn=f"{train.drawn} but {how}".strip())
    return left, replace(train.take(held), drawn=f"{train.drawn} {how} of train".strip())


def _of_each_class(train: Split, fraction: float) -> np.ndarray:
    """Draws a share of each class, which keeps one image at least."""
    classes = _by_class(train)
    # a class keeps one image for training; one with a single image gives none
    counts = [min(len(g) - 1, max(1, _share(fraction, len(g)))) if len(g) > 1 else 0 for g in classes]
    held = _draw(classes, counts, numpy_rng(0, "val_fraction"))
    if not len(held):
        raise UserError(f"data.val_fraction: {fraction:g} holds out no image, as every class has one only")
    return held


def _whole_groups(train: Split, fraction: float) -> np.ndarray:
    """Draws groups, of many draws the one with the share of each class nearest to what is wanted."""
    from sklearn.model_selection import GroupShuffleSplit

    number, counts = len(np.unique(train.groups)), np.bincount(train.labels, minlength=len(train.classes))
    if number < 2:
        only = f"all images are of one group ('{train.groups[0]}')"
        raise UserError(f"data.val_fraction: {fraction:g} holds out no image, as {only}")

    def distance(held: np.ndarray) -> tuple:
        found = np.bincount(train.labels[held], minlength=len(counts))
        there = counts > 0
        return (found[there] == counts[there]).sum(), (found[there] == 0).sum(), np.abs(found - fraction * counts).sum()

    size, seed = min(max(1, _share(fraction, number)), number - 1), derive(0, "val_fraction") % 2**32
    draws = GroupShuffleSplit(_DRAWS, test_size=size, random_state=seed).split(train.labels, groups=train.groups)
    return np.sort(min((held for _, held in draws), key=distance))


def _hold_out_fold(splits: Listing, folds: int, fold: int, wanted: bool) -> Listing:
    """Makes a fold of the training images ``test``; a test split that the dataset has stays aside."""
    train = splits.train
    if train.labels is None or not wanted:
        log.warning("data.folds: %d is not used, as pretraining takes all training images and is not tested", folds)
        return splits
    unit = "images" if train.groups is None else "groups"
    counts = [len(of) if train.groups is None else len(set(train.groups[of])) for of in _by_class(train)]
    few = sorted((count, name) for count, name in zip(counts, train.classes, strict=True) if count < folds)
    if few:
        what = listed(f"'{name}' has {count}" for count, name in few)
        raise UserError(f"data.folds: {folds} folds want {folds} training {unit} of each class; {what}")
    held = _folds(train, folds)[fold - 1]
    left, held = _parted(train, held, f"fold {fold} of {folds}")
    groups = "" if train.groups is None else f" ({groups_of(held)} of {groups_of(train)})"
    aside = "" if splits.test is None else f"; the {len(splits.test)} test images of the dataset stay aside"
    what = f"tested on {len(held)} of {len(train)} training images{groups}{aside}"
    log.info("data.folds: fold %d of %d is %s", fold, folds, what)
    return replace(splits, train=left, test=held)


def _folds(train: Split, folds: int) -> list[np.ndarray]:
    """Returns the numbers of each fold's images: equal shares of each class, whole groups where there are some."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if train.groups is None else StratifiedGroupKFold
    dealt = kind(folds, shuffle=True, random_state=derive(0, "folds") % 2**32)
    return [held for _, held in dealt.split(train.labels, train.labels, train.groups)]


def _share(fraction: float, n: int) -> int:
    return int(fraction * n + 0.5)


def _by_class(split: Split) -> list[np.ndarray]:
    order = np.argsort(split.labels, kind="stable")
    ends = np.cumsum(np.bincount(split.labels, minlength=len(split.classes)))
    return np.split(order, ends[:-1])


def _draw(groups: Sequence[np.ndarray], counts: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    drawn = [rng.permutation(group)[:count] for group, count in zip(groups, counts, strict=True)]
    return np.sort(np.concatenate(drawn))
