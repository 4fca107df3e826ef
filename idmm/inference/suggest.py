"""``idmm suggest``: which images to label next."""

import codecs
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.metrics import pairwise_distances_argmin_min
from threadpoolctl import threadpool_limits

from idmm.batch import Batch
from idmm.config import Data, parsing
from idmm.config.commands import SuggestConfig
from idmm.data.fingerprint import copies
from idmm.data.image_store import choose_crop_mode
from idmm.data.images import bands_of
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
from idmm.inference.similar import large_tile
from idmm.models import create_backbone
from idmm.models.hog import SIDE
from idmm.models.hog_conv import HogConv
from idmm.notebook import Result
from idmm.progress import Bar, counting, log
from idmm.report.sheets import LARGE, caption_sheet, in_rows
from idmm.runs.resolve import check_out_of_images
from idmm.seeding import derive, numpy_rng, seeded
from idmm.text import counted
from idmm.training.device import pick_device

SEEN = 1024  # images that hand-made features learn their components from
# More images than these are compared by principal components, which these images give
SAMPLE = 4096
COMPONENTS = 256
# Images times clusters: up to which K-means sees all images in each round, and by which it has as
# many starts as fit, of which the best counts
LARGEST = 1e8
STARTS = 3e6
MOST_STARTS = 10
ON_A_SHEET = 60  # pictures


