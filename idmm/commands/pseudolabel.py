"""``idmm pseudolabel``: labels for images that have none, from a few that have and the features of a run."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from idmm.commands.inputs import network_options, say_unreadable
from idmm.config.usage import PseudolabelConfig
from idmm.data.datasets import open_splits
from idmm.data.registry import resolve_name
from idmm.data.split import Split, Splits, counted
from idmm.errors import UserError, checked
from idmm.files import out_file, weights_file, write_csv
from idmm.progress import log

ALIKE = 66  # percent: see Labelled.alike; under it pseudo-labels did harm (docs/minutes.md)
COLUMNS = ("path", "class", "split", "given", "share")


@dataclass(frozen=True)
class Labelled:
    """What became of the images without labels."""

    given: int  # images that had a label
    found: int  # that got one
    left: int  # that got none: no label reaches them
    alike: float  # percent of images' nearest that a linear classifier on the features gives their own class


def pseudolabel(given: PseudolabelConfig) -> dict:
    """Writes ``given.out``, a class for each image, and says how far the images' neighbours bear it out.

    Returns:
        What :class:`Labelled` holds.

    Raises:
        UserError: No such run or folder, no images without labels, labels of one class alone, or ``out`` cannot be
            written.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    _, out, splits = checked(
        lambda: weights_file(given.init, "init", "backbone"),
        lambda: out_file(given.out, (".csv",)),
        lambda: _splits(given),
    )
    from idmm.inference import Embedder  # torch takes seconds, a mistake is told at once

    found = Embedder(given.init, **network_options(given)).embed(splits.train.items, on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(splits.train))
    train = splits.train.take([i for i, path in enumerate(splits.train.items) if path not in found.unreadable])
    shares, about = _spread(found.features, train, given.neighbours)
    write_csv(out, [COLUMNS, *_rows(train, shares), *_held_out(splits)])
    none = f"; {about.left} more lie where no label reaches" if about.left else ""
    images = counted(about.found, "image")
    log.info("%s: %s without a label got one, from %d that had one%s", out, images, about.given, none)
    line = f"a linear classifier on the features gives {about.alike:.0f} % of the nearest images the class of the image"
    if about.alike < ALIKE:
        log.warning(
            "init: its features hardly tell the classes apart, do not rely on the labels: %s, under %d", line, ALIKE
        )
    else:
        log.info("%s, %d or more are wanted", line, ALIKE)
    return asdict(about)


def _splits(given: PseudolabelConfig) -> Splits:
    """Lists the images, those without labels among the ones to train on."""
    name = resolve_name(given.data)[0].name
    if name != "folder":
        raise UserError(f"data.name: {name} has labels of its own; wanted a folder of images, --data.root")
    splits = open_splits(given.data, labelled=True, evaluated=False, unlabelled=True)
    labels = splits.train.labels
    if (labels >= 0).all():
        wanted = "wanted some in ROOT/unlabelled, without a row in --data.labels, or beyond those of --data.labelled"
        raise UserError(f"data.root: each training image of '{given.data.root}' has a label; {wanted}")
    if len(seen := np.unique(labels[labels >= 0])) < 2:
        raise UserError(f"data.root: all labels are of class '{splits.train.classes[seen[0]]}'; wanted two or more")
    return splits


def _spread(features: np.ndarray, train: Split, neighbours: int) -> tuple[np.ndarray, Labelled]:
    """Returns each image's shares of the classes [N, K], and what that comes to."""
    from idmm.evaluate import choose_strength, fit_linear
    from idmm.similarity import nearest, spread_labels, unit_rows

    labels, classes = train.labels, len(train.classes)
    near, known = nearest(unit_rows(features), neighbours), labels >= 0
    shares = spread_labels(near, labels, classes)
    strength = choose_strength(features[known], labels[known]).strength
    weight, bias = fit_linear(features[known], labels[known], classes, strength)
    named = (features @ weight.T + bias).argmax(axis=1)
    alike = 100 * float((named[near.index] == named[:, None]).mean())
    found = int((shares[~known].sum(axis=1) > 0).sum())
    return shares, Labelled(int(known.sum()), found, int((~known).sum()) - found, alike)


def _rows(train: Split, shares: np.ndarray) -> Iterator[tuple]:
    """A row for each training image that has a label, or got one."""
    for name, label, own in zip(train.names, train.labels, shares, strict=True):
        if label >= 0:
            yield name, train.classes[label], "train", "yes", 1
        elif own.any():
            yield name, train.classes[own.argmax()], "train", "no", f"{own.max():.4g}"


def _held_out(splits: Splits) -> Iterator[tuple]:
    """A row for each image to evaluate on, whose labels are its own."""
    for part in ("val", "test"):
        if (held := splits.parts.get(part)) is not None:
            yield from (
                (name, held.classes[c], part, "yes", 1) for name, c in zip(held.names, held.labels, strict=True)
            )
