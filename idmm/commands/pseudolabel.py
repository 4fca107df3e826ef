"""``idmm pseudolabel``: labels for images that have none, from a few that have and the features of a run."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from idmm.commands.inputs import network_options, say_unreadable
from idmm.config.usage import PseudolabelConfig
from idmm.data.datasets import open_splits
from idmm.data.registry import resolve_name
from idmm.data.split import Split, Splits, counted
from idmm.data.user_lists import class_rows
from idmm.errors import UserError, checked, listed
from idmm.files import out_file, weights_file, write_csv
from idmm.progress import log

ALIKE = 60  # percent: see Labelled.alike; under it pseudo-labels did harm (benchmarks/results/few_labels.md)
DRAWN, EACH = 10, 4  # classes in the picture, images of each among the surest and the least sure
SIDE = 64  # short side of the images in it (pixels)


@dataclass(frozen=True)
class Labelled:
    """What became of the images without labels."""

    given: int  # images that had a label
    found: int  # that got one
    left: int  # that got none: no label reaches them
    alike: float  # percent of images' nearest to which a linear classifier gives their own class; chance is 0


def pseudolabel(given: PseudolabelConfig) -> dict:
    """Writes ``given.out``, a class for each image, and a picture of some beside it; says how far the images'
    neighbours bear it out.

    Returns:
        What :class:`Labelled` holds.

    Raises:
        UserError: No such run or folder, no images without labels, labels of one class alone, or ``out`` cannot be
            written.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    *_, out, splits = checked(
        *(partial(weights_file, init, "init", "backbone") for init in given.init),
        lambda: out_file(given.out, (".csv",)),
        lambda: _splits(given),
    )
    from idmm.inference import Embedder  # torch takes seconds, a mistake is told at once
    from idmm.similarity import unit_rows
    from idmm.stages.results import drawing

    embedders = [Embedder(init, **network_options(given)) for init in given.init]
    found = embedders[0].embed(splits.train.items, on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(splits.train), "data.root")
    train = splits.train.take([i for i, path in enumerate(splits.train.items) if path not in found.unreadable])
    _check_classes(train)
    features = [found.features, *(more.embed(train.items, progress=True).features for more in embedders[1:])]
    rows = np.concatenate([unit_rows(each) for each in features], axis=1)  # [N, sum of d]: all count alike
    shares, about = _spread(rows, train, given.neighbours)
    labels = np.where(shares.any(axis=1), shares.argmax(axis=1), -1)  # those that were given have them still
    labels[train.labels >= 0] = train.labels[train.labels >= 0]

    def how(part: str, i: int) -> tuple:
        return ("yes", 1) if part != "train" or train.labels[i] >= 0 else ("no", f"{shares[i].max():.4g}")

    parts = splits.parts | {"train": replace(train, labels=labels)}
    write_csv(out, class_rows(parts, ("given", "share"), how))
    with drawing(out.with_suffix(".png").name):
        _draw(out, train, shares, embedders[-1].picture)
    none = f"; {about.left} more lie where no label reaches" if about.left else ""
    images = counted(about.found, "image")
    log.info("%s: %s without a label got one, from %d that had one%s", out, images, about.given, none)
    line = f"a linear classifier gives {about.alike:.0f} % of the nearest images the class of the image (0 is chance)"
    if about.alike < ALIKE:
        log.warning("the features hardly tell the classes apart, do not rely on the labels: %s, under %d", line, ALIKE)
    else:
        said = "the labels are good enough to learn from, though some are wrong"
        log.info("%s: %s; under %d they would not be", said, line, ALIKE)
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


def _spread(rows: np.ndarray, train: Split, neighbours: int) -> tuple[np.ndarray, Labelled]:
    """Returns each image's shares of the classes [N, K] by its features [N, d], and what that comes to."""
    from idmm.evaluate import choose_strength, fit_linear
    from idmm.similarity import nearest, spread_labels

    labels, classes = train.labels, len(train.classes)
    near, known = nearest(rows, neighbours), labels >= 0
    shares = spread_labels(near, labels, classes)
    strength = choose_strength(rows[known], labels[known]).strength
    weight, bias = fit_linear(rows[known], labels[known], classes, strength)
    named = (rows @ weight.T + bias).argmax(axis=1)
    few = near.index[:, : max(1, len(labels) // (2 * classes))]  # else the classes are too small for so many
    share = np.bincount(named) / len(named)  # of each class
    chance = share @ share
    alike = 100 * float((np.mean(named[few] == named[:, None]) - chance) / max(1 - chance, 1e-9))
    found = int((shares[~known].sum(axis=1) > 0).sum())
    return shares, Labelled(int(known.sum()), found, int((~known).sum()) - found, alike)


def _draw(out: Path, train: Split, shares: np.ndarray, picture) -> None:
    """Draws of some classes an image that had its label, the surest of those that got it, and the least sure."""
    from idmm.report.sheets import Tile, caption_sheet

    def tile(i: int, said: str) -> Tile:
        return Tile(picture(train.items[i], SIDE), f"{said}\n{Path(train.names[i]).name}")

    label, sure = shares.argmax(axis=1), shares.max(axis=1)
    rows, there = [], np.unique(np.where(train.labels < 0, label, train.labels)[(train.labels >= 0) | (sure > 0)])
    for c in there[np.unique(np.linspace(0, len(there) - 1, min(DRAWN, len(there))).astype(int))]:
        got = np.flatnonzero((train.labels < 0) & (sure > 0) & (label == c))
        got = got[np.argsort(-sure[got], kind="stable")]
        parts = [[tile(i, "given") for i in np.flatnonzero(train.labels == c)[:1]]]
        parts += [[tile(i, f"{sure[i]:.2f}") for i in some] for some in (got[:EACH], got[EACH:][-EACH:])]
        rows.append((train.classes[c], [one for part in parts if part for one in (*part, None)]))  # None ends a panel
    title, note = "Labels found", "one that was given; the surest; the least sure, and how sure each is (0 to 1)"
    caption_sheet(rows, out.with_suffix(".png"), title, note)
