"""A step of ``idmm train``: labels for images that have none, from a few that have and the features of runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from idmm.config import Data
from idmm.config.commands import TrainCommand
from idmm.data.listing import list_images
from idmm.data.split import Split, counted
from idmm.data.user_lists import class_rows
from idmm.evaluation.evaluate import choose_strength, fit_linear, folds
from idmm.evaluation.inputs import report_unreadable
from idmm.evaluation.predictor import Embedder
from idmm.evaluation.similarity import nearest, spread_labels, unit_rows
from idmm.files import write_csv
from idmm.models import create_backbone
from idmm.models.hog import SIDE
from idmm.progress import log
from idmm.stages.train_plan import BASELINE, HAND_MADE, LINEAR, PRETRAINED, tuned_on

AGREEMENT = 70  # percent: see pseudolabel; under it pseudo-labels did harm (benchmarks/results/minutes.md)
NEIGHBOURS = 10  # nearest images that each image is joined to


def pseudolabel(runs: list[str], data: Data, device: str, out: Path) -> dict:
    """Write ``out``, a CSV file with a class for each image, and log how often neighbouring images agree on it.

    Args:
        runs: Whose features say which images are near, each counting the same.
        data: The images, some of which have a label.
        device: Where the networks run.
        out: Its columns are path, class, split, given and share; share: how sure a label is, from 0 to 1.

    Returns:
        ``given``: images that had a label; ``found``: that got one (a label may reach some of them only); ``alike``:
        percent of images' nearest to which a linear classifier gives their own class, counted so that chance is 0.

    Raises:
        UserError: None of the images can be read.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    splits = list_images(data, labelled=True, unlabelled=True)
    embedders = [Embedder(run, device=device, max_pixels=data.max_pixels) for run in runs]
    found = embedders[0].embed(splits.train.items, on_error="skip", progress=True)
    report_unreadable(found.unreadable, len(splits.train), "data.root")
    train = splits.train.take([i for i, path in enumerate(splits.train.items) if path not in found.unreadable])
    known = train.labels >= 0
    features = [found.features, *(more.embed(train.items, progress=True).features for more in embedders[1:])]
    rows = np.concatenate([unit_rows(each) for each in features], axis=1)  # [N, sum of d]: all count alike
    shares, alike = _spread(rows, train)
    held_out = _held_out_accuracy(unit_rows(features[0]), train)  # of features that saw no label
    labels = np.where(shares.any(axis=1), shares.argmax(axis=1), -1)
    labels[known] = train.labels[known]  # those that were given have them still

    def how(part: str, i: int) -> tuple:
        return ("yes", 1) if part != "train" or known[i] else ("no", f"{shares[i].max():.4g}")

    write_csv(out, class_rows(splits.parts | {"train": replace(train, labels=labels)}, ("given", "share"), how))
    about = {"given": int(known.sum()), "found": int((labels[~known] >= 0).sum()), "alike": alike, "held_out": held_out}
    images = counted(about["found"], "image")
    log.info("%s: %s without a label got one, from %d that had one", out, images, about["given"])
    line = f"neighbouring images agree on the class in {alike:.0f} % of cases, corrected for chance"
    if alike < AGREEMENT:
        log.warning("the pseudo-labels are not used: %s, less than %d", line, AGREEMENT)
    else:
        log.info("the pseudo-labels are used, though some are wrong: %s", line)
    return about


def compared_features(run: str, data: Data, given: TrainCommand) -> dict[str, float]:
    """Return the accuracy of linear classifiers on frozen features of the labelled images (percent).

    It is that of the best strength on stratified folds, for each of three kinds of features.

    Args:
        run: The pretrained network.
        data: The images, some of which have a label.
        given: Has device, size and seed.
    """
    labelled = list_images(tuned_on(data), labelled=True).train
    embedder = Embedder(run, device=given.device, max_pixels=data.max_pixels)
    pretrained = embedder.embed(labelled.items, on_error="skip")
    labels = labelled.labels[[path not in pretrained.unreadable for path in labelled.items]]
    network = replace(embedder.network, size=given.size or SIDE, crop_pct=1.0, device="cpu")
    batches = network.file_batches(pretrained.paths, pretrained.paths, data.max_pixels, {})
    images = torch.cat([batch["images"] for batch in batches])  # [N, C, S, S]
    features = {PRETRAINED: pretrained.features}
    for label, name in ((BASELINE, "hog"), (LINEAR, HAND_MADE["name"])):
        model = create_backbone(name, in_chans=images.shape[1], num_classes=0).eval()
        model.set_statistics(network.mean, network.std)
        if name == HAND_MADE["name"]:
            model.learn_start([{"images": images}], given.seed)
        with torch.inference_mode():
            features[label] = torch.cat([model(part)[:, : model.fixed] for part in images.split(64)]).numpy()
    choices = {label: choose_strength(rows, labels, given.seed) for label, rows in features.items()}
    return {label: max(choice.accuracies.values(), default=0.0) for label, choice in choices.items()}


def _held_out_accuracy(rows: np.ndarray, train: Split) -> float:
    """Return the accuracy of spread labels on given labels that were held out in turn, by features [N, d] (percent)."""
    known, near = np.flatnonzero(train.labels >= 0), nearest(rows, NEIGHBOURS)
    fold, right = folds(train.labels[known]), 0
    for number in range(fold.max() + 1):
        held = known[fold == number]
        labels = train.labels.copy()
        labels[held] = -1
        right += int((spread_labels(near, labels, len(train.classes))[held].argmax(1) == train.labels[held]).sum())
    return 100 * right / len(known)


def _spread(rows: np.ndarray, train: Split) -> tuple[np.ndarray, float]:
    """Return each image's shares of the classes [N, K] by its features [N, d], and ``alike`` as above."""
    labels, classes = train.labels, len(train.classes)
    near, known = nearest(rows, NEIGHBOURS), labels >= 0
    shares = spread_labels(near, labels, classes)
    strength = choose_strength(rows[known], labels[known]).strength
    weight, bias = fit_linear(rows[known], labels[known], classes, strength)
    named = (rows @ weight.T + bias).argmax(axis=1)
    few = near.index[:, : max(1, len(labels) // (2 * classes))]  # else the classes are too small for so many
    share = np.bincount(named) / len(named)  # of each class
    chance = share @ share
    return shares, 100 * float((np.mean(named[few] == named[:, None]) - chance) / max(1 - chance, 1e-9))
