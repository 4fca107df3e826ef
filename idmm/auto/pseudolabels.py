"""A step of ``idmm train``: joined features, and labels for images that have none by them."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from idmm.auto.plan import FEATURES, HOG_CONV, PSEUDOLABELS, Classifier, Plan, PseudoLabels
from idmm.config.commands import TrainCommand
from idmm.data.image_store import choose_crop_mode
from idmm.data.split import Listing, Split
from idmm.data.user_lists import class_rows
from idmm.evaluation import Floats, Integers, baseline
from idmm.evaluation.evaluate import choose_strength, fit_linear
from idmm.evaluation.inputs import report_unreadable
from idmm.evaluation.network import Network, pooled
from idmm.evaluation.predictor import BATCH
from idmm.evaluation.similarity import Neighbours, nearest, spread_labels, unit_rows
from idmm.files import Json, write_csv
from idmm.models import create_backbone
from idmm.models.base import Backbone
from idmm.models.build import export_kwargs
from idmm.models.hog import Hog
from idmm.models.hog_conv import CONVNET, IMAGES, HogConv
from idmm.models.weights import read_checkpoint, save_model
from idmm.progress import log
from idmm.seeding import derive, numpy_rng, seeded
from idmm.text import counted

# percent, see PseudoLabels. With less, pseudo-labels did harm (benchmarks/results/minutes.md)
AGREEMENT = 70
# of the ConvNet that learns from few labels, see HogConv (benchmarks/results/minutes.md)
SAY = 0.25
# points that the agreement of the teacher's predictions may be behind (the same record)
TEACHER_BEHIND = 5
ALONE = 55  # percent of agreement from which on that ConvNet did harm (the same record)
NEIGHBOURS = 10  # nearest images that each image is joined to


class JoinedFeatures:
    """The features of a network on pixels, joined with hand-made ones in ``hog_conv``.

    Args:
        source: The network's run, file or public weights.
        plan: Its model if the file does not name it, and the size of images on hand-made features.
        command: Its seed is that of what ``hog_conv`` draws.
    """

    def __init__(self, source: str, plan: Plan, command: TrainCommand):
        saved = read_checkpoint(source, "init")
        if saved.name is None:
            saved = replace(saved, name=plan.model["name"], kwargs=plan.model["kwargs"])
        pixels = Network.from_checkpoint(saved, 0, command.device, BATCH)
        kwargs = saved.kwargs | {}
        kwargs.pop("num_classes", None)
        kwargs.pop("in_chans", None)
        self.saved = saved
        self.plan = plan
        self.seed = command.seed
        self.frozen_kwargs = {"name": saved.name, "kwargs": kwargs, "size": pixels.size}
        with seeded(derive(self.seed, "model")):
            model = create_backbone(HOG_CONV, in_chans=saved.in_chans, frozen=self.frozen_kwargs)
        self.model = cast(HogConv, model.eval())
        self.frozen.load_state_dict(pixels.model.state_dict())
        self.model.set_statistics(pixels.mean, pixels.std)
        size = max(plan.hand_size, plan.size)
        self.network = replace(pixels, model=self.model, size=size, crop_pct=1.0)

    @property
    def frozen(self) -> Backbone:
        """The network on pixels."""
        assert self.model.frozen is not None
        return self.model.frozen.network

    def start(self, train: Split) -> None:
        """Find dictionary and components by training images, with labels or without.

        Raises:
            UserError: None of the images can be read.
            RunError: Memory ran out.
        """
        self.network = replace(self.network, crop_mode=choose_crop_mode(train))
        some = train.take(numpy_rng(self.seed, "features").permutation(len(train))[:IMAGES])
        unreadable: dict[str, str] = {}
        batches = list(self.network.file_batches(some.items, some.places, unreadable))
        report_unreadable(unreadable, len(some), "data.root")
        self.frozen.to(self.network.device)
        self.model.learn_start(batches, self.seed)
        self.model.to(self.network.device)

    def of(self, train: Split) -> "Features":
        """Return the readable images with their features."""

        def forward(model: HogConv, images: Tensor) -> Tensor:
            joined = model(images)[:, : model.fixed]
            return torch.cat([Hog.forward_features(model, images), joined], dim=1)

        readable, rows = self.network.readable(train, forward, "taking features")
        width = self.model.hand_made
        return Features(readable, rows[:, :width], rows[:, width:])

    def save(self, out: Path, best: Classifier) -> None:
        """Write ``hog_conv``, weights and JSON, to a folder.

        For the given labels its ConvNet, if ``best`` has one, starts from the weights of the
        pretrained network. For pseudo-labels it has fresh ones, which learn more from them than the
        weights that found them.
        """
        model = self.model
        saved = self.saved
        kwargs: Json = {"frozen": self.frozen_kwargs, "learned": CONVNET | {"size": self.plan.size}}
        if best == Classifier.JOINED_LINEAR:
            model.learned = None
            kwargs["learned"] = {}
        elif best == Classifier.JOINED:
            kwargs |= {"learned": CONVNET | {"size": self.plan.label_size}, "say": SAY}
            assert model.learned is not None
            # all but BN's counts
            model.learned.network.load_state_dict(self.frozen.state_dict(), strict=False)
        extra = {}
        for key in ("range", "bands", "file_channels"):
            if key in saved.extra:
                extra[key] = saved.extra[key]
        save_model(
            out,
            "backbone",
            model.state_dict(),
            name=HOG_CONV,
            kwargs=export_kwargs(HOG_CONV, kwargs, None, saved.in_chans),
            mean=saved.mean,
            std=saved.std,
            size=self.network.size,
            crop_pct=1.0,
            crop_mode=self.network.crop_mode,
            extra=extra,
        )


@dataclass(frozen=True)
class Features:
    """Training images with their features."""

    train: Split
    hand_made: Floats  # [N, h]
    joined: Floats  # [N, d]

    def labelled(self) -> "Features":
        """Return the images that have a label."""
        numbers = np.flatnonzero(self.train.known_labels >= 0)
        return Features(self.train.take(numbers), self.hand_made[numbers], self.joined[numbers])


def pseudolabel(
    source: str, teacher: str | None, plan: Plan, splits: Listing, command: TrainCommand
) -> tuple[PseudoLabels, dict[Classifier, float]]:
    """Write OUT/pseudolabels.csv, and the joined features if the plan has them.

    The file has a class for each image. Its columns are path, class, split, given and share. A
    share is how sure a label is, from 0 to 1.

    Args:
        source: As for :class:`JoinedFeatures`. Errors are those of its ``start``.
        teacher: The run of a network that learned from the given labels only. If its predictions
            agree on similar images, its features join the others in the graph.
        plan: As for :class:`JoinedFeatures`.
        splits: Images, some of which have a label.
        command: Its folder, device and seed are used.

    Returns:
        What is known of the labels, and the accuracy of linear classifiers on stratified folds of
        the given labels (percent).
    """
    out = Path(command.out)
    network = JoinedFeatures(source, plan, command)
    network.start(splits.train)
    features = network.of(splits.train)
    train = features.train
    given = features.labelled()
    strength, candidates = compare_linear(given, command.seed)
    weight, bias = fit_linear(
        given.joined, given.train.known_labels, len(train.class_names), strength
    )
    predicted = (features.joined @ weight.T + bias).argmax(axis=1)
    rows = unit_rows(features.joined)
    graph = nearest(rows, NEIGHBOURS)
    apart = nearest(rows, NEIGHBOURS, train.groups)
    agreement = _agreement(apart, predicted, len(train.class_names))
    teacher_agreement = None
    if teacher is not None and agreement >= AGREEMENT:
        learned, predicted = _learned_by(teacher, train, command.device)
        teacher_agreement = _agreement(apart, predicted, len(train.class_names))
        if teacher_agreement >= agreement - TEACHER_BEHIND:
            both = np.concatenate([_weighed(features.joined), _weighed(learned)], axis=1)
            graph = nearest(unit_rows(both), NEIGHBOURS)
    added = write_labels(out / PSEUDOLABELS, splits, train, graph)
    if plan.joined:
        network.save(out / FEATURES, joined_by(agreement))
    baseline_top1 = None
    if agreement < AGREEMENT:
        log.info(
            "the pseudo-labels are not used: similar images agree on the class in %.0f %% of "
            "cases, corrected for chance, less than %d",
            agreement,
            AGREEMENT,
        )
    else:
        log.info(
            "the pseudo-labels are good enough, though some are wrong: similar images agree on the "
            "class in %.0f %% of cases, corrected for chance",
            agreement,
        )
        baseline_top1 = measure_baseline(network.network, given, splits)
    labels = PseudoLabels(len(given.train), added, agreement, baseline_top1, teacher_agreement)
    return labels, candidates


def compare_linear(given: Features, seed: int) -> tuple[float, dict[Classifier, float]]:
    """Choose the strength of linear classifiers on stratified folds of the given labels.

    Returns:
        That on joined features, and the accuracy of each (percent) if there is a fold.
    """
    train = given.train
    labels = train.known_labels
    by_hand = choose_strength(given.hand_made, labels, seed, groups=train.groups, one_scale=True)
    joined = choose_strength(given.joined, labels, seed, groups=train.groups, classes=train.classes)
    candidates = {}
    for label, choice in ((Classifier.BASELINE, by_hand), (Classifier.JOINED_LINEAR, joined)):
        if choice.accuracies:
            candidates[label] = choice.accuracies[choice.strength]
    return joined.strength, candidates


def write_labels(file: Path, splits: Listing, train: Split, graph: Neighbours) -> int:
    """Guess labels along the graph, and write them next to those given. Return their number."""
    given = train.known_labels
    shares = spread_labels(graph, given, len(train.class_names))  # [N, K]
    guessed = np.where(shares.any(axis=1), shares.argmax(axis=1), -1)
    labels = np.where(given < 0, guessed, given)
    sure = {}
    for i in np.flatnonzero(given < 0):
        sure[train.names[i]] = ("no", f"{shares[i].max():.4g}")
    header, *rows = class_rows(splits.parts | {"train": replace(train, labels=labels)})
    table = [(*header, "given", "share")]
    for row in rows:
        table.append((*row, *sure.get(row[0], ("yes", "1"))))
    write_csv(file, table)
    added = int((labels >= 0).sum()) - len(given) + len(sure)
    log.info(
        "%s: %s without a label got a guessed one, from %d that had one",
        file,
        counted(added, "image"),
        len(given) - len(sure),
    )
    return added


def measure_baseline(network: Network, given: Features, splits: Listing) -> float:
    """Return the accuracy of the baseline of the given labels on the test images (percent)."""
    started_at = time.monotonic()
    assert splits.test is not None  # the images were listed for tests
    test, rows = network.readable(splits.test, Hog.forward_features, "features of test")
    train = given.train
    return baseline.measure(
        given.hand_made, train.known_labels, rows, test.known_labels, started_at, train.groups
    )


def _learned_by(teacher: str, train: Split, device: str) -> tuple[Floats, Integers]:
    """Return features [N, d] of images by a run's network, and the classes [N] that it predicts."""
    saved = read_checkpoint(teacher, "init", "model")
    classes = len(train.class_names)
    network = Network.from_checkpoint(saved, classes, device, BATCH)

    def features_and_logits(model: Backbone, images: Tensor) -> Tensor:
        return torch.cat([pooled(model, images), model(images)], dim=1)

    batches = network.file_batches(train.items, train.names, {})
    rows = network.outputs(batches, features_and_logits)
    return rows[:, :-classes], rows[:, -classes:].argmax(axis=1)


def _weighed(rows: Floats) -> Floats:
    """Return features [N, d] centred, and scaled so that groups of any length weigh the same."""
    centred: Floats = rows - rows.mean(axis=0)
    return centred / max(1e-9, float(np.linalg.norm(centred)))


def joined_by(agreement: float) -> Classifier:
    """Return what learns next to joined features, by the agreement of similar images (percent)."""
    if agreement >= AGREEMENT:
        return Classifier.JOINED_PSEUDO
    if agreement >= ALONE:
        return Classifier.JOINED_LINEAR
    return Classifier.JOINED


def _agreement(near: Neighbours, predicted: Integers, classes: int) -> float:
    """Return how often images agree with their nearest of other groups on the predicted class [N].

    It is in percent, with chance at 0.
    """
    few = max(1, len(predicted) // (2 * classes))  # otherwise the classes are too small for so many
    agrees = predicted[near.index] == predicted[:, None]  # [N, k]
    counts = np.isfinite(near.value)
    counts[:, few:] = False
    share = np.bincount(predicted) / len(predicted)  # of each class
    chance = share @ share
    agreed = agrees[counts].sum() / max(1, counts.sum())
    return 100 * float((agreed - chance) / max(1 - chance, 1e-9))
