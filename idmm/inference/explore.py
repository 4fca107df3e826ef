"""``idmm explore``: similar images of a run, as tables, sheets of thumbnails and a summary."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from idmm.config.commands import ExploreConfig
from idmm.data.check import HASH_BITS, ImageRef, Pair, exclusions, perceptual_hash, write_exclusions
from idmm.data.image_store import ImageStore
from idmm.errors import UserError
from idmm.evaluation import Floats, similarity
from idmm.evaluation.network import Network
from idmm.files import expand_home, made_folder
from idmm.inference.explore_tables import KINDS, Similarities, Stores, instance_rows, write_rows
from idmm.inference.runs import config_of, images_of
from idmm.models.weights import read_checkpoint
from idmm.progress import Bar, log
from idmm.runs.resolve import check_out_of_images
from idmm.text import nearest

CANDIDATES = 3 * similarity.VOTERS  # neighbours among which those with a label vote
HASHES = 2.0  # weight of the perceptual hashes' agreement, relative to the cosine of rows


def explore(config: ExploreConfig) -> str:
    """Find similar images and write tables and sheets to ``config.out``, by default RUN/explore.

    In a folder of ``idmm train`` the run is stage 1, if there is one, because it learned from all
    images.

    Returns:
        A summary: the count of each kind, its ten worst, and the next command.

    Raises:
        UserError: No finished run, its images are gone, or ``out`` cannot be written or is among
            the images.
    """
    folder, *others = map(expand_home, config.runs)
    if (folder / "train.json").is_file() and (folder / "stage1" / "result.json").is_file():
        folder = folder / "stage1"
        log.info(f"run: '{folder}', which learned from all images")
    run, *_ = map(config_of, (folder, *others))
    if config.out:
        check_out_of_images(replace(run, out=config.out))
    log.info("reading the images")
    stores = images_of(folder)
    _check_images(stores, folder, config.classes)
    out = made_folder(config.out or str(folder / "explore"))
    features = {}
    for path in (folder, *others):
        features[str(path)] = _features(path, stores, config)
    similarities = _compare(stores, features, config.classes)
    for name in (*KINDS, "rows"):  # of an earlier call
        (out / f"{name}.csv").unlink(missing_ok=True)
        (out / f"{name}.png").unlink(missing_ok=True)
    counts = ", ".join(f"{len(store):,} {part}" for part, store in stores.items())
    summary = [
        f"{counts} images of {folder}. These are suspicions, not findings: check the sheets.",
        "'idmm data check' finds the certain cases.",
    ]
    for name, write in KINDS.items():
        log.info(f"writing {name}")
        summary += ["", *write(similarities, out)]
    rows = instance_rows(folder)
    if rows is not None:
        summary += ["", *write_rows(similarities, rows, out)]
    excluded = run.data.exclude
    if not expand_home(excluded or "").is_file():
        excluded = None
    copies = exclusions(similarities.duplicates)
    exclude = write_exclusions(f"idmm explore {folder}", excluded, copies, out / "exclude.txt")
    summary += ["", f"written: {exclude}"]
    shown = f"written: tables and sheets in {out}"
    if not config.out:
        shown = f"{shown}. 'idmm report {config.runs[0]}' shows them"
    summary.append(shown)
    return "\n".join(summary)


def _check_images(stores: Stores, folder: Path, classes: list[str]) -> None:
    """Raise UserError if there are too few images, or none of a class."""
    count = sum(map(len, stores.values()))
    if count < 3:
        raise UserError.of("run", f"'{folder}' has {count} images, expected at least three")
    known = stores["train"].classes or []
    for name in classes:
        if name not in known:
            raise UserError.of(
                "classes", f"'{name}' is no class of these images", nearest(name, known)
            )


def _features(run: Path, stores: Stores, config: ExploreConfig) -> Floats:
    """Return the features of all images by a run's backbone, [N, d]."""
    saved = read_checkpoint(run)
    network = Network.from_checkpoint(saved, 0, config.device, config.batch_size)
    network = replace(network, crop_pct=1.0)  # whole images
    network = network.in_precision(config.precision)
    features = []
    for part, store in stores.items():
        features.append(network.split_features(store, None, part))
    return np.concatenate(features)


def _compare(stores: Stores, features: dict[str, Floats], shown: list[str]) -> Similarities:
    """Compare the images by the features of the first run. ``shown``: classes on the map."""
    rows = next(iter(features.values()))
    log.info(f"comparing {len(rows)} images")
    classes = [*(stores["train"].classes or ()), None]  # the last one, of number -1, is none
    images = []
    numbers: list[int] = []
    for part, store in stores.items():
        labels = [-1] * len(store) if store.labels is None else store.labels.tolist()
        numbers += labels
        for i, name in enumerate(store.names):
            images.append(ImageRef(part, i, name, classes[labels[i]]))
    unit = similarity.unit_rows(rows)
    near = similarity.nearest(unit, CANDIDATES)
    margins, suggested = similarity.label_margins(near, np.array(numbers))
    duplicates = list(_duplicates(stores, images, unit))
    duplicates.sort(key=lambda pair: not pair.disagrees)
    return Similarities(
        stores,
        images,
        unit,
        near,
        duplicates,
        margins,
        [classes[number] for number in suggested],
        features,
        shown,
    )


def _duplicates(stores: Stores, images: list[ImageRef], unit: Floats) -> Iterator[Pair]:
    """Yield likely duplicates with their cosine: the same files first, then the likeliest.

    These go by the cosine of two rows plus twice the agreement of their perceptual hashes, both in
    [-1, 1].
    """
    hashes = np.concatenate([hash_vectors(store) for store in stores.values()])
    pairs = similarity.likely_duplicates(np.hstack([unit, hashes]))
    digests: list[str] = []
    for store in stores.values():
        digests += store.digests
    first: dict[str, int] = {}
    for j, digest in enumerate(digests):
        i = first.setdefault(digest, j)
        if i != j:
            cosine = float(unit[i] @ unit[j])
            yield Pair("same file", images[i], images[j], cosine)
    likely = pairs.index[pairs.score > pairs.threshold]
    for i, j in likely.tolist():
        if digests[i] != digests[j]:
            cosine = float(unit[i] @ unit[j])
            yield Pair("near", images[i], images[j], cosine)


def hash_vectors(store: ImageStore) -> Floats:
    """Return the images' perceptual hashes as vectors, float32 [N, 64].

    Their product is ``HASHES`` times the share of equal bits less that of different ones.
    """
    hashes = []
    for i in Bar(range(len(store)), desc="perceptual hashes", unit="img", delay=1):
        picture = Image.fromarray(store.picture(i))
        hashes.append(perceptual_hash(picture))
    signs = np.array(hashes, dtype=np.float32) * 2 - 1
    return signs * np.float32((HASHES / HASH_BITS) ** 0.5)
