"""A step of ``idmm train``: a trial of a network against the linear classifier."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from idmm import distributed
from idmm.auto.configs import MANY_LABELS
from idmm.auto.features import Features
from idmm.auto.linear import correct, fit_head
from idmm.auto.plan import ENOUGH, TRIAL, TRIAL_SHARE, Classifier, TrainState
from idmm.config.commands import TrainCommand
from idmm.data.split import Listing
from idmm.data.stratify import Fold, stratified_folds, units_of
from idmm.data.user_lists import class_rows
from idmm.evaluation import Integers
from idmm.evaluation.evaluate import FEW, LinearHead
from idmm.files import Json, write_csv
from idmm.progress import log
from idmm.report.stats import read_answers
from idmm.text import counted
from idmm.training import clock
from idmm.training.log import details_in_file

RunStep = Callable[[TrainCommand, TrainState, str, float, LinearHead | None], Json]


def choose_classifier(
    command: TrainCommand,
    state: TrainState,
    features: Features | None,
    remaining: float,
    run_step: RunStep,
) -> float:
    """Set ``state.best``, and ``candidates`` if there is a trial. Return the minutes that it took.

    The network is kept if it leads the linear classifier by more than one standard error of the
    difference, on the same held-out images. Of a dataset of ``data.name`` it is kept if there are
    many labels.

    Args:
        command, state: Of ``idmm train``.
        features: Of the training images. None: in another process than the first.
        remaining: Minutes that are left.
        run_step: Runs a step, see :mod:`idmm.auto.train`.
    """
    reason = distributed.broadcast(_hindrance(command, state, (1 - TRIAL_SHARE) * remaining))
    if reason:
        log.info("no network is trained: %s", reason)
        state.best = Classifier.LINEAR
        return 0.0
    if _is_named(command):
        log.info("the network is trained without a trial, as the classes have many labels")
        state.best = Classifier.NETWORK
        return 0.0
    folds = distributed.broadcast(_folds(features))
    if not folds:
        log.info("no network is trained: the labelled images cannot be divided for a trial")
        state.best = Classifier.LINEAR
        return 0.0
    minutes = TRIAL_SHARE * remaining / len(folds)
    linear: list[bool] = []
    network: list[bool] = []
    units: list[int] = []
    spent = 0.0
    for number, fold in enumerate(folds, start=1):
        head = None
        started_at = clock.now()
        step = f"{TRIAL}/{number}"
        if features is not None:
            listing, head = _without(features, fold, command.seed)
            write_csv(Path(command.out) / f"{step}.csv", class_rows(listing.parts))
            given = features.labelled()
            linear += correct(head, given.take(fold.held_out)).tolist()
            every_unit = units_of(given.train.known_labels, given.train.groups)
            units += every_unit[fold.held_out].tolist()
        spent += (clock.now() - started_at) / 60
        result = run_step(command, state, step, minutes, head)
        spent += result["seconds"] / 60
        if features is not None:
            network += _answers(Path(command.out) / step, listing)
    state.candidates, state.best = distributed.broadcast(_judged(linear, network, units))
    return spent


def _hindrance(command: TrainCommand, state: TrainState, minutes: float) -> str:
    """Return why no network is tried. '' if one is."""
    counts = state.counts
    if counts.labelled < FEW * counts.classes:  # the held-out ones would be too few to choose by
        return f"there are fewer than {FEW} labels per class"
    if _is_named(command) and counts.labelled < MANY_LABELS * counts.classes:
        return "a trial needs a folder of your own images"
    if not state.plan.network_fits(counts.labelled, minutes):
        return "there is too little time. Try more --minutes"
    return ""


def _is_named(command: TrainCommand) -> bool:
    """Return whether the images are a dataset's, whose parts cannot be listed anew for a trial."""
    return command.data.name not in (None, "folder")


def _folds(features: Features | None) -> list[Fold]:
    """Return folds of the labelled images, as many as hold out enough of them.

    There are none if a fold would take all images of a class.
    """
    if features is None:
        return []
    train = features.labelled().train
    labels = train.known_labels
    present = set(labels.tolist())
    chosen: list[Fold] = []
    held_out = 0
    for fold in stratified_folds(labels, train.groups, classes=train.class_names):
        if set(labels[fold.train].tolist()) != present:
            return []
        if held_out < ENOUGH:
            chosen.append(fold)
            held_out += len(fold.held_out)
    return chosen


def _without(features: Features, fold: Fold, seed: int) -> tuple[Listing, LinearHead]:
    """Return the labelled images with those held out as ``test``, and a classifier without them.

    Images without a label stay. Held-out images, and others of their groups, are none of these.
    """
    labels = features.train.known_labels
    given = np.flatnonzero(labels >= 0)
    used = np.flatnonzero(labels < 0)
    groups = features.train.groups
    if groups is not None:
        used = used[~np.isin(groups[used], groups[given[fold.held_out]])]
    numbers: Integers = np.sort(np.concatenate([given[fold.train], used]))
    with details_in_file():
        head = fit_head(features.take(numbers), seed)
    labelled = features.train.take(given)
    return Listing(labelled.take(fold.train), test=labelled.take(fold.held_out)), head


def _answers(run: Path, listing: Listing) -> list[bool]:
    """Return which test images a run got right, in the order of the listing."""
    test = listing.test
    assert test is not None
    correct_by_image = read_answers(run).correct
    names = [test.class_names[label] for label in test.known_labels]
    return [correct_by_image[image] for image in zip(test.names, names, strict=True)]


def _judged(
    linear: list[bool], network: list[bool], units: list[int]
) -> tuple[dict[Classifier, float], Classifier] | None:
    """Return the accuracy of both (percent), and which is kept. None: in another process.

    Args:
        linear, network: Whether each held-out image is right.
        units: Number of each image's group, its own without groups. Images of a group answer alike.
    """
    if not linear:
        return None
    gains = np.array(network, dtype=int) - np.array(linear, dtype=int)  # 1, 0 or -1
    lead = int(gains.sum())
    error = float(np.sqrt(np.square(np.bincount(units, weights=gains)).sum()))
    log.info(
        "trial on %s: the linear classifier is right on %d, the network on %d. The standard error "
        "of the difference is %.1f",
        counted(len(gains), "held-out image"),
        sum(linear),
        sum(network),
        error,
    )
    candidates = {
        Classifier.LINEAR: 100 * float(np.mean(linear)),
        Classifier.NETWORK: 100 * float(np.mean(network)),
    }
    return candidates, Classifier.NETWORK if lead > error else Classifier.LINEAR
