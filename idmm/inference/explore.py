"""``idmm explore``: similar images of a run, as tables, sheets of thumbnails and a summary."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
from PIL import Image

from idmm.config.commands import ExploreConfig
from idmm.data.check import HASH_BITS, ImageRef, Pair, exclusions, perceptual_hash, write_exclusions
from idmm.data.image_store import ImageStore
from idmm.errors import Fault, UserError
from idmm.evaluation import similarity
from idmm.evaluation.network import Network
from idmm.files import expand_home, made_folder
from idmm.inference.explore_rows import instance_rows, write_rows
from idmm.inference.explore_tables import KINDS, Similarities
from idmm.inference.runs import config_of, images_of
from idmm.models.weights import read_checkpoint
from idmm.progress import Bar, log
from idmm.runs.resolve import check_place
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
        log.info("run: '%s', which learned from all images", folder)
    run, *_ = map(config_of, (folder, *others))
    if config.out:
        check_place(replace(run, out=config.out))
    log.info("reading the images")
    stores = images_of(folder)
    count = sum(map(len, stores.values()))
    if count < 3:
        raise UserError(f"run: '{folder}' has {count} images, expected at least three")
    known = stores["train"].classes or []
    for name in config.classes:
        if name not in known:
            raise UserError(
                Fault("classes", f"'{name}' is no class of these images", nearest(name, known))
            )
    out = made_folder(config.out or str(folder / "explore"))
    features = {}
    for path in (folder, *others):
        network = Network.from_checkpoint(
            read_checkpoint(path), 0, config.device, config.batch_size
        )
        network = replace(network, crop_pct=1.0)  # whole images
        rows = [network.split_features(store, None, part) for part, store in stores.items()]
        features[str(path)] = np.concatenate(rows)
    found = replace(_compare(stores, features[str(folder)]), maps=features, classes=config.classes)
    for name, kind in product((*KINDS, "rows"), ("csv", "png")):  # of an earlier call
        (out / f"{name}.{kind}").unlink(missing_ok=True)
    counts = ", ".join(f"{len(store):,} {part}" for part, store in stores.items())
    summary = [
        f"{counts} images of {folder}. These are suspicions, not findings: check the sheets.",
        "'idmm data check' finds the certain cases.",
    ]
    for name, write in KINDS.items():
        log.info("writing %s", name)
        summary += ["", *write(found, out)]
    rows = instance_rows(folder)
    if rows is not None:
        summary += ["", *write_rows(found, rows, out)]
    if expand_home(run.data.exclude or "").is_file():
        before = run.data.exclude
    else:
        before = None
    exclude = write_exclusions(
        f"idmm explore {folder}", before, exclusions(found.duplicates), out / "exclude.txt"
    )
    if config.out:
        hint = ""
    else:
        hint = f". 'idmm report {config.runs[0]}' shows them"
    return "\n".join(
        [*summary, "", f"written: {exclude}", f"written: tables and sheets in {out}{hint}"]
    )


def _compare(stores: dict[str, ImageStore], rows: np.ndarray) -> Similarities:
    log.info("comparing %d images", len(rows))
    classes = [*(stores["train"].classes or ()), None]  # the last one, of number -1, is none
    images = []
    numbers = []
    for part, store in stores.items():
        if store.labels is None:
            own = [-1] * len(store)
        else:
            own = store.labels.tolist()
        images += [ImageRef(part, i, name, classes[own[i]]) for i, name in enumerate(store.names)]
        numbers += own
    unit = similarity.unit_rows(rows)
    near = similarity.nearest(unit, CANDIDATES)
    margins, other = similarity.label_margins(near, np.array(numbers))
    duplicates = sorted(_duplicates(stores, images, unit), key=lambda pair: not pair.disagrees)
    return Similarities(
        stores, images, unit, near, duplicates, margins, [classes[number] for number in other]
    )


def _duplicates(
    stores: dict[str, ImageStore], images: list[ImageRef], unit: np.ndarray
) -> Iterator[Pair]:
    """Yield likely duplicates with their cosine: the same files first, then the likeliest.

    These go by the cosine of two rows plus twice the agreement of their perceptual hashes, both in
    [-1, 1].
    """
    hashes = np.concatenate([hash_vectors(store) for store in stores.values()])
    pairs = similarity.likely_duplicates(np.hstack([unit, hashes]))
    digests = [digest for store in stores.values() for digest in store.digests]
    first = {}
    for j, digest in enumerate(digests):
        if (i := first.setdefault(digest, j)) != j:
            yield Pair("same file", images[i], images[j], float(unit[i] @ unit[j]))
    for i, j in pairs.index[pairs.score > pairs.threshold].tolist():
        if digests[i] != digests[j]:
            yield Pair("near", images[i], images[j], float(unit[i] @ unit[j]))


def hash_vectors(store: ImageStore) -> np.ndarray:
    """Return the images' perceptual hashes as vectors, float32 [N, 64]. Their product is ``HASHES``
    times the share of equal bits less that of different ones."""
    numbers = Bar(range(len(store)), desc="perceptual hashes", unit="img", delay=1)
    bits = [perceptual_hash(Image.fromarray(store.picture(i))) for i in numbers]
    return (np.array(bits, dtype=np.float32) * 2 - 1) * np.float32((HASHES / HASH_BITS) ** 0.5)
