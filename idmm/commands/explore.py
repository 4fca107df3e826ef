"""``idmm explore``: which training images of a run are alike, as tables, sheets of thumbnails and a summary."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from idmm import similarity
from idmm.commands.datasets import write_exclusions
from idmm.commands.explore_tables import Explored, Found, Section, sections
from idmm.config.commands import ProbeConfig
from idmm.config.usage import ExploreConfig
from idmm.data.cache import ImageStore
from idmm.data.composite import picture
from idmm.data.doctor import HASH_BITS, Checkup, ImageRef, Pair, perceptual_hash
from idmm.data.exclusions import exclusions
from idmm.errors import UserError
from idmm.files import emptied_if_refused, home, made_folder, write_csv, write_json
from idmm.progress import Bar, log
from idmm.stages import artifacts, inside_images
from idmm.stages.probe import frozen_backbone

FOLDER, FILE = "explore", "explore.json"
TITLE = "Which training images are alike"
EXCLUDE = "exclude.txt"
VOTED_OF = 3 * similarity.VOTERS  # neighbours that are looked at for those with a label
HASHES = 2.0  # weight of the agreement of perceptual hashes beside the cosine of rows


def explore(given: ExploreConfig) -> str:
    """Finds images that are alike and writes tables, sheets and ``explore.json`` to ``given.out``, by default
    RUN/explore; returns a summary: how much was found of each kind, the ten worst, and what to do next.

    Raises:
        UserError: No finished run, its images are gone, or ``out`` cannot be written, or lies among the images.
    """
    config = artifacts.config_of(given.run)
    if given.out and (inside := inside_images(replace(config, out=given.out))):
        raise UserError(f"out: '{given.out}' lies among the images of '{inside}'; name another place")
    place = given.out or str(Path(given.run) / FOLDER)
    with emptied_if_refused(place):
        out = made_folder(place)
        seen = opened(given)
    found = search(seen, given)
    parts = sections(seen, found, given.neighbours)
    for old in (FILE, *(f"{part.name}.{kind}" for part in parts for kind in ("png", "csv"))):  # of an earlier call
        (out / old).unlink(missing_ok=True)
    tables = [part for part in parts if part.rows is not None]
    log.info("writing the tables")
    for part in tables:
        write_csv(out / f"{part.name}.csv", part.rows)
    copies = next(part for part in parts if part.name == "duplicates")
    copies.lines.append(f"written: {_exclude(seen, found, config, out / EXCLUDE)}")
    for part in parts:
        part.draw(seen, out)
    files = [*(f"{part.name}.csv" for part in tables), *(sheet for part in parts for sheet in part.sheets)]
    about = {
        "title": TITLE, "by": seen.by, "images": len(seen.names), "lines": _heading(seen),
        "sections": [part.plain() for part in parts], "notes": seen.notes, "files": [FILE, *files, EXCLUDE],
    }  # fmt: skip
    write_json(out / FILE, about, indent=1)
    return "\n".join(_summary(seen, parts, out))


# ---------------------------------------------------------------------- what there is
def opened(given: ExploreConfig) -> Explored:
    """Reads the rows of a run and its images, and takes the features of these."""
    run, config = given.run, artifacts.config_of(given.run)
    if isinstance(config, ProbeConfig):
        raise UserError(f"run: '{run}' is a probe, which trains nothing; wanted a run of pretraining or fine-tuning")
    rows, notes = None, []
    if given.by != "features":
        try:
            rows = artifacts.instances(run)
        except UserError as error:
            if given.by:
                raise
            notes.append(f"compared by the frozen features of the backbone: {error.faults[0]}")
    log.info("reading the training images")
    store = artifacts.images(run)
    if len(store) < 3:
        raise UserError(f"run: '{run}' has {len(store)} training images; wanted three or more to compare")
    labels = None if store.labels is None or not (store.labels >= 0).any() else store.labels
    notes += [] if labels is not None else ["no labels: no labels.csv"]
    features = _features(given, config, store)
    by, compared = ("features", features) if rows is None else ("instances", rows.weight)
    about = (labels, list(store.classes or ()), by, compared, store, features, notes)
    return Explored(Path(run), store.names, store.digests, *about)


def _features(given: ExploreConfig, config, store: ImageStore) -> np.ndarray:
    """Takes the pooled features of whole images, float32 [N, d]; those of an earlier call are found on the disk."""
    data = replace(config.data, workers=0)
    asked = ProbeConfig(init=given.run, data=data, batch_size=given.batch_size, device=given.device, crop_pct=1.0)
    return frozen_backbone(asked).features(store, "train")


# ---------------------------------------------------------------------- what is found
def search(seen: Explored, given: ExploreConfig) -> Found:
    """Compares the images."""
    log.info("comparing %d images: nearest ones", len(seen.names))
    unit = similarity.unit_rows(seen.rows)
    wanted = (given.neighbours, similarity.LOCAL, 0 if seen.labels is None else VOTED_OF)
    near = similarity.nearest(unit, max(wanted))
    margins, suggested = (None, None) if seen.labels is None else similarity.label_margins(near, seen.labels)
    log.info("outliers")
    isolation = similarity.isolation(seen.features)
    log.info("clusters")
    groups = similarity.clusters(unit, given.clusters)
    log.info("likely duplicates, with perceptual hashes")
    return Found(near, list(_duplicates(seen, unit)), margins, suggested, isolation, *groups)


def _duplicates(seen: Explored, unit: np.ndarray) -> Iterator[tuple[int, int, float | None, float, str]]:
    """Yields likely duplicates: the same files first, then by score.

    What is compared is the cosine of two rows plus twice the agreement of their perceptual hashes, in [-1, 1] both.
    """
    pairs = similarity.likely_duplicates(np.hstack([unit, hash_vectors(seen.store)]))
    first: dict[str, int] = {}
    same = [(one, i) for i, digest in enumerate(seen.digests) if (one := first.setdefault(digest, i)) != i]
    for i, j in same:
        yield i, j, None, float(unit[i] @ unit[j]), "same file"
    for (i, j), score in zip(pairs.index.tolist(), pairs.score.tolist(), strict=True):
        if score > pairs.threshold and seen.digests[i] != seen.digests[j]:
            yield i, j, score, float(unit[i] @ unit[j]), "near"


def hash_vectors(store: ImageStore) -> np.ndarray:
    """Returns the perceptual hashes of all images as vectors, float32 [N, 64], whose product is ``HASHES`` times the
    share of bits that agree less that of those that differ."""
    numbers = Bar(range(len(store)), desc="perceptual hashes", unit="img", delay=1)
    bits = [perceptual_hash(Image.fromarray(picture(store, i))) for i in numbers]
    return (np.array(bits, dtype=np.float32) * 2 - 1) * np.float32((HASHES / HASH_BITS) ** 0.5)


def _exclude(seen: Explored, found: Found, config, path: Path) -> str:
    """Writes a file for ``data.exclude``: copies of the same file, and the likely ones behind a #."""
    refs = [ImageRef("train", i, name, seen.label(i)) for i, name in enumerate(seen.names)]
    pairs = [Pair(kind, refs[i], refs[j], cosine) for i, j, _, cosine, kind in found.pairs]
    lines = exclusions(Checkup(config.data.name, config.data.root, pairs=pairs))
    before = config.data.exclude if home(config.data.exclude or "").is_file() else None
    return write_exclusions(f"idmm explore {seen.run}", before, lines, path)


# ---------------------------------------------------------------------- what is said
def _heading(seen: Explored) -> list[str]:
    what = {"instances": "the cosine of their rows in the N-way layer", "features": "the cosine of frozen features"}
    lines = [f"{len(seen.names):,} training images of {seen.run}, compared by {what[seen.by]}."]
    return [*lines, "These are suspicions, not findings: look at the sheets. 'idmm data check' finds what is certain."]


def _summary(seen: Explored, parts: list[Section], out: Path) -> Iterator[str]:
    yield from _heading(seen)
    yield from (f"note: {note}" for note in seen.notes)
    for part in parts:
        yield from ["", f"{part.title}: {part.said}", *(f"  {line}" for line in part.shown()), *part.lines]
    shown = f"; 'idmm report {seen.run}' shows them" if out.resolve() == (seen.run / FOLDER).resolve() else ""
    yield from ["", f"written: {out / FILE}, with tables and sheets beside it{shown}"]
