"""``idmm explore``: which training images of a run are alike, as tables, sheets of thumbnails and a summary."""

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
from idmm.files import emptied_if_refused, home, made_folder
from idmm.inference.explore_tables import KINDS, NEIGHBOURS, Explored, Found
from idmm.progress import Bar, log
from idmm.stages import artifacts
from idmm.stages.probe import frozen_backbone
from idmm.stages.resolve import images_around

FOLDER, EXCLUDE = "explore", "exclude.txt"
VOTED_OF = 3 * similarity.VOTERS  # neighbours that are looked at for those with a label
HASHES = 2.0  # weight of the agreement of perceptual hashes beside the cosine of rows


def explore(given: ExploreConfig) -> str:
    """Finds images that are alike and writes tables and sheets to ``given.out``, by default RUN/explore; returns a
    summary: how much was found of each kind, the ten worst, and what to do next.

    Raises:
        UserError: No finished run, its images are gone, or ``out`` cannot be written, or lies among the images.
    """
    config = artifacts.config_of(given.run)
    if given.out and (inside := images_around(replace(config, out=given.out))):
        raise UserError(f"out: '{given.out}' lies among the images of '{inside}'; name another place")
    place = given.out or str(Path(given.run) / FOLDER)
    with emptied_if_refused(place):
        out = made_folder(place)
        seen = opened(given, config)
    found = search(seen)
    for name, kind in product(KINDS, ("csv", "png")):  # of an earlier call
        (out / f"{name}.{kind}").unlink(missing_ok=True)
    summary = _heading(seen, given.run)
    for name, write in KINDS.items():
        log.info("writing %s", name)
        summary += ["", *write(seen, found, out)]
    summary += ["", f"written: {_exclude(seen, found, given.run, config, out / EXCLUDE)}"]
    shown = f"; 'idmm report {given.run}' shows them" if out.resolve() == (Path(given.run) / FOLDER).resolve() else ""
    return "\n".join([*summary, f"written: tables and sheets in {out}{shown}"])


# ---------------------------------------------------------------------- what there is
def opened(given: ExploreConfig, config) -> Explored:
    """Reads the images of a run, and what they are compared by: its rows, or features where it has none."""
    if isinstance(config, ProbeConfig):
        raise UserError(f"run: '{given.run}' is a probe, which trains nothing; wanted a run of pretraining or "
                        "fine-tuning")  # fmt: skip
    rows, notes = None, []
    try:
        rows = artifacts.instances(given.run).weight
    except UserError as error:
        notes.append(f"compared by the frozen features of the backbone: {error.faults[0]}")
    log.info("reading the training images")
    store = artifacts.images(given.run)
    if len(store) < 3:
        raise UserError(f"run: '{given.run}' has {len(store)} training images; wanted three or more to compare")
    labels = None if store.labels is None or not (store.labels >= 0).any() else store.labels
    notes += [] if labels is not None else ["no labels: no labels.csv"]
    return Explored(store, labels, features(given, config, store) if rows is None else rows, notes)


def features(given: ExploreConfig, config, store: ImageStore) -> np.ndarray:
    """Returns the pooled features of whole images, float32 [N, d]."""
    data = replace(config.data, workers=0)
    asked = ProbeConfig(init=given.run, data=data, batch_size=given.batch_size, device=given.device, crop_pct=1.0)
    return frozen_backbone(asked).features(store, "train")


# ---------------------------------------------------------------------- what is found
def search(seen: Explored) -> Found:
    """Compares the images."""
    log.info("comparing %d images", len(seen.store))
    unit = similarity.unit_rows(seen.rows)
    near = similarity.nearest(unit, max(NEIGHBOURS, similarity.LOCAL, 0 if seen.labels is None else VOTED_OF))
    votes = (None, None) if seen.labels is None else similarity.label_margins(near, seen.labels)
    return Found(near, list(_duplicates(seen, unit)), *votes, *similarity.clusters(unit))


def _duplicates(seen: Explored, unit: np.ndarray) -> Iterator[tuple[int, int, float | None, float, str]]:
    """Yields likely duplicates: the same files first, then by score.

    What is compared is the cosine of two rows plus twice the agreement of their perceptual hashes, in [-1, 1] both.
    """
    pairs, digests = similarity.likely_duplicates(np.hstack([unit, hash_vectors(seen.store)])), seen.store.digests
    first: dict[str, int] = {}
    same = [(one, i) for i, digest in enumerate(digests) if (one := first.setdefault(digest, i)) != i]
    for i, j in same:
        yield i, j, None, float(unit[i] @ unit[j]), "same file"
    for (i, j), score in zip(pairs.index.tolist(), pairs.score.tolist(), strict=True):
        if score > pairs.threshold and digests[i] != digests[j]:
            yield i, j, score, float(unit[i] @ unit[j]), "near"


def hash_vectors(store: ImageStore) -> np.ndarray:
    """Returns the perceptual hashes of all images as vectors, float32 [N, 64], whose product is ``HASHES`` times the
    share of bits that agree less that of those that differ."""
    numbers = Bar(range(len(store)), desc="perceptual hashes", unit="img", delay=1)
    bits = [perceptual_hash(Image.fromarray(store.picture(i))) for i in numbers]
    return (np.array(bits, dtype=np.float32) * 2 - 1) * np.float32((HASHES / HASH_BITS) ** 0.5)


def _exclude(seen: Explored, found: Found, run: str, config, path: Path) -> str:
    """Writes a file for ``data.exclude``: copies of the same file, and the likely ones behind a #."""
    refs = [ImageRef("train", i, name, seen.label(i)) for i, name in enumerate(seen.store.names)]
    pairs = [Pair(kind, refs[i], refs[j], cosine) for i, j, _, cosine, kind in found.pairs]
    before = config.data.exclude if home(config.data.exclude or "").is_file() else None
    return write_exclusions(f"idmm explore {run}", before, exclusions(pairs), path)


def _heading(seen: Explored, run: str) -> list[str]:
    return [
        f"{len(seen.store):,} training images of {run}. These are suspicions, not findings: look at the sheets.",
        "'idmm data check' finds what is certain.", *(f"note: {note}" for note in seen.notes),
    ]  # fmt: skip
