"""What a config alone says about its run: the parts of the run, and the images that it needs."""

import math
from dataclasses import dataclass

RATIO = (3 / 4, 4 / 3)  # smallest and largest aspect ratio of random crops


@dataclass(frozen=True)
class Phase:
    """The part of a run at one image size. The loop is called once per phase.

    ``stages`` of the config and ``stage`` in metrics.jsonl count phases.
    """

    number: int  # from 1
    field: str  # of the config, that holds the size
    label: str  # for log lines
    size: int  # side of the images (pixels)
    epochs: int
    batch_size: int  # images per optimizer step
    lr: float | None = None  # peak learning rate; None before the config is resolved
    # of evaluation: the field of each size, and the size (pixels)
    other_sizes: tuple[tuple[str, int], ...] = ()

    def steps(self, images: int) -> int:
        """Return the optimizer steps on that many training images.

        The last, smaller batch of an epoch is one.
        """
        return self.epochs * -(-images // self.batch_size)


@dataclass(frozen=True)
class Needs:
    """The images that a run needs."""

    labels: bool = True  # of the training images
    test: bool = True  # images to evaluate on
    val: bool = False  # images to choose the best epoch on, besides those that are reported
    unlabelled: bool = False  # training images without labels, too
    eval_pixels: bool = True  # the pixels of val and test images
    several: bool = False  # at least two training images


def short_side_bound(size: int, smallest_scale: float) -> int:
    """Return the short side (pixels) that is enough to store: no random crop is enlarged for it."""
    return math.ceil(size / math.sqrt(smallest_scale * RATIO[0]))
