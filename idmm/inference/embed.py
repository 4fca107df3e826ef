"""``idmm embed``: the features of images."""

import numpy as np

from idmm.config.usage import EmbedConfig
from idmm.data.split import counted
from idmm.evaluation.inputs import inputs, network_options, say_unreadable
from idmm.files import replacing


def embed(given: EmbedConfig) -> str:
    """Writes ``paths`` [N] and ``features`` (float32 [N, d]) of images to ``given.out``; returns a line on it.

    Raises:
        UserError: No such run, no images, none that can be read, or the file cannot be written.
        RunError: The network has diverged, memory ran out, or the disk is full.
    """
    out, images = inputs(given, "backbone", (".npz",))
    from idmm.evaluation.predictor import Embedder  # torch takes seconds, a mistake is told at once

    embedder = Embedder(given.init, **network_options(given))
    found = embedder.embed([image.path for image in images], on_error="skip", progress=True)
    say_unreadable(found.unreadable, len(images))
    with replacing(out) as file:
        np.savez(file, paths=np.array(found.paths), features=found.features)
    count, width = found.features.shape
    return f"{out}: {counted(count, 'image')}, {width} features each"
