"""A clock for runs by ``train.minutes``, which only the work that a test names moves."""

import contextlib

import pytest

from idmm.evaluation.evaluators import Accuracy
from idmm.methods.base import Method
from idmm.training import clock
from idmm.training.run_folder import RunFolder


class FakeClock:
    """The seconds that each step, checkpoint, record, evaluated image and the start take."""

    def __init__(self, step=4.0):
        self.seconds = 0.0
        self.step = step
        self.checkpoint = 0.0
        self.record = 0.0
        self.evaluated_image = 0.0
        self.start = 0.0

    def now(self):
        seconds = self.seconds
        self.seconds += self.start
        self.start = 0.0
        return seconds

    def slow_down(self, patch, owner, name, duration):
        """Lets each call of a method take ``duration(object)`` seconds."""
        original = getattr(owner, name)

        def slow(owner, *args):
            self.seconds += duration(owner)
            return original(owner, *args)

        patch.setattr(owner, name, slow)

    @contextlib.contextmanager
    def ticking(self):
        """Runs in the block go by this clock."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "now", self.now)
            self.slow_down(patch, Method, "before_step", lambda _: self.step)
            self.slow_down(patch, RunFolder, "save_state", lambda _: self.checkpoint)
            self.slow_down(patch, RunFolder, "add_metrics", lambda _: self.record)
            self.slow_down(
                patch, Accuracy, "__call__", lambda accuracy: self.evaluated_image * accuracy.images
            )
            yield self


@pytest.fixture
def fake_clock():
    with FakeClock().ticking() as fake:
        yield fake
