"""``idmm embed``: the features of images."""

from pathlib import Path

import numpy as np

from idmm.config.commands import EmbedConfig
from idmm.evaluation.inputs import inputs, report_unreadable
from idmm.files import replacing
from idmm.text import counted


def embed(config: EmbedConfig) -> str:
    """Write ``paths`` [N] and ``features`` (float32 [N, d]) of images, and return a summary.

    Raises:
        UserError: No such run, no readable images, or the file cannot be written.
        RunError: Memory ran out, or the disk is full.
    """
    out = Path(config.out)
    _, images = inputs(config, "backbone", (".npz",))
    # torch takes seconds, a mistake is reported at once
    from idmm.evaluation.predictor import features_of, load_backbone_network

    network = load_backbone_network(
        config.init,
        device=config.device,
        batch_size=config.batch_size,
        precision=config.precision,
        field="init",
    )
    embedding = features_of(network, images, on_error="skip")
    report_unreadable(embedding.unreadable, len(images))
    with replacing(out) as file:
        np.savez(file, paths=np.array(embedding.paths), features=embedding.features)
    count, width = embedding.features.shape
    return f"{out}: {counted(count, 'image')}, {width} features each"
