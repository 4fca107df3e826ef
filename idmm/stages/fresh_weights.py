"""The structured start of a run's fresh weights, see :mod:`idmm.models.vit_init`."""

import logging

import numpy as np
from torch import nn

from idmm import distributed
from idmm.data.image_store import ImageStore
from idmm.models.hog_conv import HogConv
from idmm.models.vit_init import can_init_vit, init_vit
from idmm.seeding import numpy_rng
from idmm.stages import Phase
from idmm.stages.evaluators import eval_batches
from idmm.stages.resolve import RunSetup
from idmm.training.run_context import RunContext

log = logging.getLogger("idmm")
NORM_IMAGES = 4096  # enough for the statistics of batch norms
PATCH_IMAGES = 512  # at most, whose patches are whitened


def init_structured(run: RunContext, setup: RunSetup, phase: Phase, model: nn.Module, train: ImageStore) -> None:
    """Give the fresh weights of a new run the start that ``model.start`` names, from some of the training images.

    All processes must call together, and get the same weights.
    """
    config = setup.config
    learns_start = isinstance(model, HogConv)  # whatever model.start: random filters are of no use
    structured = config.model.start != "timm" and can_init_vit(model)
    if setup.spec.init is not None or not (learns_start or structured):
        return
    batch_size = min(phase.batch_size, PATCH_IMAGES)
    numbers = mixed_images(len(train), batch_size, config.seed)
    if learns_start:
        model.learn_start(eval_batches(run, setup, train, phase.size, batch_size, images=numbers), config.seed)
        images = len(numbers) // distributed.world()
        log.info("%s: filters and components from %d training images", setup.spec.name, images)
        return
    numbers = numbers[: PATCH_IMAGES * distributed.world()]
    batches = eval_batches(run, setup, train, phase.size, batch_size, images=numbers)
    init_vit(model, batches, config.seed)
    log.info("model.start: attention, positions and the patch embedding of %s are structured", setup.spec.name)


def mixed_images(count: int, batch_size: int, seed: int) -> np.ndarray:
    """Return some of ``count`` image numbers in whole batches of mixed classes, as in training.

    Every process gets the same numbers, each once per process, because processes take turns.
    """
    order = numpy_rng(seed, "batch norms").permutation(count)[: max(NORM_IMAGES, batch_size)]
    whole_batches = len(order) // batch_size * batch_size or len(order)
    return np.repeat(order[:whole_batches], distributed.world())
