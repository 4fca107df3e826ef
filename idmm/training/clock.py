"""``train.minutes``: the progress of training by the clock, from 0 at the first step to 1 at its
end."""

import time
from dataclasses import dataclass

WARMUP = 0.1  # progress at which a warm-up ends at the latest
# time of an evaluated image as a share of a training image's, before the first evaluation
FORWARD = 1 / 3


def now() -> float:
    """Return the time of the clock that runs go by (seconds). Tests replace it."""
    return time.monotonic()


@dataclass
class Timer:
    """The progress of a phase. All times are seconds since the start of the run, over all
    resumes."""

    start: float  # of the first step
    until: float  # end of the phase, with everything that follows its last step
    warmup_steps: int
    max_steps: int | None = None  # steps that end the phase before its time; None: no limit
    final_images: int = 0  # to evaluate after the last step
    final_seconds: float = 0.0  # for everything else after the last step

    progress: float = 0.0
    warmup_end: float | None = None  # progress at the end of the warm-up; None: it is not over
    image_seconds: float = 0.0  # per training image; 0: not measured yet
    eval_image_seconds: float | None = None  # per image of the last evaluation

    def __post_init__(self):
        if not self.warmup_steps:
            self.warmup_end = 0.0

    def eval_seconds(self, images: int) -> float:
        """Return the time to evaluate that many images."""
        if self.eval_image_seconds is None:
            per_image = FORWARD * self.image_seconds
        else:
            per_image = self.eval_image_seconds
        return images * per_image

    def remaining(self, seconds: float) -> float:
        """Return the time that remains for training steps at a time of the run."""
        return self.until - self.final_seconds - self.eval_seconds(self.final_images) - seconds

    def measure(self, seconds: float, steps: int) -> float:
        """Return the progress at a time of the run, after that many steps of the phase. It never
        falls."""
        remaining = self.remaining(seconds)
        elapsed = seconds - self.start
        if remaining > 0:
            by_time = elapsed / (elapsed + remaining)
        else:
            by_time = 1.0
        by_steps = steps / self.max_steps if self.max_steps else 0.0
        return min(1.0, max(self.progress, by_time, by_steps))

    def advance(self, progress: float, steps: int) -> None:
        """Set the progress after that many steps, and the end of the warm-up once it is reached."""
        self.progress = progress
        if self.warmup_end is None and (steps >= self.warmup_steps or progress >= WARMUP):
            self.warmup_end = progress

    def schedule_progress(self, steps: int) -> float:
        """Return the progress of the learning rate's schedule, whose first tenth is a warm-up."""
        if self.warmup_end is None:
            return WARMUP * max(steps / self.warmup_steps, self.progress / WARMUP)
        first = WARMUP if self.warmup_steps else 0.0
        return first + (1 - first) * (self.progress - self.warmup_end) / max(
            1e-9, 1 - self.warmup_end
        )
