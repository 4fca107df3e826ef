"""A step of ``idmm train``: joined features, and labels for images that have none by them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from idmm.auto.plan import FEATURES, HOG_CONV, PSEUDOLABELS, Kept, Plan, PseudoLabels
from idmm.config import Data
from idmm.data.listing import list_images
from idmm.data.user_lists import class_rows
from idmm.evaluation import baseline
from idmm.evaluation.evaluate import choose_strength, fit_linear
from idmm.evaluation.inputs import report_unreadable
from idmm.evaluation.network import Network, pooled
from idmm.evaluation.predictor import BATCH
from idmm.evaluation.similarity import Neighbours, nearest, spread_labels, unit_rows
from idmm.files import write_csv
from idmm.models import create_backbone
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
        items: Training images to find dictionary and components by, with labels or without.
        device: Device of the networks.
        seed: Of what ``hog_conv`` draws.

    Raises:
        UserError: None of the images can be read.
        RunError: Memory ran out.
    """

    def __init__(self, source: str, plan: Plan, items: Sequence, device: str, seed: int):
        self.saved = read_checkpoint(source, "init")
        if self.saved.name is None:
            self.saved = replace(self.saved, name=plan.model["name"], kwargs=plan.model["kwargs"])
        pixels = Network.from_checkpoint(self.saved, 0, device, BATCH)
        kwargs = {
            key: value
            for key, value in self.saved.kwargs.items()
            if key not in ("num_classes", "in_chans")
        }
        self.plan = plan
        self.frozen = {"name": self.saved.name, "kwargs": kwargs, "size": pixels.size}
        with seeded(derive(seed, "model")):
            model = create_backbone(
                HOG_CONV, in_chans=self.saved.in_chans, frozen=self.frozen
            ).eval()
        model.frozen.network.load_state_dict(pixels.model.state_dict())
        model.set_statistics(pixels.mean, pixels.std)
        self.network = replace(
            pixels, model=model, size=max(plan.hand_size, plan.size), crop_pct=1.0
        )
        some = [items[i] for i in numpy_rng(seed, "features").permutation(len(items))[:IMAGES]]
        unreadable = {}
        batches = list(self.network.file_batches(some, some, unreadable))
        report_unreadable(unreadable, len(some), "data.root")
        model.frozen.to(pixels.device)
        model.learn_start(batches, seed)
        model.to(pixels.device)

    def save(self, out: Path, best: Kept) -> None:
        """Write ``hog_conv``, weights and JSON, to a folder.

        For the given labels its ConvNet, if ``best`` has one, starts from the weights of the
        pretrained network. For pseudo-labels it has fresh ones, which learn more from them than the
        weights that found them.
        """
        model = self.network.model
        saved = self.saved
        kwargs = {"frozen": self.frozen, "learned": CONVNET | {"size": self.plan.size}}
        if best == Kept.JOINED_LINEAR:
            model.learned, kwargs["learned"] = None, {}
        elif best == Kept.JOINED:
            kwargs |= {"learned": CONVNET | {"size": self.plan.label_size}, "say": SAY}
            state = model.frozen.network.state_dict()
            model.learned.network.load_state_dict(state, strict=False)  # all but BN's counts
        kwargs = export_kwargs(HOG_CONV, kwargs, None, saved.in_chans)
        extra = {
            key: saved.extra[key]
            for key in ("range", "bands", "file_channels")
            if key in saved.extra
        }
        about = dict(
            mean=saved.mean, std=saved.std, size=self.network.size, crop_pct=1.0, extra=extra
        )
        save_model(out, "backbone", model.state_dict(), name=HOG_CONV, kwargs=kwargs, **about)


def _hand_made_and_joined(model: HogConv, images: Tensor) -> Tensor:
    return torch.cat([Hog.forward_features(model, images), model(images)[:, : model.fixed]], dim=1)