def suggest(config: SuggestConfig | Json | str) -> Result:
    """Choose the images to label next, and write lists to fill in and pictures to ``config.out``.

    K-means divides the images into as many clusters as there are labels, old and new. Of the
    largest clusters without a label the image nearest to the centre is suggested.

    Args:
        config: A SuggestConfig, a mapping of its keys ('idmm suggest --help'), or the path of a
            YAML file.

    Returns:
        The names of the images ``to_label``, best first, and of those drawn for ``test``, and how
        well labels cover the images, ``coverage`` so far and ``coverage_after``. This is the mean
        cosine of each image to the most similar labelled one, 0 without labels.

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
    network = _network(config, train)
    train, rows = _features(network, train, config)
    units = units_of(train.known_labels, train.groups)
    test_numbers = _drawn_for_tests(train, units, config)
    tests = train.take(test_numbers)
    others = np.flatnonzero(~np.isin(units, units[test_numbers]))
    train = train.take(others)
    rows = rows[others]
    chosen = _choose(train, rows, config)
    suggested = train.take(chosen)
    labelled = np.flatnonzero(train.known_labels >= 0)
    result = Result(
        to_label=suggested.names,
        test=tests.names,
        coverage=_coverage(rows, labelled),
        coverage_after=_coverage(rows, np.append(labelled, chosen)),
    )
    with filling(out) as folder:
        _write_lists(folder, suggested, tests, listing)
        _draw(folder, "to_label", suggested, network)
        _draw(folder, "test", tests, network)
    log.info(
        "coverage: %(coverage).2f with the labels so far, %(coverage_after).2f with those "
        "suggested (mean cosine of each image to the most similar labelled one, at most 1)",
        result,
    )
    _log_next_steps(config, tests, listing)
    return result


# ---------------------------------------------------------------------- the images
def _list_images(data: Data) -> Listing:
    """List the images as ``idmm train`` does, or without any label."""
    try:
        return list_images(
            data, labelled=True, evaluated=False, unlabelled=True, joined=False, least_classes=0
        )
    except LabelsMissing:
        plain = list_images(replace(data, groups=None), labelled=False).train
    nothing = replace(plain.take([]), labels=np.empty(0, np.int64), classes=[])
    listing = Listing(nothing, unlabelled=plain)
    if data.groups is None:
        return listing
    return with_groups(listing, data.groups, data.root)


def _without_copies(listing: Listing, data: Data) -> Split:
    """Return the images to train on, without unlabelled copies of others."""
    train = with_unlabelled(listing).train
    aside = split_of(str(data.root), list(listing.aside))
    is_copy = copies(train, [*listing.evaluated, aside]) & (train.known_labels < 0)
    if is_copy.any():
        log.info("left out %s of other images", counted(int(is_copy.sum()), "duplicate"))
    return train.take(np.flatnonzero(~is_copy))


def _check_count(config: SuggestConfig, listing: Listing, train: Split) -> None:
    """Raise UserError if there are too few images without a label, or groups of them."""
    root = config.data.root
    tests = sum(map(len, listing.evaluated)) + len(listing.aside)
    if config.test and tests:
        raise UserError.of("test", f"'{root}' has {tests} test images already", "Leave --test out")
    units = units_of(train.known_labels, train.groups)
    remaining = len(np.unique(units[train.known_labels < 0]))
    if not remaining:
        raise UserError.of(
            "data.root",
            f"every image of '{root}' has a label, nothing is left to label",
            "If its folders are no classes, move them into a folder 'unlabelled'",
        )
    count = config.count + config.test
    if count > remaining:
        unit = "images" if train.groups is None else "groups"
        raise UserError.of(
            "count", f"{count} images are more than the {remaining} {unit} without a label"
        )


# ---------------------------------------------------------------------- features
def _network(config: SuggestConfig, train: Split) -> Network:
    """Return the network of ``config.init``, or hand-made features that have learned nothing."""
    if config.init is not None:
        return load_backbone_network(
            config.init,
            device=config.device,
            batch_size=config.batch_size,
            precision=config.precision,
            field="init",
        )
    data = config.data
    channels = data.channels or 3
    crop_mode = "center"  # a border would count as content
    if choose_crop_mode(train) == "squash":
        crop_mode = "squash"
    with seeded(derive(config.seed, "model")):
        model = create_backbone("hog_conv", in_chans=channels, learned={})
    assert isinstance(model, HogConv)
    return Network(
        model.eval(),
        SIDE,
        1.0,
        model.mean.tolist(),
        model.std.tolist(),
        pick_device(config.device),
        config.batch_size,
        "features",
        data.range,
        bands_of(channels, data.bands),
        crop_mode,
    )


def _features(network: Network, train: Split, config: SuggestConfig) -> tuple[Split, Floats]:
    """Return the readable images with their centred features of unit length, float32 [N, d].

    Each file is decoded once.
    """
    mixed = train.take(numpy_rng(config.seed, "features").permutation(len(train)))
    unreadable: dict[str, str] = {}
    files = network.file_batches(mixed.items, mixed.places, unreadable)
    batches = counting(files, len(mixed), "taking features")
    some: list[Batch] = []
    if config.init is None:
        some += islice(batches, -(-SEEN // config.batch_size))
    if some:
        assert isinstance(network.model, HogConv)
        network.model.learn_start(some, config.seed)
        network.model.to(network.device)
    rows = network.outputs(chain(some, batches))
    report_unreadable(unreadable, len(mixed), "data.root")
    readable = [i for i, path in enumerate(mixed.places) if path not in unreadable]
    return mixed.take(readable), unit_rows(rows)


# ---------------------------------------------------------------------- the choice
def _drawn_for_tests(train: Split, units: Labels, config: SuggestConfig) -> Labels:
    """Draw the numbers of images to test on, one per group in which no image has a label."""
    has_label = np.isin(units, units[train.known_labels >= 0])
    mixed = numpy_rng(config.seed, "test").permutation(np.flatnonzero(~has_label))
    drawn = _first_of_each(mixed, units)[: config.test]
    if len(drawn) < config.test:
        raise UserError.of(
            "test", f"{config.test} is more than the {len(drawn)} groups without a label"
        )
    return drawn


def _first_of_each(numbers: Labels, units: Labels) -> Labels:
    """Return the first of some images' numbers from each of the ``units`` of all images."""
    _, first = np.unique(units[numbers], return_index=True)
    return numbers[np.sort(first)]


