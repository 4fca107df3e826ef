"""Images that lie on the device, for views to be made there, and whether they do."""

import logging

import numpy as np
import torch
from torch import Tensor

from idmm import distributed
from idmm.data.cache import available_memory
from idmm.errors import UserError
from idmm.progress import size as size_of

log = logging.getLogger(__name__)

SHARE = 0.5  # of the device's free memory that images may take
_PIECE = 2**26  # bytes that go to the device at once


class DeviceImages:
    """The images of a store on a device: those of each depth end to end, uint8 [pixels, bytes of a pixel]."""

    def __init__(self, store, device: torch.device):
        self.store, self.device = store, device
        self.pixels: dict[int, Tensor] = {}
        spare = int(store.sizes[:, 1].max())  # lines of padded boxes may reach beyond the last image
        for each in np.unique(store.pixel_bytes).tolist():
            images = np.flatnonzero(store.pixel_bytes == each)
            total = int(store.sizes[images].prod(1).sum())
            self.pixels[each] = torch.zeros(total + spare, each, dtype=torch.uint8, device=device)
            self._fill(self.pixels[each], images)

    def _fill(self, pixels: Tensor, images: np.ndarray) -> None:
        done, waiting, held = 0, [], 0
        for i in images:
            image = self.store.image(i).permute(1, 2, 0).contiguous()  # [H, W, C]
            waiting.append(image.view(torch.uint8).reshape(-1, pixels.shape[1]))
            held += waiting[-1].nbytes
            if held >= _PIECE or i == images[-1]:
                piece = torch.cat(waiting)
                pixels[done : done + len(piece)].copy_(piece)
                done, waiting, held = done + len(piece), [], 0


def pixel_starts(store) -> np.ndarray:
    """Returns where each image's pixels start among those of its depth, int64 [N]."""
    pixels, starts = store.sizes.prod(1), np.zeros(len(store.sizes), np.int64)
    for each in np.unique(store.pixel_bytes):
        mine = store.pixel_bytes == each
        starts[mine] = np.cumsum(pixels[mine]) - pixels[mine]
    return starts


def image_bytes(store) -> int:
    """Returns what a store's images take on a device (bytes)."""
    return int((store.sizes.prod(1) * store.pixel_bytes).sum())


def free_memory(device: torch.device) -> int:
    """Returns how much memory a device has to give (bytes)."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, of runs before
        return torch.cuda.mem_get_info(device)[0] + held
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return available_memory()


def images_on(device: torch.device, transform, kept: bool = False) -> DeviceImages | None:
    """Brings a transform's images to a device where :func:`made_there` says so, and logs it; None: loader workers make
    the views.

    Args, Raises: As there.
    """
    there, why = made_there(device, transform, kept)
    if why is not None:
        log.info("views: made by loader workers: %s", why)
    if not there:
        return None
    images = DeviceImages(transform.store, device)
    log.info("views: made on %s, %s of images there", device, size_of(image_bytes(transform.store)))
    return images


def made_there(device: torch.device, transform, kept: bool = False) -> tuple[bool, str | None]:
    """Returns whether views are made on a device, by a transform's ``config.backend``, and why not where that needs to
    be said. 'auto' is the device on CUDA, where images are kept decoded and take at most half of its free memory.

    All processes must call together; they decide alike.

    Args:
        kept: The run's views were made on the device until now, which 'auto' then means everywhere.

    Raises:
        UserError: 'device', and the images are too large for it.
    """
    if not hasattr(transform, "one_by_one"):  # of boxes and masks: loader workers make all of a batch
        return False, None
    store, wanted = transform.store, transform.config.backend
    if wanted == "workers" or (wanted == "auto" and device.type != "cuda" and not kept):
        return False, None
    need, free = image_bytes(store), free_memory(device)
    needs = f"the images need {size_of(need)} on {device}, at most half of the {size_of(free)} that are free there"
    why = transform.one_by_one
    if why is None and wanted == "auto" and store.cache == "off" and not kept:
        why = "images are decoded at every use (data.cache)"
    if why is None and distributed.any_process(need > SHARE * free)[0]:
        if wanted == "device":
            raise UserError(f"{transform.section}.backend: device, but {needs}; wanted workers, or fewer images")
        why = needs
    return why is None, why
