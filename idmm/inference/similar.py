"""``idmm similar``: the images that are most like one."""

import os
from pathlib import Path

import numpy as np

from idmm.config.usage import SimilarConfig
from idmm.data.folder import same_place
from idmm.errors import UserError, one_line
from idmm.evaluation.inputs import inputs, network_options, print_bytes, say_unreadable
from idmm.progress import log

DRAWN = 256  # short side of the images in the picture (pixels)


def similar(given: SimilarConfig) -> None:
    """Prints the cosine and the path of the nearest images, and the median cosine of all; draws the nearest beside the
    query in ``given.out``.

    The query is not among them; another file of the same content is.

    Raises:
        UserError: No such run or images, none but the query, or ``out`` cannot be written.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    _, images = inputs(given, "backbone", (".png",), lambda: _check_query(given.query))
    others = [image.path for image in images if same_place(image.path) != same_place(given.query)]
    if not others:
        raise UserError(f"paths: there is no image but the query '{given.query}'; wanted some to compare it with")
    if len(others) < len(images):
        log.info("query: '%s' lies among the images and is left out of them", given.query)
    from idmm.evaluation.predictor import Embedder  # torch takes seconds, a mistake is told at once

    embedder = Embedder(given.init, **network_options(given))
    query = embedder.embed([given.query], on_error="skip")
    if query.unreadable:
        raise UserError(f"query: '{given.query}' cannot be read ({query.unreadable[given.query]})")
    found = embedder.embed(others, on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(others))
    cosines = _unit(found.features) @ _unit(query.features)[0]  # [N]
    nearest = np.argsort(-cosines, kind="stable")[: given.top_k]
    shown = [(found.paths[i], float(cosines[i])) for i in nearest]
    lines = (f"{cosine:.4f}  {one_line(path)}\n" for path, cosine in shown)
    print_bytes("".join(lines).encode("utf-8", "surrogateescape"))
    middle = f"median of all {len(cosines):,}: {np.median(cosines):.4f}"
    log.info("cosine, %s", middle)
    _draw(given, shown, embedder.picture, f"cosine: {middle}")
    log.info("%s: the query and what is nearest to it", given.out)


def _check_query(query: str) -> None:
    if not os.path.lexists(query):
        raise UserError(f"query: '{query}' does not exist; wanted an image")
    if os.path.isdir(query):
        raise UserError(f"query: '{query}' is a folder; wanted an image")


def _unit(features: np.ndarray) -> np.ndarray:
    """Returns rows of length 1; of zeros zeros."""
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def _draw(given: SimilarConfig, shown: list[tuple[str, float]], picture, note: str) -> None:
    from idmm.figures.sheets import LARGE, Tile, caption_sheet, in_rows

    captions = [("query", given.query), *((f"cosine {cosine:.3f}", path) for path, cosine in shown)]
    tiles = [Tile(picture(path, DRAWN), f"{said}\n{'/'.join(Path(path).parts[-2:])}") for said, path in captions]
    title = f"Most like '{Path(given.query).name}' by the cosine of the features of {given.init}"
    caption_sheet(in_rows(tiles), given.out, title, note, cell=LARGE)
