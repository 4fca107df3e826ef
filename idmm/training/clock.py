"""The clocks of a phase: by epochs, or by time (``train.minutes``).

After each step the loop sends ``measure()`` of the first process to ``advance()`` of all. If
``is_up()``, the epoch breaks off. After each epoch ``is_last_epoch()`` decides whether the phase
ends, ``end_phase()`` marks that, and ``is_over()`` stops the loop.
"""

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from idmm.progress import duration

if TYPE_CHECKING:
    from idmm.data.loaders import BatchPlan

WARMUP = 0.1  # progress at which a warm-up ends at the latest
# time of an evaluated image as a share of a training image's, before the first evaluation
FORWARD = 1 / 3


def now() -> float:
    """Return the time of the clock that runs go by (seconds). Tests replace it."""
    return time.monotonic()


@dataclass(frozen=True)
class Due:
    """The images that an evaluation reads, and the epochs from one to the next."""

    images: int
    every: int


@dataclass(frozen=True)
class Length:
    """What the clock of a phase needs to know of it."""

    batches: "BatchPlan"
    steps: int  # of the schedules: those of the recipe's epochs
    evaluations: tuple[Due, ...] = ()
    share: float = 1.0  # of the minutes that remain when the phase begins
    max_epochs: int | None = None
    final_images: int = 0  # to evaluate after the last evaluation of the phase
    final_seconds: float = 0.0  # for everything else after the last step


@dataclass(frozen=True)
class Forecast:
    """The expected end of training."""

    steps: str  # of the phase
    seconds: float  # until its end

    def text(self, step_seconds: float) -> str:
        """Return it in words, with the mean time of a step."""
        end = time.localtime(time.time() + self.seconds)
        return (
            f"{self.steps} of about {step_seconds:.2g} s each. "
            f"Training ends at about {time.strftime('%H:%M', end)}, in {duration(self.seconds)}"
        )


@dataclass
class Timer:
    """Times of a phase, in seconds since the start of the run, over all resumes."""

    start: float  # of the first step
    until: float  # end of the phase, with everything that follows its last step
    progress: float = 0.0
    warmup_end: float | None = None  # progress at the end of the warm-up; None: it is not over
    image_seconds: float = 0.0  # per training image; 0: not measured yet
    eval_image_seconds: float | None = None  # per image of the last evaluation


