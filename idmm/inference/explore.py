"""``idmm explore``: similar training images of a run, as tables, sheets of thumbnails and a summary."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from idmm.config.commands import ProbeConfig
from idmm.config.usage import ExploreConfig
from idmm.data.check import HASH_BITS, ImageRef, Pair, exclusions, perceptual_hash, write_exclusions
from idmm.data.image_store import ImageStore
from idmm.errors import UserError
from idmm.evaluation import similarity
from idmm.files import emptied_if_refused, expand_home, made_folder
from idmm.inference.explore_tables import KINDS, Duplicate, Images, Similarities
from idmm.progress import Bar, log
from idmm.stages import read_outputs
from idmm.stages.resolve import images_around

FOLDER, EXCLUDE = "explore", "exclude.txt"
CANDIDATES = 3 * similarity.VOTERS  # neighbours among which those with a label vote
HASHES = 2.0  # weight of the perceptual hashes' agreement, relative to the cosine of rows


def explore(config: ExploreConfig) -> str:
    """Find similar images and write tables and sheets to ``config.out``, by default RUN/explore.

    Returns:
        A summary: the count of each kind, its ten worst, and the next command.

    Raises:
        UserError: No finished run, its images are gone, or ``out`` cannot be written or is among the images.
    """
    run = read_outputs.config_of(config.run)
    if config.out and (inside := images_around(replace(run, out=config.out))):
        raise UserError(f"out: '{config.out}' is among the images of '{inside}'. Name another folder")
    default = Path(config.run) / FOLDER
    with emptied_if_refused(config.out or str(default)):
        out = made_folder(config.out or str(default))
        images = read_images(config, run)
    similarities = _compare(images)
    for name, kind in product(KINDS, ("csv", "png")):  # of an earlier call
        (out / f"{name}.{kind}").unlink(missing_ok=True)
    summary = [
        f"{len(images.store):,} training images of {config.run}. These are suspicions, not findings: check the sheets.",
        "'idmm data check' finds the certain cases.",
        *(f"note: {note}" for note in images.notes),
    ]
    for name, write in KINDS.items():
        log.info("writing %s", name)
        summary += ["", *write(images, similarities, out)]
    hint = f". 'idmm report {config.run}' shows them" if out.resolve() == default.resolve() else ""
    exclude = _exclude(images, similarities, config.run, run, out / EXCLUDE)
    return "\n".join([*summary, "", f"written: {exclude}", f"written: tables and sheets in {out}{hint}"])


# ---------------------------------------------------------------------- the images
def read_images(config: ExploreConfig, run) -> Images:
    """Read a run's images and their features."""
    if isinstance(run, ProbeConfig):
        raise UserError(f"run: '{config.run}' is a probe, expected a run of pretraining or fine-tuning")
    notes = []
    log.info("reading the training images")
    store = read_outputs.images(config.run)
    if len(store) < 3:
        raise UserError(f"run: '{config.run}' has {len(store)} training images, expected at least three")
    labels = store.labels if store.labels is not None and (store.labels >= 0).any() else None
    if labels is None:
        notes.append("no labels: no labels.csv")
    return Images(store, labels, features(config, store), notes)


def features(config: ExploreConfig, store: ImageStore) -> np.ndarray:
    """Return the pooled features of whole images, float32 [N, d]."""
    from idmm.evaluation.network import Network
    from idmm.models.weights import read_checkpoint

    network = Network.from_checkpoint(read_checkpoint(config.run), 0, config.device, config.batch_size)
    return replace(network, crop_pct=1.0).split_features(store, 0, "train")


# ---------------------------------------------------------------------- similarities
def _compare(images: Images) -> Similarities:
    log.info("comparing %d images", len(images.store))
    unit = similarity.unit_rows(images.rows)
    duplicates = list(_duplicates(images, unit))
    near = similarity.nearest(unit, CANDIDATES)
    margins, suggested = (None, None) if images.labels is None else similarity.label_margins(near, images.labels)
    return Similarities(near, duplicates, margins, suggested)


def _duplicates(images: Images, unit: np.ndarray) -> Iterator[Duplicate]:
    """Yield likely duplicates: the same files first, then by score.

    The score is of the cosine of two rows plus twice the agreement of their perceptual hashes, both in [-1, 1].
    """
    pairs = similarity.likely_duplicates(np.hstack([unit, hash_vectors(images.store)]))
    digests = images.store.digests
    first: dict[str, int] = {}
    for j, digest in enumerate(digests):
        if (i := first.setdefault(digest, j)) != j:
            yield Duplicate(i, j, None, float(unit[i] @ unit[j]), "same file")
    for (i, j), score in zip(pairs.index.tolist(), pairs.score.tolist(), strict=True):
        if score > pairs.threshold and digests[i] != digests[j]:
            yield Duplicate(i, j, score, float(unit[i] @ unit[j]), "near")


def hash_vectors(store: ImageStore) -> np.ndarray:
    """Return the images' perceptual hashes as vectors, float32 [N, 64]. Their product is ``HASHES`` times the share of
    equal bits less that of different ones."""
    numbers = Bar(range(len(store)), desc="perceptual hashes", unit="img", delay=1)
    bits = [perceptual_hash(Image.fromarray(store.picture(i))) for i in numbers]
    return (np.array(bits, dtype=np.float32) * 2 - 1) * np.float32((HASHES / HASH_BITS) ** 0.5)


def _exclude(images: Images, similarities: Similarities, folder: str, run, path: Path) -> str:
    """Write a file for ``data.exclude``: copies of the same file, and likely ones after a #."""
    refs = [ImageRef("train", i, name, images.label(i)) for i, name in enumerate(images.store.names)]
    pairs = [Pair(pair.kind, refs[pair.first], refs[pair.second], pair.cosine) for pair in similarities.duplicates]
    before = run.data.exclude if expand_home(run.data.exclude or "").is_file() else None
    return write_exclusions(f"idmm explore {folder}", before, exclusions(pairs), path)
