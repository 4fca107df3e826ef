"""What the values of a run's images stand for: their range, mean and std, and what the log says of them."""

import logging
from dataclasses import replace

import numpy as np

from idmm import distributed
from idmm.data.cache import ImageStore
from idmm.data.images import AUTO
from idmm.data.split import counted
from idmm.data.statistics import measured, refuse_constant
from idmm.models.spec import ModelSpec
from idmm.training.checkpoint import RunFolder

log = logging.getLogger("idmm")


def standardised(spec: ModelSpec, train: ImageStore, folder: RunFolder | None) -> ModelSpec:
    """Returns what is known of the backbone with the mean and std that are left to the training images.

    A run that is resumed in ``folder`` keeps those that it began with; of several processes the first one measures.

    Raises:
        UserError: A channel has the same value in all training images.
    """
    if spec.mean is not None and spec.std is not None:
        return spec
    kept = folder.statistics() if folder is not None else None
    if kept is None:
        grey = spec.in_chans == 1 and train.bands is None
        leads = folder is None or folder.leader
        found = measured(train, grey, progress=leads) if leads or distributed.world() == 1 else None
        kept = distributed.broadcast(found) if folder is not None else found
    mean, std = spec.mean or kept[0], spec.std or kept[1]
    if spec.std is None:
        chosen = train.bands and train.bands.chosen
        refuse_constant(std, list(chosen or range(spec.in_chans)))
    said = "images: mean %s, std %s of the channels, measured from the training images"
    log.info(said, *([float(f"{value:.4g}") for value in values] for values in (mean, std)))
    return replace(spec, mean=mean, std=std)


def describe(parts, part: str, store: ImageStore, own: bool) -> None:
    """Logs how many images have more than 8 bits, and what becomes of them.

    Args:
        parts: Of the run.
        part: The split's name.
        store: Its images.
        own: By their own range, as no training image has more than 8 bits.
    """
    if not store.deep:
        return
    origin = f"from the {part} images" if own else _origin(parts)
    some = f"{store.deep:,} of {counted(len(store), f'{part} image')} {'has' if store.deep == 1 else 'have'}"
    pairs = ", ".join(f"[{low:g}, {high:g}]" for low, high in np.reshape(store.scale, (-1, 2)).tolist())
    log.info("images: %s more than 8 bits; their values %s become 0 to 1 (%s)", some, pairs, origin)
    augment = getattr(parts.config, "augment", None)
    if part == "train" and augment and augment.randaugment:
        what = "images: augment.randaugment: left out for the %d of more than 8 bits, which it would cut to 8"
        log.info(what, store.deep)


def _origin(parts) -> str:
    """Returns where the range of images of more than 8 bits comes from."""
    if parts.config.data.range != AUTO:
        return "data.range"
    if parts.spec.range != AUTO:
        return f"as in '{parts.spec.init.source}'" if parts.spec.init else "as in the checkpoint"
    return "from the training images"
