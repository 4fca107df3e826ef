"""``train.minutes``: how far training is by the clock, from 0 at the first step to 1 where it has to end."""

import time
from dataclasses import asdict, dataclass

WARMUP = 0.1  # of the progress, at which a warm-up ends at the latest
FORWARD = 1 / 3  # of a training image's time: an evaluated image, until the first evaluation is measured


def now() -> float:
    """Returns the time of the clock that runs go by (seconds); tests replace it."""
    return time.monotonic()


@dataclass
class Timer:
    """The progress of a phase of a run. All times are seconds, and count from the run's start over all resumes."""

    start: float  # of the first step
    until: float  # when the phase is over, with all that follows its last step
    warmup_steps: int
    max_steps: int | None = None  # which end the phase before its time; None: only time does
    images: int = 0  # that are evaluated after the last step
    rest: float = 0.0  # time of all else that follows the last step

    progress: float = 0.0
    warm: float | None = None  # progress at which the warm-up ended; None: it goes on
    image: float = 0.0  # time of an image in training; 0: not measured yet
    look: float | None = None  # time of an image in the last evaluation

    def __post_init__(self):
        if not self.warmup_steps:
            self.warm = 0.0

    def state(self) -> dict:
        """Returns what a resumed run needs, see :meth:`resume`."""
        return {name: value for name, value in asdict(self).items() if name in _SAVED}

    def resume(self, state: dict) -> None:
        """Goes on from a saved state."""
        for name in _SAVED:
            setattr(self, name, state[name])

    def evaluating(self, images: int) -> float:
        """Returns the time to evaluate so many images."""
        return images * (FORWARD * self.image if self.look is None else self.look)

    def left(self, seconds: float) -> float:
        """Returns the time that is left for training steps."""
        return self.until - self.rest - self.evaluating(self.images) - seconds

    def measure(self, seconds: float, steps: int) -> float:
        """Returns the progress at a time of the run, after so many steps of the phase; it never falls."""
        left, spent = self.left(seconds), seconds - self.start
        by_time = spent / (spent + left) if left > 0 else 1.0
        by_steps = steps / self.max_steps if self.max_steps else 0.0
        return min(1.0, max(self.progress, by_time, by_steps))

    def advance(self, progress: float, steps: int) -> None:
        """Sets the progress after so many steps, and the end of the warm-up when it is reached."""
        self.progress = progress
        if self.warm is None and (steps >= self.warmup_steps or progress >= WARMUP):
            self.warm = progress

    def of_schedule(self, steps: int) -> float:
        """Returns the share of the learning rate's schedule that is over, of which a warm-up is the first tenth."""
        if self.warm is None:
            return WARMUP * max(steps / self.warmup_steps, self.progress / WARMUP)
        first = WARMUP if self.warmup_steps else 0.0
        return first + (1 - first) * (self.progress - self.warm) / max(1e-9, 1 - self.warm)


_SAVED = ("start", "progress", "warm", "image", "look")
