"""What the stages of one run share: its folder, device, processes, arithmetic and time."""

import contextlib
import logging

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState

from idmm import distributed
from idmm.data.loaders import BatchFn
from idmm.methods.base import Method
from idmm.models.build import prefers_channels_last
from idmm.progress import Interrupts
from idmm.training import clock
from idmm.training.calibrate import choose_device, choose_precision
from idmm.training.checkpoint import RunFolder

log = logging.getLogger("idmm")


class Session:
    """What the stages of one run share: folder, device, processes, precision, interrupts, time spent."""

    def __init__(self, config, began: float | None = None):
        self.config, self.train = config, config.train
        self.seed: int = config.seed
        self.workers: int | None = config.data.workers
        AcceleratorState._reset_state(reset_partial_state=True)  # left by an earlier run in this process
        distributed.forget()
        self.device: str | torch.device = choose_device(self.train)
        with distributed.launched():
            self.processes = PartialState(cpu=self.device == "cpu")
        self.folder = RunFolder(config.out, config, config.resume)
        self.accelerator: Accelerator | None = None
        self.interrupts = Interrupts()
        state = self.folder.state or {}
        self.precision: str | None = state.get("precision")
        self.timed = False  # whether steps were timed for the precision
        self.progress = 0.0  # of the stage, with ``train.minutes``: from 0 to 1
        self.channels_last: bool | None = state.get("channels_last")
        self.started = (clock.now() if began is None else began) - state.get("seconds", 0.0)
        self.steps = 0  # of the stages before this one

    def start(self, method: Method, transform: BatchFn, images: np.ndarray) -> None:
        """Decides memory format and precision, once in a run's life, and starts accelerate.

        Args:
            method: Will be trained.
            transform: Makes a batch of image numbers.
            images: Numbers of the images of the first micro-batch.
        """
        if self.channels_last is None:
            self.channels_last = prefers_channels_last(method.backbone)
        method.to(memory_format=torch.channels_last if self.channels_last else torch.preserve_format)
        if self.accelerator is not None:
            return
        if self.precision is None:
            self.timed = self.train.precision == "auto" and self.device == "cpu"
            self.precision = choose_precision(self.train.precision, method, transform, images, self.device)
        mixed = "no" if self.precision == "fp32" else self.precision
        views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)  # else gradients are held twice
        with distributed.launched():
            self.accelerator = Accelerator(mixed_precision=mixed, cpu=self.device == "cpu", kwargs_handlers=[views])
        self.device = self.accelerator.device
        where = f"{self.device}, " + (f"{distributed.world()} processes, " if distributed.world() > 1 else "")
        log.info("training on %s%s", where, self.precision)

    @property
    def seconds(self) -> float:
        """Time spent on the run, over all resumes; what a killed start did after its last checkpoint is lost."""
        return clock.now() - self.started

    def autocast(self):
        """The context that a forward pass runs in."""
        return contextlib.nullcontext() if self.accelerator is None else self.accelerator.autocast()
