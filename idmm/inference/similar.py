"""``idmm similar``: the images that are most similar to one."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from idmm.config.commands import SimilarConfig
from idmm.data.folder import same_place
from idmm.errors import UserError
from idmm.evaluation.inputs import inputs, print_bytes, report_unreadable
from idmm.progress import log
from idmm.text import one_line

if TYPE_CHECKING:
    from idmm.evaluation.network import Network
    from idmm.report.sheets import Tile

DRAWN = 256  # short side of the images in the picture (pixels)


def similar(config: SimilarConfig) -> None:
    """Print the nearest images with their cosine, and draw them with the query in ``config.out``.

    The median cosine of all images is logged. The query is not among them. Another file of the same
    content is.

    Raises:
        UserError: No such run or images, no image but the query, or ``out`` cannot be written.
        RunError: Memory ran out, or the disk is full.
    """
    _, images = inputs(config, "backbone", (".png",), lambda: _check_query(config.query))
    earlier_figure = same_place(config.out)
    images = [path for path in images if same_place(path) != earlier_figure]
    query_place = same_place(config.query)
    others = [path for path in images if same_place(path) != query_place]
    if not others:
        raise UserError.of(
            "paths",
            f"there is no image but the query '{config.query}'",
            "Name images to compare it with",
        )
    if len(others) < len(images):
        log.info(f"query: '{config.query}' is among the images and is skipped there")
    from sklearn.preprocessing import normalize

    # torch takes seconds, a mistake is reported at once
    from idmm.evaluation.predictor import features_of, load_backbone_network

    network = load_backbone_network(
        config.init,
        device=config.device,
        batch_size=config.batch_size,
        precision=config.precision,
        field="init",
    )
    query = features_of(network, [config.query], on_error="skip")
    if query.unreadable:
        raise UserError.of(
            "query", f"'{config.query}' cannot be read ({query.unreadable[config.query]})"
        )
    embedding = features_of(network, others, on_error="skip")
    report_unreadable(embedding.unreadable, len(others))
    cosines = normalize(embedding.features) @ normalize(query.features)[0]  # [N]
    order = np.argsort(-cosines, kind="stable")[: config.top_k]
    nearest = [(str(embedding.paths[i]), float(cosines[i])) for i in order]
    lines = [f"{cosine:.4f}  {one_line(path)}\n" for path, cosine in nearest]
    print_bytes("".join(lines).encode("utf-8", "surrogateescape"))
    median = f"median of all {len(cosines):,}: {np.median(cosines):.4f}"
    log.info(f"cosine, {median}")
    _draw(config, nearest, network, f"cosine: {median}")
    log.info(f"{config.out}: the query and the nearest images")


def _check_query(query: str) -> None:
    if not os.path.isfile(query):
        raise UserError.of("query", f"'{query}' is no file, expected an image")


def large_tile(network: "Network", path: str, caption: str) -> "Tile":
    """Return the picture of a file, before the crop, with a caption and the end of its path."""
    from idmm.data.images import composite, fitted
    from idmm.report.sheets import Tile

    pixels = composite(fitted(network.read(path).pixels, DRAWN))
    return Tile(pixels, f"{caption}\n{'/'.join(Path(path).parts[-2:])}")


def _draw(
    config: SimilarConfig, nearest: list[tuple[str, float]], network: "Network", note: str
) -> None:
    from idmm.report.sheets import LARGE, caption_sheet, in_rows

    captions = {config.query: "query"}
    for path, cosine in nearest:
        captions[path] = f"cosine {cosine:.3f}"
    tiles = []
    for path, caption in captions.items():
        tiles.append(large_tile(network, path, caption))
    title = (
        f"Most similar to '{Path(config.query).name}' "
        f"by the cosine of the features of {config.init}"
    )
    caption_sheet(in_rows(tiles), config.out, title, note, cell=LARGE)
