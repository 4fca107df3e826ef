"""What all phases of one run share: its folder, device, processes, precision, interrupts and
time."""

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState

from idmm import distributed
from idmm.batch import BatchFn
from idmm.data.device_views import place_of, place_views
from idmm.errors import UserError, in_short
from idmm.methods.base import Method
from idmm.models.build import prefers_channels_last
from idmm.progress import log
from idmm.training import clock
from idmm.training.device import choose_device
from idmm.training.log import Interrupts
from idmm.training.precision import choose_precision
from idmm.training.run_folder import RunFolder


class RunContext:
    """What all phases of one open run share.

    Args:
        config: The resolved config.
        started_at: When the run began (``clock.now()``).

    Attributes:
        folder: The run's folder, locked by this run.
        is_new: Whether training starts at its first step, not at a saved state.
        first_phase: Number of the phase that training continues in, from 1.
        device: Where tensors go.
        accelerator: None until the first phase starts.
        interrupts: Ctrl-C and other stop signals.
        precision: fp32, bf16 or fp16; None until the first phase of a new run starts.
        channels_last: Memory format, likewise.
        earlier_steps: Steps of the phases before this one.
        batch_fn: Makes the batches of the phase, see :meth:`place_views`. None before.

    Raises:
        UserError: The device is missing, or the folder cannot be used, see :class:`RunFolder`.
    """

    def __init__(self, config, started_at: float):
        self.train = config.train
        self.seed: int = config.seed
        self.workers: int | None = config.data.workers
        # from an earlier run in this process
        AcceleratorState._reset_state(reset_partial_state=True)
        distributed.forget()
        self.device: str | torch.device = choose_device(self.train)
        with _launched():
            PartialState(cpu=self.device == "cpu")
        self.folder = RunFolder(config.out, config, config.resume)
        self.is_new = self.folder.state is None
        self.accelerator: Accelerator | None = None
        self.interrupts = Interrupts()
        state = self.folder.state
        self.first_phase = getattr(state, "stage", 1)
        self.precision = getattr(state, "precision", None)
        self.channels_last = getattr(state, "channels_last", None)
        self.started_at = started_at - getattr(state, "seconds", 0.0)
        self.earlier_steps = 0
        self.batch_fn: BatchFn | None = None
        self._views = getattr(state, "views", None)

    def start(self, method: Method, transform: BatchFn, images: np.ndarray) -> None:
        """Choose memory format and precision, once per run and not again after a resume, and start
        accelerate.

        Args:
            method: To be trained.
            transform: Makes a batch from image numbers.
            images: Numbers of the images of the first micro-batch.
        """
        if self.channels_last is None:
            self.channels_last = prefers_channels_last(method.backbone)
        method.to(
            memory_format=torch.channels_last if self.channels_last else torch.preserve_format
        )
        if self.accelerator is not None:
            return
        if self.precision is None:
            self.precision = choose_precision(
                self.train.precision, method, transform, images, self.device
            )
        mixed = "no" if self.precision == "fp32" else self.precision
        # else gradients are held twice
        views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        with _launched():
            self.accelerator = Accelerator(
                mixed_precision=mixed, cpu=self.device == "cpu", kwargs_handlers=[views]
            )
        self.device = self.accelerator.device
        if distributed.world() > 1:
            processes = f"{distributed.world()} processes, "
        else:
            processes = ""
        log.info("training on %s, %s%s", self.device, processes, self.precision)

    def place_views(self, transform: BatchFn) -> BatchFn:
        """Return what makes the batches of a phase, on the device or by loader workers, as the run
        decided once."""
        self._views = self.views
        self.batch_fn = None  # frees the images of the phase before
        self.batch_fn = place_views(transform, self.device, self._views, self.workers)
        return self.batch_fn

    @property
    def views(self) -> str | None:
        """Where views are made: device or loader. None before it is decided."""
        if self.batch_fn is None:
            return self._views
        return place_of(self.batch_fn)

    @property
    def seconds(self) -> float:
        """Time spent on the run over all resumes, less that after the last checkpoint of a killed
        process."""
        return clock.now() - self.started_at

    def autocast(self):
        """Return the context for a forward pass."""
        if self.accelerator is None:
            return contextlib.nullcontext()
        return self.accelerator.autocast()


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """Raise UserError if accelerate cannot start inside the block.

    Its environment variables may contradict each other, as those that a scheduler's shell leaves
    behind.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        advice = "Unset WORLD_SIZE, RANK, LOCAL_RANK and ACCELERATE_*, or start the command with torchrun"
        fault = UserError(f"environment: accelerate cannot start ({in_short(error)}). {advice}")
        fault.shared = False  # other processes may not exist
        raise fault from None
