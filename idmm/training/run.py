"""One run: its config, network, phases, folder, device, processes, precision and time."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState
from numpy.typing import NDArray

from idmm import distributed
from idmm.batch import BatchFn
from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig
from idmm.config.base import CROP_MODES
from idmm.config.commands import ProbeConfig
from idmm.config.phases import Phase
from idmm.data.device_views import place_of, place_views
from idmm.data.fingerprint import listed_again
from idmm.data.image_store import choose_crop_mode
from idmm.data.images import CentreCrop, StoredSize
from idmm.data.split import Listing
from idmm.data.store import Stores, store_images
from idmm.errors import Interrupted, UserError, in_short
from idmm.methods.base import Method
from idmm.models.build import prefers_channels_last
from idmm.models.spec import ModelSpec
from idmm.progress import log
from idmm.text import counted
from idmm.training import clock
from idmm.training.device import choose_device
from idmm.training.log import Interrupts, logging_to
from idmm.training.precision import choose_precision
from idmm.training.run_folder import RunFolder

TrainConfig = PretrainConfig | FinetuneConfig | DetectConfig | SegmentConfig
AnyConfig = TrainConfig | ProbeConfig
C = TypeVar("C", bound=AnyConfig, covariant=True)


class Run(Generic[C]):
    """The one object of a run. It is resolved first, opened second, and then trains or measures.

    Args:
        config: The resolved config, which config.yaml holds.
        spec: Of the backbone, with the weights that it starts from.
        phases: The parts of the run, with the keys that the user gave. None: those of the config.
        notes: Lines for the log on everything that was filled in.
        started_at: When the run began (``clock.now()``), for its time limit. None: now.

    Attributes:
        spec: Its mean and std are known once the images are stored.
        crop_mode: timm's name of the config's. 'auto' becomes another once the images are stored.
        folder: The run's folder, locked by this run. The following exist in an open run only.
        device: Where tensors go.
        interrupts: Ctrl-C and other stop signals.
        is_new: Whether training starts at its first step, not at a saved state.
        first_phase: Number of the phase that training continues in, from 1.
        accelerator: None until the first phase starts.
        precision: fp32, bf16 or fp16. None until the first phase of a new run starts.
        channels_last: Memory format, likewise.
        earlier_steps: Steps of the phases before this one.
        batch_fn: Makes the batches of the phase, see :meth:`place_views`. None before.
    """

    folder: RunFolder
    device: str
    interrupts: Interrupts

    def __init__(
        self,
        config: C,
        spec: ModelSpec,
        phases: Sequence[Phase] | None = None,
        notes: Sequence[str] = (),
        started_at: float | None = None,
    ):
        self.config = config
        self.spec = spec
        self.phases = tuple(config.phases if phases is None else phases)
        self.notes = tuple(notes)
        self.started_at = clock.now() if started_at is None else started_at
        self.crop_mode = CROP_MODES.get(config.crop_mode, "auto")
        self.is_new = True
        self.first_phase = 1
        self.accelerator: Accelerator | None = None
        self.precision: str | None = None
        self.channels_last: bool | None = None
        self.earlier_steps = 0
        self.batch_fn: BatchFn | None = None
        self._views: str | None = None

    # ------------------------------------------------------------------ the folder
    @contextlib.contextmanager
    def opened(self: "Run[TrainConfig]") -> Iterator[None]:
        """Open folder, log, device and interrupts, and close them however the block ends.

        Raises:
            UserError: The device is missing, or the folder cannot be used, see
                :class:`RunFolder`.
            Interrupted: Ctrl-C or another stop signal, before the first step.
        """
        # from an earlier run in this process
        AcceleratorState._reset_state(reset_partial_state=True)
        distributed.forget()
        self.device = choose_device(self.config.train)
        with _launched():
            PartialState(cpu=self.device == "cpu")
        self.interrupts = Interrupts()
        with self.opened_folder(), self.interrupts:
            state = self.folder.state
            if state is not None:
                self.is_new = False
                self.first_phase = state.stage
                self.precision = state.precision
                self.channels_last = state.channels_last
                self.started_at -= state.seconds
                self._views = state.views
            try:
                yield
            except KeyboardInterrupt:
                checkpoint = self.folder.checkpoint_note or ". There is no checkpoint yet"
                raise Interrupted(
                    f"{self.config.out}: interrupted{checkpoint}. Repeat the command to continue"
                ) from None

    @contextlib.contextmanager
    def opened_folder(self) -> Iterator[None]:
        """Open the run's folder and log to it inside the block. Errors as of :class:`RunFolder`."""
        assert self.config.out is not None  # of a resolved config
        self.folder = RunFolder(self.config.out, self.config, self.config.resume)
        with self.folder, logging_to(self.folder.path):
            yield

    def finished_result(self, list_images: Callable[[], Listing]) -> dict[str, Any]:
        """Return the result of a finished run.

        Raises:
            UserError: The images changed since.
        """
        listing = listed_again(list_images, self.config.data)
        if listing is not None:
            self.folder.check_listing(self._used(listing))
        log.info(f"{self.folder.path}: finished already, nothing to do")
        return self.folder.result()

    # ------------------------------------------------------------------ the images
    def store(self, listing: Listing, folder: RunFolder | None) -> Stores:
        """Store the images of the run. A resumed one keeps the values saved in its ``folder``.

        Returns:
            The stores, with val and test at the size of the last phase.

        Raises:
            UserError: Broken images, or a resumed run whose image i is no longer image i.
        """
        saved = None
        if folder is not None:
            for note in self.notes:  # not before an error about the list of images
                log.info(note)
            saved = folder.image_values()
        if saved is None:
            saved = {"range": None, "mean": None, "std": None}
        if self.crop_mode == "auto":
            self.crop_mode = CROP_MODES[choose_crop_mode(listing.train)]
            log.info(f"images: crop_mode {self.crop_mode}, by the shapes of the training images")
        sizes = dict.fromkeys(phase.size for phase in self.phases)
        largest = max(sizes)
        stores = store_images(
            self._used(listing),
            self.config.data,
            self._stored(self.config.train_side(largest), largest),
            {size: self._stored(self.config.eval_side(size), size) for size in sizes},
            value_range=saved["range"] or self.spec.range,
            mean=self.spec.mean or saved["mean"],
            std=self.spec.std or saved["std"],
        ).at(self.phases[-1].size)
        self._log_values(stores)
        if folder is not None:
            folder.check_images(stores)
            counts = ", ".join(f"{len(store)} {part}" for part, store in stores.parts.items())
            how = "decoded at each use" if stores.train.decodes else "decoded once"
            log.info(f"images: {counts} of {self.config.data.name} ({how})")
        self.spec = replace(self.spec, mean=stores.mean, std=stores.std)
        return stores

    def _used(self, listing: Listing) -> Listing:
        """Return the splits whose pixels the run needs."""
        if self.config.needs.eval_pixels:
            return listing
        return replace(listing, val=None, test=None)

    def crop(self, size: int) -> CentreCrop:
        """Return the crop of evaluation at a size (pixels), once its mode is chosen."""
        crop_pct = self.config.crop_pct
        return CentreCrop.of(size, crop_pct, self.crop_mode, self.spec.mean or ())

    def _stored(self, side: int | None, size: int) -> StoredSize:
        """Return what is stored of images: a short side, or a centre crop of ``size`` pixels.

        All of them is stored if the mean that pads them is not known yet.
        """
        if side is None and (self.spec.mean or self.crop_mode != "border"):
            return self.crop(size)
        return side

    def _log_values(self, stores: Stores) -> None:
        """Log the range, mean and std of the images' values."""
        for part, store in stores.parts.items():
            if not store.high_bit:
                continue
            pairs = np.reshape(np.asarray(store.value_range), (-1, 2))
            ranges = ", ".join(f"[{low:g}, {high:g}]" for low, high in pairs.tolist())
            log.info(
                f"images: {store.high_bit:,} of {counted(len(store), f'{part} image')} have "
                f"more than 8 bits. Their values {ranges} become 0 to 1"
            )
            config: AnyConfig = self.config
            uses_randaugment = isinstance(config, FinetuneConfig) and config.augment.randaugment
            if part == "train" and uses_randaugment:
                log.info(
                    f"images: augment.randaugment: left out for the {store.high_bit} of more than "
                    "8 bits, which it would cut to 8"
                )
        for name, known, values in (
            ("mean", self.spec.mean, stores.mean),
            ("std", self.spec.std, stores.std),
        ):
            if known is None:
                rounded = [float(f"{value:.4g}") for value in values]
                log.info(
                    f"images: {name} {rounded} of the channels, measured from the training images"
                )

    # ------------------------------------------------------------------ training
    def start(
        self: "Run[TrainConfig]", method: Method, transform: BatchFn, images: NDArray[np.int64]
    ) -> Accelerator:
        """Choose memory format and precision, and start accelerate.

        They are chosen once per run and not again after a resume.

        Args:
            method: To be trained.
            transform: Makes a batch from image numbers.
            images: Numbers of the images of the first micro-batch, [B].
        """
        if self.channels_last is None:
            self.channels_last = prefers_channels_last(method.backbone)
        memory_format = torch.preserve_format
        if self.channels_last:
            memory_format = torch.channels_last
        method.to(memory_format=memory_format)
        if self.accelerator is not None:
            return self.accelerator
        if self.precision is None:
            requested = self.config.train.precision
            self.precision = choose_precision(requested, method, transform, images, self.device)
        mixed = "no" if self.precision == "fp32" else self.precision
        # else gradients are held twice
        handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
        with _launched():
            self.accelerator = Accelerator(
                mixed_precision=mixed, cpu=self.device == "cpu", kwargs_handlers=[handler]
            )
        self.device = str(self.accelerator.device)
        processes = ""
        if distributed.world() > 1:
            processes = f"{distributed.world()} processes, "
        log.info(f"training on {self.device}, {processes}{self.precision}")
        return self.accelerator

    def place_views(self, transform: BatchFn) -> BatchFn:
        """Return what makes the batches of a phase, as the run decided once.

        It is the device, or loader workers.
        """
        self._views = self.views
        self.batch_fn = None  # frees the images of the phase before
        self.batch_fn = place_views(transform, self.device, self._views, self.config.data.workers)
        return self.batch_fn

    @property
    def mean(self) -> list[float]:
        """Of each channel, on values in [0, 1], once the images are stored."""
        assert self.spec.mean is not None
        return self.spec.mean

    @property
    def std(self) -> list[float]:
        """Likewise the standard deviation."""
        assert self.spec.std is not None
        return self.spec.std

    @property
    def views(self) -> str | None:
        """Where views are made: device or loader. None before it is decided."""
        if self.batch_fn is None:
            return self._views
        return place_of(self.batch_fn)

    @property
    def seconds(self) -> float:
        """Time spent on the run over all resumes.

        Time after the last checkpoint of a killed process is not counted.
        """
        return clock.now() - self.started_at

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for a forward pass."""
        if self.accelerator is None:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self.accelerator.autocast()
        return context


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """Raise UserError if accelerate cannot start inside the block.

    Its environment variables may contradict each other, as those that a scheduler's shell leaves
    behind.
    """
    try:
        yield
    except (ValueError, ImportError) as error:
        fault = UserError.of(
            "environment",
            f"accelerate cannot start ({in_short(error)})",
            "Unset WORLD_SIZE, RANK, LOCAL_RANK and ACCELERATE_*, "
            "or start the command with torchrun",
        )
        fault.shared = False  # other processes may not exist
        raise fault from None
