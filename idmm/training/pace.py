"""The time of steps, from which the end of training is expected."""

from idmm.data.loaders import AHEAD

# measured steps, or time, after which the log has the expected end
PACE_STEPS = 5
PACE_SECONDS = 3.0


class Pace:
    """The time of steps in this process.

    The first step is left out: it compiles and waits for the workers.

    Args:
        workers: Loader workers.
        accumulate: Micro-batches per step.
    """

    def __init__(self, workers: int, accumulate: int):
        self.steps = -1  # -1 before the first step
        self.seconds = 0.0
        self.images = 0
        self.is_known = False  # whether step_seconds() returned a time
        # steps after the first one whose batches are ready by then, and their time
        self.ready_steps = AHEAD * workers // accumulate
        self.ready_seconds = 0.0
        self.enough_steps = max(
            PACE_STEPS, workers
        )  # workers that started together finish together

    def restart(self) -> None:
        """Measure anew, after steps have changed."""
        self.steps = -1
        self.seconds = 0.0
        self.images = 0

    def add(self, seconds: float, images: int) -> None:
        """Count a step."""
        if self.steps >= 0:
            self.seconds += seconds
            self.images += images
        self.steps += 1
        if self.steps == self.ready_steps:
            self.ready_seconds = self.seconds

    @property
    def image_seconds(self) -> float | None:
        """Mean time of an image. None: not measured yet."""
        if not self.images:
            return None
        return self.seconds / self.images

    def step_seconds(self) -> float | None:
        """Return the mean time of a step, once. None: too few steps so far, or returned before."""
        if self.is_known or not self.images:
            return None
        steps = self.steps - self.ready_steps
        seconds = self.seconds - self.ready_seconds
        if steps < self.enough_steps:
            steps = self.steps
            seconds = self.seconds
            if seconds < PACE_SECONDS:
                return None
        self.is_known = True
        return seconds / steps
