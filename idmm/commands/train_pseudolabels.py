"""A step of ``idmm train``: labels for images that have none, from a few that have and the features of runs."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from idmm.commands.inputs import say_unreadable
from idmm.config import Data
from idmm.data.datasets import open_splits
from idmm.data.split import Split, counted
from idmm.data.user_lists import class_rows
from idmm.errors import UserError, listed
from idmm.files import write_csv
from idmm.progress import log

ALIKE = 60  # percent: see Labelled.alike; under it pseudo-labels did harm (benchmarks/results/few_labels.md)
NEIGHBOURS = 10  # nearest images that each image is joined to


@dataclass(frozen=True)
class Labelled:
    """What became of the images without labels."""

    given: int  # images that had a label
    found: int  # that got one
    left: int  # that got none: no label reaches them
    alike: float  # percent of images' nearest to which a linear classifier gives their own class; chance is 0


def pseudolabel(runs: list[str], data: Data, device: str, out: Path) -> dict:
    """Writes ``out``, a CSV file with a class for each image, and logs how far the images' neighbours bear it out.

    Args:
        runs: Whose features say which images are near, each counting the same.
        data: The images, some of which have a label.
        device: Where the networks run.
        out: Its columns are path, class, split, given and share; share: how sure a label is, from 0 to 1.

    Returns:
        What :class:`Labelled` holds.

    Raises:
        UserError: Labels of one class alone, or none of the images can be read.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    from idmm.inference import Embedder  # torch takes seconds
    from idmm.similarity import unit_rows

    splits = open_splits(data, labelled=True, unlabelled=True)
    embedders = [Embedder(run, device=device, max_pixels=data.max_pixels) for run in runs]
    found = embedders[0].embed(splits.train.items, on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(splits.train), "data.root")
    train = splits.train.take([i for i, path in enumerate(splits.train.items) if path not in found.unreadable])
    _check_classes(train)
    features = [found.features, *(more.embed(train.items, progress=True).features for more in embedders[1:])]
    rows = np.concatenate([unit_rows(each) for each in features], axis=1)  # [N, sum of d]: all count alike
    shares, about = _spread(rows, train)
    labels = np.where(shares.any(axis=1), shares.argmax(axis=1), -1)  # those that were given have them still
    labels[train.labels >= 0] = train.labels[train.labels >= 0]

    def how(part: str, i: int) -> tuple:
        return ("yes", 1) if part != "train" or train.labels[i] >= 0 else ("no", f"{shares[i].max():.4g}")

    parts = splits.parts | {"train": replace(train, labels=labels)}
    write_csv(out, class_rows(parts, ("given", "share"), how))
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


def _check_classes(train: Split) -> None:
    if len(seen := np.unique(train.labels[train.labels >= 0])) < 2:
        raise UserError(
            f"data.root: all labels are of class {listed(train.classes[c] for c in seen)}; wanted two or more"
        )


def _spread(rows: np.ndarray, train: Split) -> tuple[np.ndarray, Labelled]:
    """Returns each image's shares of the classes [N, K] by its features [N, d], and what that comes to."""
    from idmm.evaluate import choose_strength, fit_linear
    from idmm.similarity import nearest, spread_labels

    labels, classes = train.labels, len(train.classes)
    near, known = nearest(rows, NEIGHBOURS), labels >= 0
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