def pseudolabel(
    source: str, teacher: str | None, plan: Plan, data: Data, device: str, seed: int, out: Path
) -> tuple[PseudoLabels, dict[Kept, float]]:
    """Write OUT/pseudolabels.csv, a file with a class for each image, and the joined features if
    the plan has them.

    The columns of the file are path, class, split, given and share. A share is how sure a label is,
    from 0 to 1. ``teacher`` is the run of a network that learned from the given labels only. If its
    predictions agree on similar images, its features join the others in the graph. ``data`` is the
    images, some of which have a label. Other arguments and errors are those of
    :class:`JoinedFeatures`.

    Returns:
        What is known of the labels, and the accuracy of linear classifiers on stratified folds of
        the given labels (percent).
    """
    splits = list_images(data, labelled=True, unlabelled=True)
    features = JoinedFeatures(source, plan, splits.train.items, device, seed)
    train, rows = features.network.readable(splits.train, _hand_made_and_joined, "taking features")
    is_given = train.labels >= 0
    count = features.network.model.hand_made
    classes = len(train.classes)
    given_labels = train.labels[is_given]
    hand_made = rows[is_given, :count]
    joined = rows[:, count:]
    groups = train.groups
    given_groups = None if groups is None else groups[is_given]
    choices = {
        Kept.BASELINE: choose_strength(hand_made, given_labels, seed, groups=given_groups),
        Kept.JOINED_LINEAR: choose_strength(
            joined[is_given], given_labels, seed, groups=given_groups, classes=train.classes
        ),
    }
    candidates = {
        label: each.accuracies[each.strength] for label, each in choices.items() if each.accuracies
    }
    graph = nearest(unit_rows(joined), NEIGHBOURS)
    if groups is None:
        apart = graph
    else:
        apart = nearest(unit_rows(joined), NEIGHBOURS, groups)
    weight, bias = fit_linear(
        joined[is_given], given_labels, classes, choices[Kept.JOINED_LINEAR].strength
    )
    agreement = _agreement(apart, (joined @ weight.T + bias).argmax(axis=1), classes)
    teacher_agreement = None
    if teacher is not None and agreement >= AGREEMENT:
        learned, predicted = _learned_by(teacher, train.items, classes, device)
        teacher_agreement = _agreement(apart, predicted, classes)
        if teacher_agreement >= agreement - TEACHER_BEHIND:
            graph = nearest(
                unit_rows(np.concatenate([_weighed(joined), _weighed(learned)], axis=1)), NEIGHBOURS
            )
    label_shares = spread_labels(graph, train.labels, classes)
    labels = np.where(label_shares.any(axis=1), label_shares.argmax(axis=1), -1)
    labels[is_given] = given_labels

    header, *table = class_rows(splits.parts | {"train": replace(train, labels=labels)})
    guessed = {
        train.names[i]: ("no", f"{label_shares[i].max():.4g}") for i in np.flatnonzero(~is_given)
    }
    table = [(*row, *guessed.get(row[0], ("yes", 1))) for row in table]
    write_csv(out / PSEUDOLABELS, [(*header, "given", "share"), *table])
    if plan.joined:
        features.save(out / FEATURES, joined_by(agreement))
    given = int(is_given.sum())
    added = int((labels[~is_given] >= 0).sum())
    images = counted(added, "image")
    log.info(
        "%s: %s without a label got a guessed one, from %d that had one",
        out / PSEUDOLABELS,
        images,
        given,
    )
    line = f"similar images agree on the class in {agreement:.0f} % of cases, corrected for chance"
    baseline_top1 = None
    if agreement < AGREEMENT:
        log.info("the pseudo-labels are not used: %s, less than %d", line, AGREEMENT)
    else:
        log.info("the pseudo-labels are good enough, though some are wrong: %s", line)
        started_at = time.monotonic()
        test, test_rows = features.network.readable(
            splits.test, Hog.forward_features, "features of test"
        )
        baseline_top1 = baseline.measure(
            hand_made, given_labels, test_rows, test.labels, started_at, given_groups
        )
    return PseudoLabels(given, added, agreement, baseline_top1, teacher_agreement), candidates


def _learned_by(
    teacher: str, items: Sequence, classes: int, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return features [N, d] of images by the network of a run, and the classes that it predicts
    [N]."""
    network = Network.from_checkpoint(
        read_checkpoint(teacher, "init", "model"), classes, device, BATCH
    )

    def features_and_logits(model: nn.Module, images: Tensor) -> Tensor:
        return torch.cat([pooled(model, images), model(images)], dim=1)

    rows = network.outputs(network.file_batches(items, items, {}), features_and_logits)
    return rows[:, :-classes], rows[:, -classes:].argmax(axis=1)


def _weighed(rows: np.ndarray) -> np.ndarray:
    """Return features [N, d] centred, and scaled so that groups of any length weigh the same."""
    centred = rows - rows.mean(axis=0)
    return centred / max(1e-9, float(np.linalg.norm(centred)))


def joined_by(agreement: float) -> Kept:
    """Return what learns next to joined features, by the agreement of similar images (percent)."""
    if agreement >= AGREEMENT:
        return Kept.JOINED_PSEUDO
    if agreement >= ALONE:
        return Kept.JOINED_LINEAR
    return Kept.JOINED


def _agreement(near: Neighbours, predicted: np.ndarray, classes: int) -> float:
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
