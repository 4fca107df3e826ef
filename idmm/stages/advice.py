"""What is unwise about a run, in lines for the log that say what to set. No torch: the plan of a grid asks, too."""

import math
from typing import Any

from idmm.config.recipes import METHODS
from idmm.data.split import counted
from idmm.stages import Phase

FEW_STEPS, ENOUGH_STEPS = 200, 500  # in all; enough to begin with, a good run has thousands
LARGE = 0.26  # a batch is large above this share of the images (the paper's 512 of 2,040 is not) ...
SMALLEST, SMALLEST_COMPARED = 8, 32  # ... and advised as small as this; as that where its images are compared
USUAL = 64  # images a batch, with which short runs do well


def advice(config: Any, phases: list[Phase], images: int) -> list[str]:
    """Returns what is unwise about a run on so many training images; ``init`` is as it will be."""
    lines = of_length(config, phases, images)
    for phase in phases:
        filled, passes = min(phase.batch_size, images), config.train.accumulate
        if passes > filled:
            lines.append(f"train.accumulate: {passes} passes, but a step has {filled} images; wanted at most {filled}")
    if getattr(config.model, "freeze", False) and config.init is None:
        lines.append("model.freeze: true without --init: the classifier alone learns, on a backbone of random weights")
    return list(dict.fromkeys(lines))


def of_length(config: Any, phases: list[Phase], images: int) -> list[str]:
    """Returns a line for each phase with a batch too large for so many images, or where the run has few steps."""
    minutes = config.train.minutes is not None  # then the steps are not known
    few = not minutes and sum(phase.steps(images) for phase in phases) < FEW_STEPS
    sgd = "; SGD wants far more steps than AdamW: --train.optimizer adamw" if config.train.optimizer == "sgd" else ""
    lines = []
    for phase in phases:
        batch, epochs = _better(config, phase, images, ENOUGH_STEPS / len(phases) if few else 0)
        each, total = phase.steps(images) // phase.epochs, phase.steps(images)
        faults = ["few to learn from"] if few else []
        if _large(config, phase, images):
            faults.append(f"a batch of {phase.batch_size} is more than a quarter of the {images} images")
        if faults:
            changes = {"batch_size": batch} if batch != phase.batch_size else {}
            shown = f"{phase.label}: {counted(each, 'step')} an epoch"
            if minutes:
                tried = _flags(phase, changes)
            else:
                changes |= {"epochs": epochs} if epochs != phase.epochs else {}
                tried = f"{_flags(phase, changes)} ({-(-images // batch) * epochs} steps in all)"
                shown += f", {total} in all"
            shown += f": {', and '.join(faults)}"
            lines.append(f"{shown}; try {tried}{sgd}")
    return lines


def _large(config: Any, phase: Phase, images: int) -> bool:
    return phase.batch_size > max(LARGE * images, _smallest(config))


def _smallest(config: Any) -> int:
    compared = hasattr(config, "method") and METHODS[config.method.name].within_pass
    return SMALLEST_COMPARED if compared else SMALLEST


def _better(config: Any, phase: Phase, images: int, steps: float) -> tuple[int, int]:
    """Returns a batch size that suits so many images, and the epochs with which it makes so many steps or more."""
    batch = phase.batch_size
    if steps or _large(config, phase, images):
        batch = suited_batch(min(batch, USUAL), images, _smallest(config))
    return batch, max(phase.epochs, math.ceil(steps / -(-images // batch)))


def suited_batch(most: int, images: int, least: int = SMALLEST) -> int:
    """Returns the images of a step that suit so many in all: an eighth of them, a power of two, within bounds."""
    return min(most, max(least, 2 ** int(math.log2(max(1, images / 8)))))


def _flags(phase: Phase, changes: dict[str, int]) -> str:
    section = phase.field.partition(".")[0]
    if section.startswith("stages["):
        return ", ".join(f"{key}: {value}" for key, value in changes.items()) + f" in {section} of --stages"
    return " ".join(f"--train.{key} {value}" for key, value in changes.items())
