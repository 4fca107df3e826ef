"""``idmm suggest``: which images to label next."""

import codecs
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans, MiniBatchKMeans
from threadpoolctl import threadpool_limits

from idmm.batch import Batch
from idmm.config import Data, parsing
from idmm.config.commands import SuggestConfig
from idmm.data.fingerprint import digests
from idmm.data.images import AUTO, bands_of, composite, fitted
from idmm.data.listing import list_images
from idmm.data.split import Labels, LabelsMissing, Listing, Split, split_of, with_unlabelled
from idmm.data.stratify import units_of
from idmm.data.user_lists import class_rows, with_groups
from idmm.errors import UserError
from idmm.evaluation import Floats
from idmm.evaluation.inputs import report_unreadable
from idmm.evaluation.network import Network
from idmm.evaluation.predictor import load_backbone_network
from idmm.evaluation.similarity import unit_rows
from idmm.files import Json, csv_bytes, filling, output_path, write_bytes, write_csv
from idmm.models import create_backbone
from idmm.models.hog import SIDE
from idmm.models.hog_conv import HogConv
from idmm.notebook import Result
from idmm.progress import Bar, counting, log
from idmm.report.sheets import LARGE, Tile, caption_sheet, in_rows
from idmm.runs.resolve import check_out_of_images
from idmm.seeding import derive, numpy_rng, seeded
from idmm.text import counted
from idmm.training.device import pick_device

SEEN = 1024  # images that hand-made features learn their components from
# Images times clusters: up to which K-means sees all images in each round, and by which it has as
# many starts as fit, of which the best counts
LARGEST = 1e8
STARTS = 3e6
MOST_STARTS = 10
ROWS = 1000  # of a block of cosines
ON_A_SHEET = 60  # pictures
SHOWN = 256  # short side of a picture (pixels)


@dataclass(frozen=True)
class Images:
    """Readable images to train on, with their features."""

    split: Split
    rows: Floats  # float32 [N, d], centred and of unit length

    def take(self, numbers: Labels) -> "Images":
        """Return some of them."""
        return Images(self.split.take(numbers), self.rows[numbers])

    @property
    def has_label(self) -> NDArray[np.bool_]:
        """Whether an image has a label, [N]."""
        return self.split.known_labels >= 0

    @property
    def units(self) -> Labels:
        """Number of each image's group, its own without groups, int64 [N]."""
        return units_of(self.split.known_labels, self.split.groups)


def suggest(config: SuggestConfig | Json | str) -> Result:
    """Choose the images to label next, and write lists to fill in and pictures to ``config.out``.

    K-means divides the images into as many clusters as there are labels, old and new. Of the
    largest clusters without a label the image nearest to the centre is suggested.

    Args:
        config: A SuggestConfig, a mapping of its keys ('idmm suggest --help'), or the path of a
            YAML file.

    Returns:
        The names of the images ``to_label``, best first, and of those drawn for ``test``, and how
        well labels cover the images: ``coverage`` so far (None without labels) and
        ``coverage_after``. This is the mean cosine of each image to the most similar labelled one.

    Raises:
        UserError: More images are asked for than have no label, or ``out`` is in use.
        RunError: Memory ran out, or the disk is full.
    """
    config = parsing.build(SuggestConfig, config)
    out = output_path(config.out, None)
    check_out_of_images(config)
    listing = _list_images(config.data)
    train = _without_copies(listing, config.data)
    _check_count(config, listing, train)
    network = _network(config)
    images = _with_features(network, train, config)
    _check_count(config, listing, images.split)
    tests, images = _set_aside(images, config)
    chosen = _choose(images, config)
    coverage = _coverage(images, np.flatnonzero(images.has_label))
    after = _coverage(images, np.append(np.flatnonzero(images.has_label), chosen))
    suggested = images.split.take(chosen)
    with filling(out) as folder:
        _write_lists(folder, suggested, tests, listing)
        _draw(folder, "to_label", suggested, network)
        _draw(folder, "test", tests, network)
    _log_result(config, listing, tests, coverage, after)
    return Result(
        to_label=suggested.names, test=tests.names, coverage=coverage, coverage_after=after
    )


# ---------------------------------------------------------------------- the images
def _list_images(data: Data) -> Listing:
    """List the images as ``idmm train`` does, or without any label."""
    try:
        return list_images(
            data, labelled=True, evaluated=False, unlabelled=True, joined=False, least_classes=0
        )
    except LabelsMissing:
        plain = list_images(replace(data, groups=None), labelled=False, evaluated=False)
    nothing = replace(plain.train.take([]), labels=np.empty(0, np.int64), classes=[])
    listing = Listing(nothing, unlabelled=plain.train)
    if data.groups is not None:
        return with_groups(listing, data.groups, data.root)
    return listing