class ByEpochs:
    """Decides how far a phase is and when it is over, by its epochs."""

    def __init__(self, length: Length):
        self.length = length

    @property
    def planned_epochs(self) -> int | None:
        """Epochs of the phase, None if they depend on the time."""
        return self.length.batches.epochs

    def start(self, seconds: float, steps: int) -> None:
        """Start at a time of the run (seconds), after so many steps of the phase."""

    def schedule_steps(self, step: int) -> tuple[float, float]:
        """Return a step's place in the schedules of the learning rate and of all others."""
        return step, step

    def measure(self, seconds: float, steps: int) -> float:
        """Return the progress from 0 to 1, by time or by ``max_epochs``, whichever is further."""
        return 0.0

    def advance(self, progress: float, steps: int) -> None:
        """Set the progress that :meth:`measure` returned in the first process."""

    def is_up(self) -> bool:
        """Return whether the time is up, so that an epoch ends before it has seen all images."""
        return False

    def is_last_epoch(self, epoch: int, seconds: float, due_images: int) -> bool:
        """Return whether no time remains after an epoch for its evaluation and another step."""
        return epoch + 1 == self.length.batches.epochs

    def end_phase(self, steps: int) -> None:
        """Set the progress after the last epoch."""

    def is_over(self, epoch: int) -> bool:
        """Return whether the phase is over before an epoch."""
        return epoch == self.length.batches.epochs

    def share_after(self, epoch: int) -> float:
        """Return the share of the phase that is over after so many epochs, from 0 to 1."""
        return epoch / self.length.batches.epochs

    def recipe_epochs(self, epochs: int) -> float | None:
        """Return the progress in the recipe's ``epochs``, None if epochs are counted."""
        return None

    def count_step(self, image_seconds: float) -> None:
        """Take the mean time of a training image (seconds)."""

    def count_evaluation(self, image_seconds: float) -> None:
        """Take the mean time of an evaluated image (seconds)."""

    def remaining_text(self, seconds: float) -> str:
        """Return the end of the progress bar's text."""
        return ""

    def forecast(self, step_seconds: float, seconds: float, epoch: int, steps: int) -> Forecast:
        """Return the expected end of training at a time of the run, after so many steps."""
        batches = self.length.batches
        image_seconds = step_seconds * batches.steps_per_epoch / batches.count
        images = 0
        for one in self.length.evaluations:
            images += one.images * (-(-batches.epochs // one.every) - epoch // one.every)
        remaining_steps = self.length.steps - steps
        remaining = remaining_steps * step_seconds + FORWARD * image_seconds * images
        return Forecast(f"{self.length.steps} steps", remaining)

    def saved(self) -> dict[str, Any] | None:
        """Return what a checkpoint holds of the clock."""
        return None

    def load(self, saved: dict[str, Any] | None, at_end: bool) -> None:
        """Continue from a checkpoint. ``at_end``: it was saved after the phase's last epoch."""


class ByClock(ByEpochs):
    """Goes by ``train.minutes``, from 0 at the first step to 1 at the end, or by ``max_epochs``."""

    def __init__(self, length: Length, minutes: float, warmup_epochs: float):
        super().__init__(length)
        self.minutes = minutes
        steps_per_epoch = length.batches.steps_per_epoch
        self.warmup_steps = round(warmup_epochs * steps_per_epoch)
        self.max_steps = length.max_epochs and length.max_epochs * steps_per_epoch
        self.timer = Timer(0.0, 0.0)
        self.is_started = False
        self.has_ended = False

    @property
    def planned_epochs(self) -> None:
        return None

    def start(self, seconds: float, steps: int) -> None:
        if not self.is_started:
            until = seconds + self.length.share * (60 * self.minutes - seconds)
            warmup_end = None if self.warmup_steps else 0.0
            self.timer = Timer(seconds, until, warmup_end=warmup_end)
            self.is_started = True
        self.advance(self.timer.progress, steps)

    def eval_seconds(self, images: int) -> float:
        """Return the time to evaluate that many images."""
        each = self.timer.eval_image_seconds
        if each is None:
            each = FORWARD * self.timer.image_seconds
        return images * each

    def remaining(self, seconds: float) -> float:
        """Return the time that remains for training steps at a time of the run."""
        length = self.length
        final_images = length.final_images + sum(one.images for one in length.evaluations)
        return self.timer.until - length.final_seconds - self.eval_seconds(final_images) - seconds

    def schedule_steps(self, step: int) -> tuple[float, float]:
        steps = self.length.steps
        return steps * self.schedule_progress(step), steps * self.timer.progress

    def schedule_progress(self, steps: int) -> float:
        """Return the progress of the learning rate's schedule, whose first tenth is a warm-up."""
        progress = self.timer.progress
        warmup_end = self.timer.warmup_end
        if warmup_end is None:
            return WARMUP * max(steps / self.warmup_steps, progress / WARMUP)
        first = WARMUP if self.warmup_steps else 0.0
        return first + (1 - first) * (progress - warmup_end) / max(1e-9, 1 - warmup_end)

    def measure(self, seconds: float, steps: int) -> float:
        remaining = self.remaining(seconds)
        elapsed = seconds - self.timer.start
        by_time = elapsed / (elapsed + remaining) if remaining > 0 else 1.0
        by_steps = steps / self.max_steps if self.max_steps else 0.0
        return min(1.0, max(self.timer.progress, by_time, by_steps))

    def advance(self, progress: float, steps: int) -> None:
        self.timer.progress = progress
        is_warm = steps >= self.warmup_steps or progress >= WARMUP
        if self.timer.warmup_end is None and is_warm:
            self.timer.warmup_end = progress

    def is_up(self) -> bool:
        return self.timer.progress >= 1

    def is_last_epoch(self, epoch: int, seconds: float, due_images: int) -> bool:
        step_seconds = self.timer.image_seconds * self.length.batches.batch_size
        needed_seconds = self.eval_seconds(due_images) + step_seconds
        return self.is_up() or self.remaining(seconds) < needed_seconds

    def end_phase(self, steps: int) -> None:
        self.has_ended = True
        self.advance(1.0, steps)

    def is_over(self, epoch: int) -> bool:
        return self.has_ended

    def share_after(self, epoch: int) -> float:
        return self.timer.progress

    def recipe_epochs(self, epochs: int) -> float:
        return self.timer.progress * epochs

    def count_step(self, image_seconds: float) -> None:
        self.timer.image_seconds = image_seconds

    def count_evaluation(self, image_seconds: float) -> None:
        self.timer.eval_image_seconds = image_seconds

    def remaining_text(self, seconds: float) -> str:
        return f", {duration(self.remaining(seconds))} to go"

    def forecast(self, step_seconds: float, seconds: float, epoch: int, steps: int) -> Forecast:
        batches = self.length.batches
        by_epochs = step_seconds * (batches.epochs * batches.steps_per_epoch - steps)
        remaining = max(0.0, min(self.remaining(seconds), by_epochs))
        count = steps + remaining / step_seconds
        return Forecast(f"about {count:.0f} steps by train.minutes {self.minutes:g}", remaining)

    def saved(self) -> dict[str, Any]:
        return asdict(self.timer)

    def load(self, saved: dict[str, Any] | None, at_end: bool) -> None:
        assert saved is not None  # of a run with train.minutes
        self.timer = Timer(**saved)
        self.is_started = True
        self.has_ended = at_end