def _choose(train: Split, rows: Floats, config: SuggestConfig) -> Labels:
    """Return the numbers of the images to label, best first, int64 [count]."""
    has_label = train.known_labels >= 0
    clusters = min(int(has_label.sum()) + config.count, len(rows))
    log.info("choosing %s of %d images", counted(config.count, "image"), len(rows))
    cost = clusters * len(rows)
    kind = KMeans if cost <= LARGEST else MiniBatchKMeans
    starts = min(MOST_STARTS, 1 + int(STARTS / cost))
    means = kind(clusters, n_init=starts, random_state=derive(config.seed, "clusters") % 2**32)
    with threadpool_limits(1, "openmp"):  # threads would add up in any order
        compared = _compared(rows, config.seed)
        cluster = means.fit_predict(compared)  # [N]
    size = np.bincount(cluster)[cluster]
    is_known = np.isin(cluster, cluster[has_label])
    distance = np.square(compared - means.cluster_centers_[cluster]).sum(axis=1)
    by_distance = np.argsort(np.where(has_label, np.inf, distance), kind="stable")
    is_nearest = np.isin(np.arange(len(rows)), _first_of_each(by_distance, cluster))
    # the others count if there are groups, or equal images
    order = np.lexsort((distance, -size, ~is_nearest, is_known))
    order = order[~has_label[order]]
    return _first_of_each(order, units_of(train.known_labels, train.groups))[: config.count]


def _compared(rows: Floats, seed: int) -> Floats:
    """Return rows in random order, [N, d], or principal components of many, [N, COMPONENTS]."""
    if len(rows) <= SAMPLE or rows.shape[1] <= COMPONENTS:
        return rows
    axes = PCA(
        COMPONENTS,
        svd_solver="randomized",
        random_state=derive(seed, "components") % 2**32,
    )
    axes.fit(rows[:SAMPLE])
    components: Floats = axes.transform(rows)
    return components


def _coverage(rows: Floats, numbers: Labels) -> float:
    """Return the mean cosine of each row to the most similar one of ``numbers``."""
    if not len(numbers):
        return 0.0
    _, distances = pairwise_distances_argmin_min(rows, rows[numbers], metric="cosine")
    return 1 - float(distances.mean())


# ---------------------------------------------------------------------- what is written
def _write_lists(folder: Path, suggested: Split, tests: Split, listing: Listing) -> None:
    """Write lists for ``data.labels``: to fill in, and of the labels so far.

    The byte order mark lets spreadsheets read and save letters of any language.
    """
    rows = [("path", "class"), *((name, "") for name in suggested.names)]
    write_bytes(folder / "to_label.csv", codecs.BOM_UTF8 + csv_bytes(rows))
    if aside := [*tests.names, *listing.aside]:
        write_bytes(folder / "test.csv", codecs.BOM_UTF8 + csv_bytes(class_rows({}, aside)))
    labels = [*class_rows(listing.parts)]
    if len(labels) > 1:
        write_csv(folder / "labels.csv", labels)


def _draw(folder: Path, stem: str, split: Split, network: Network) -> None:
    """Draw sheets of images with their numbers in STEM.csv."""
    tiles = []
    for number, path in enumerate(Bar(split.places, desc=f"drawing {stem}", delay=1), start=1):
        tiles.append(large_tile(network, path, str(number)))
    for start in range(0, len(tiles), ON_A_SHEET):
        some = tiles[start : start + ON_A_SHEET]
        title = f"Images {start + 1} to {start + len(some)} of {stem}.csv"
        path = folder / f"{stem}-{start // ON_A_SHEET + 1}.png"
        caption_sheet(in_rows(some), path, title, "Number 1 is in line 2, below the header", LARGE)


def _log_next_steps(config: SuggestConfig, tests: Split, listing: Listing) -> None:
    """Log what the user can do now."""
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
    log.info(
        "fill in the classes in %s/to_label.csv, then: idmm train %s --data.labels %s --out NEW",
        out,
        config.data.root,
        out,
    )
