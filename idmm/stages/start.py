"""What a run's fresh weights start from, see :mod:`idmm.models.start`."""

import logging

from torch import nn

from idmm import distributed
from idmm.data.image_store import ImageStore
from idmm.models.start import structured_start, takes_structure
from idmm.stages import Phase
from idmm.stages.assemble import Assembly, eval_batches
from idmm.stages.handover import norm_images
from idmm.training.session import Session

log = logging.getLogger("idmm")
IMAGES = 512  # whose patches are whitened, at most


def structure(run: Session, parts: Assembly, phase: Phase, model: nn.Module, train: ImageStore) -> None:
    """Gives the fresh weights of a new run the start that ``model.start`` asks for, by some of the training images
    ``train``; all processes must call together, and come to the same."""
    if parts.config.model.start == "timm" or parts.spec.init is not None or not takes_structure(model):
        return
    batch = min(phase.batch_size, IMAGES)
    some = norm_images(len(train), batch, parts.config.seed)[: IMAGES * distributed.world()]
    structured_start(model, eval_batches(run, parts, train, phase.size, batch, images=some), parts.config.seed)
    log.info("model.start: attention, positions and the patch embedding of %s are structured", parts.spec.name)
