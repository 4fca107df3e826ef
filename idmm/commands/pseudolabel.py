"""``idmm pseudolabel``: labels for images that have none, from a few that have and the features of a run."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from idmm.commands.inputs import network_options, say_unreadable
from idmm.config.usage import PseudolabelConfig
from idmm.data.datasets import open_splits
from idmm.data.registry import resolve_name
from idmm.data.split import Split, Splits, counted
from idmm.errors import UserError, checked, listed
from idmm.files import out_file, weights_file, write_csv
from idmm.progress import log

ALIKE = 60  # percent: see Labelled.alike; under it pseudo-labels did harm (docs/LOG.md)
COLUMNS = ("path", "class", "split", "given", "share")


@dataclass(frozen=True)
class Labelled:
    """What became of the images without labels."""

    given: int  # images that had a label
    found: int  # that got one
    left: int  # that got none: no label reaches them
    alike: float  # percent of images' nearest to which a linear classifier gives their own class; chance is 0


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
    _check_classes(train)
    shares, about = _spread(found.features, train, given.neighbours)
    write_csv(out, _rows(splits, train, shares))
    none = f"; {about.left} more lie where no label reaches" if about.left else ""
    images = counted(about.found, "image")
    log.info("%s: %s without a label got one, from %d that had one%s", out, images, about.given, none)
    line = f"a linear classifier gives {about.alike:.0f} % of the nearest images the class of the image (chance: 0)"
    if about.alike < ALIKE:
        log.warning("the features hardly tell the classes apart, do not rely on the labels: %s, under %d", line, ALIKE)
    else:
        log.info("%s, %d or more are wanted", line, ALIKE)
    return asdict(about)


def _splits(given: PseudolabelConfig) -> Splits:
    """Lists the images, those without labels among the ones to train on."""
    name = resolve_name(given.data)[0].name
    if name != "folder":
        raise UserError(f"data.name: {name} has labels of its own; wanted a folder of images, --data.root")
    if given.data.folds:
        raise UserError(f"data.folds: got {given.data.folds}, but one file has the labels of one split; wanted null")
    splits = open_splits(given.data, labelled=True, unlabelled=True)
    if (splits.train.labels >= 0).all():
        wanted = "wanted some in ROOT/unlabelled, without a row in --data.labels, or beyond those of --data.labelled"
        raise UserError(f"data.root: each training image of '{given.data.root}' has a label; {wanted}")
    _check_classes(splits.train)
    return splits


def _check_classes(train: Split) -> None:
    if len(seen := np.unique(train.labels[train.labels >= 0])) < 2:
        raise UserError(
            f"data.root: all labels are of class {listed(train.classes[c] for c in seen)}; wanted two or more"
        )


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
    few = near.index[:, : max(1, len(labels) // (2 * classes))]  # else the classes are too small for so many
    share = np.bincount(named) / len(named)  # of each class
    chance = share @ share
    alike = 100 * float((np.mean(named[few] == named[:, None]) - chance) / max(1 - chance, 1e-9))
    found = int((shares[~known].sum(axis=1) > 0).sum())
    return shares, Labelled(int(known.sum()), found, int((~known).sum()) - found, alike)


def _rows(splits: Splits, train: Split, shares: np.ndarray) -> Iterator[tuple]:
    """The header, a row for each training image that has a label or got one, and those of the images to evaluate on;
    with groups where there are some, of which an image without one is its own."""
    grouped = train.groups is not None
    yield (*COLUMNS, "group") if grouped else COLUMNS
    found = [(train, "train", i, own) for i, own in enumerate(shares)]
    held = [(name, splits.parts[name]) for name in ("val", "test") if name in splits.parts]
    found += [(split, name, i, None) for name, split in held for i in range(len(split))]
    for split, part, i, own in found:
        label, how = split.labels[i], ("yes", 1)
        if label < 0:
            if not own.any():
                continue
            label, how = own.argmax(), ("no", f"{own.max():.4g}")
        row = (split.names[i], split.classes[label], part, *how)
        yield (*row, (split.groups is not None and split.groups[i]) or split.names[i]) if grouped else row