def _without_copies(listing: Listing, data: Data) -> Split:
    """Return the images to train on without copies of others, of which one with a label stays."""
    train = with_unlabelled(listing).train
    seen = set(digests(split_of(str(data.root), list(listing.aside))))
    for split in listing.evaluated:
        seen.update(digests(split))
    contents = digests(train)
    labels = train.known_labels
    stays = []
    for number in np.argsort(labels < 0, kind="stable").tolist():
        if labels[number] >= 0 or contents[number] not in seen:
            stays.append(number)
        seen.add(contents[number])
    if copies := len(train) - len(stays):
        log.info("left out %s of other images", counted(copies, "exact copie"))
    return train.take(sorted(stays))


def _check_count(config: SuggestConfig, listing: Listing, train: Split) -> None:
    """Raise UserError if there are too few images without a label, or groups of them."""
    root = config.data.root
    tests = sum(map(len, listing.evaluated)) + len(listing.aside)
    if config.test and tests:
        raise UserError.of("test", f"'{root}' has {tests} test images already", "Leave --test out")
    unlabelled = train.take(np.flatnonzero(train.known_labels < 0))
    if not len(unlabelled):
        raise UserError.of(
            "data.root",
            f"every image of '{root}' has a label, nothing is left to label",
            "If its folders are no classes, move them into a folder 'unlabelled'",
        )
    remaining = len(np.unique(units_of(unlabelled.known_labels, unlabelled.groups)))
    unit = "images" if unlabelled.groups is None else "groups"
    count = config.count + config.test
    if count > remaining:
        raise UserError.of(
            "count", f"{count} images are more than the {remaining} {unit} without a label"
        )


# ---------------------------------------------------------------------- features
def _network(config: SuggestConfig) -> Network:
    """Return the network of ``config.init``, or hand-made features that have learned nothing."""
    if config.init is not None:
        return load_backbone_network(
            config.init,
            device=config.device,
            batch_size=config.batch_size,
            precision=config.precision,
            field="init",
        )
    channels = config.data.channels or 3
    with seeded(derive(config.seed, "model")):
        model = create_backbone("hog_conv", in_chans=channels, learned={})
    mean = [0.0] * channels
    std = [1.0] * channels
    assert isinstance(model, HogConv)
    model.eval().set_statistics(mean, std)
    return Network(
        model,
        SIDE,
        1.0,
        mean,
        std,
        pick_device(config.device),
        config.batch_size,
        "features",
        AUTO,
        bands_of(channels, config.data.bands),
    )


