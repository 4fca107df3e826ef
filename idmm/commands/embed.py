"""``idmm embed``: the features of images, ready for a vector index."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from idmm.commands.inputs import inputs, network_options, say_unreadable
from idmm.config.usage import EmbedConfig
from idmm.data.split import counted
from idmm.errors import UserError, install
from idmm.files import replacing


def embed(given: EmbedConfig) -> str:
    """Writes ``paths`` [N] and ``features`` (float32 [N, d]) of images to ``given.out``; returns a line on it.

    Raises:
        UserError: No such run, no images, none that can be read, no library for the file, or it cannot be written.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    out, images = inputs(given, "backbone", (".npz", ".parquet"), lambda: _check_library(given.out))
    from idmm.inference import Embedder  # torch takes seconds, a mistake is told at once

    embedder = Embedder(given.init, **network_options(given))
    found = embedder.embed([image.path for image in images], on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(images))
    with replacing(out) as file:
        if out.suffix.lower() == ".parquet":
            _write_parquet(file, found.paths, found.features)
        else:
            np.savez(file, paths=np.array(found.paths), features=found.features)
    count, width = found.features.shape
    return f"{out}: {counted(count, 'image')}, {width} features each"


def _check_library(out: str) -> None:
    if Path(out).suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(f"out: '{out}' needs pyarrow; install it with: {install('parquet')}")


def _write_parquet(file, paths: list[str], features: np.ndarray) -> None:
    import pyarrow
    from pyarrow import parquet

    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(features.ravel()), features.shape[1])
    texts = [path.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for path in paths]
    parquet.write_table(pyarrow.table({"paths": texts, "features": lists}), file)