def _with_features(network: Network, train: Split, config: SuggestConfig) -> Images:
    """Return the readable images with their features. Each file is decoded once."""
    mixed = train.take(numpy_rng(config.seed, "features").permutation(len(train)))
    unreadable: dict[str, str] = {}
    files = network.file_batches(mixed.items, mixed.places, unreadable)
    counted_batches = counting(files, len(mixed), "taking features")
    some: list[Batch] = []
    if config.init is None:
        model = network.model
        assert isinstance(model, HogConv)
        some = list(islice(counted_batches, -(-SEEN // config.batch_size)))
        if some:  # else no image can be read
            model.learn_start(some, config.seed)
            model.to(network.device)
    rows = network.outputs(chain(some, counted_batches))
    report_unreadable(unreadable, len(mixed), "data.root")
    readable = [i for i, path in enumerate(mixed.places) if path not in unreadable]
    return Images(mixed.take(readable), unit_rows(rows))


# ---------------------------------------------------------------------- the choice
def _set_aside(images: Images, config: SuggestConfig) -> tuple[Split, Images]:
    """Draw images to test on at random, one per group. Return them, and those of other groups."""
    units = images.units
    drawable = np.flatnonzero(~np.isin(units, units[images.has_label]))
    mixed = numpy_rng(config.seed, "test").permutation(drawable)
    numbers = _one_per_group(mixed, units)[: config.test]
    if len(numbers) < config.test:
        raise UserError.of(
            "test",
            f"{config.test} is more than the {len(numbers)} groups of which no image has a label",
        )
    others = np.flatnonzero(~np.isin(units, units[numbers]))
    return images.split.take(numbers), images.take(others)


def _one_per_group(numbers: Labels, units: Labels) -> Labels:
    """Return the numbers of images whose group, by the ``units`` of all, was not there before."""
    _, first = np.unique(units[numbers], return_index=True)
    return numbers[np.sort(first)]


def _choose(images: Images, config: SuggestConfig) -> Labels:
    """Return the numbers of the images to label, best first, int64 [count]."""
    labelled = images.has_label
    clusters = int(labelled.sum()) + config.count
    log.info("choosing %s of %d images", counted(config.count, "image"), len(labelled))
    cost = clusters * len(labelled)
    kind = KMeans if cost <= LARGEST else MiniBatchKMeans
    starts = min(MOST_STARTS, 1 + int(STARTS / cost))
    means = kind(clusters, n_init=starts, random_state=derive(config.seed, "clusters") % 2**32)
    with threadpool_limits(1, "openmp"):  # threads would add up in any order
        cluster = means.fit_predict(images.rows)  # [N]
    sizes = np.bincount(cluster, minlength=clusters)
    has_label = np.bincount(cluster[labelled], minlength=clusters) > 0
    distance = np.square(images.rows - means.cluster_centers_[cluster]).sum(axis=1)
    order = np.lexsort((distance, cluster, labelled))[: np.count_nonzero(~labelled)]
    # how many images of its cluster are nearer to the centre
    _, start, members = np.unique(cluster[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(start, members)
    best = np.lexsort((-sizes[cluster[order]], rank, has_label[cluster[order]]))
    return _one_per_group(order[best], images.units)[: config.count]


def _coverage(images: Images, numbers: Labels) -> float | None:
    """Return the mean cosine of each image to the most similar one of ``numbers``."""
    if not len(numbers):
        return None
    total = 0.0
    for start in range(0, len(images.rows), ROWS):
        cosines = images.rows[start : start + ROWS] @ images.rows[numbers].T
        total += float(cosines.max(axis=1).sum())
    return total / len(images.rows)


# ---------------------------------------------------------------------- what is written
def _write_lists(folder: Path, suggested: Split, tests: Split, listing: Listing) -> None:
    """Write lists for ``data.labels``: to fill in, and of the labels so far.

    The byte order mark lets spreadsheets read and save letters of any language.
    """
    rows = [("path", "class"), *((name, "") for name in suggested.names)]
    write_bytes(folder / "to_label.csv", codecs.BOM_UTF8 + csv_bytes(rows))
    aside = [*tests.names, *listing.aside]
    if aside:
        content = csv_bytes(class_rows({}, aside))
        write_bytes(folder / "test.csv", codecs.BOM_UTF8 + content)
    labels = [*class_rows(replace(listing, unlabelled=None).parts)]
    if len(labels) > 1:
        write_csv(folder / "labels.csv", labels)


def _draw(folder: Path, stem: str, split: Split, network: Network) -> None:
    """Draw sheets of images with their numbers in STEM.csv."""
    starts = range(0, len(split), ON_A_SHEET)
    for sheet, start in enumerate(Bar(starts, desc=f"drawing {stem}", delay=1), start=1):
        tiles: list[Tile] = []
        some = range(start, min(start + ON_A_SHEET, len(split)))
        for number in some:
            pixels = composite(fitted(network.read(split.items[number]).pixels, SHOWN))
            name = "/".join(Path(split.names[number]).parts[-2:])
            tiles.append(Tile(pixels, f"{number + 1}\n{name}"))
        title = f"Images {some[0] + 1} to {some[-1] + 1} of {stem}.csv"
        path = folder / f"{stem}-{sheet}.png"
        caption_sheet(in_rows(tiles), path, title, "Number 1 is in line 2, below the header", LARGE)


def _log_result(
    config: SuggestConfig,
    listing: Listing,
    tests: Split,
    coverage: float | None,
    after: float | None,
) -> None:
    """Log how well labels cover the images, and what to do next."""
    labelled = int((listing.train.known_labels >= 0).sum())
    so_far = ""
    if coverage is not None:
        so_far = f"{coverage:.2f} with the {counted(labelled, 'label')} so far, "
    log.info(
        "coverage: %s%.2f with %d more (mean cosine of each image to the most similar labelled "
        "one, at most 1)",
        so_far,
        after,
        config.count,
    )
    out = config.out
    if len(tests):
        log.info(
            "%s/test.csv: %s, drawn at random, to label and to test on. Accuracy on images that "
            "were chosen is no estimate",
            out,
            counted(len(tests), "image"),
        )
    elif not listing.evaluated and not listing.aside:
        log.warning(
            "there are no test images. Accuracy on images that were chosen is no estimate, so set "
            "some aside by --test 100"
        )
    log.info("%s/to_label.csv: %s to label", out, counted(config.count, "image"))
    root = config.data.root
    log.info("fill in the classes, then: idmm train %s --data.labels %s --out NEW", root, out)
