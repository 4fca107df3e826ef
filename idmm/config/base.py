"""What the sections of a config have in common."""

from typing import dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_checked = dataclass(
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True),
    kw_only=True,
)


@dataclass_transform(kw_only_default=True)
def section(cls: type) -> type:
    """Makes a class of keys with their checks; a key without a docstring here has its base class's."""
    made = _checked(cls)
    for name, info in made.__pydantic_fields__.items():
        bases = [getattr(base, "__pydantic_fields__", {}).get(name) for base in made.__mro__]
        info.description = next((base.description for base in bases if base and base.description), None)
    return made


# What may differ when a run is taken up again: results do not depend on it.
FREE = ("out", "resume", "data.workers", "data.cache", "data.cache_dir", "data.download", "data.allow_size_mismatch")
FREE += ("train.device", "train.save_minutes", "train.tensorboard", "train.monitor_every", "train.monitor_images")
FREE += ("device",)  # of a probe

# Keys added after 0.1.0, with the values that mean what it did: its runs and grids lack them and still compare.
NEW_KEYS = {
    "data.range": "auto",  # where a run says nothing of its range, as those of 0.1.0, auto goes on with full
    "train.clip_grad_mode": "norm",
    "train.weight_decay_end": None,
    "train.keep": "last",
    "train.class_weights": "none",
    "method.classifier_init_std": None,
    "method.stop_grad_conv1": None,
    "views.solarize_prob": 0.0,
    "views.interpolation": "bicubic",
    **dict.fromkeys(f"data.{name}" for name in ("exclude", "labels", "groups", "folds", "fold")),
}


def check_range(values: list[float], low: float, high: float | None, name: str) -> None:
    """Raises ValueError unless values are two numbers, low < first <= second (<= high)."""
    first, second = values
    if not low < first <= second or (high is not None and second > high):
        bound = f" <= {high:g}" if high is not None else ""
        raise ValueError(f"{name} is {values}, wanted [min, max] with {low:g} < min <= max{bound}")


def check_jitter(values: list[float]) -> None:
    """Raises ValueError unless values are strengths of brightness, contrast, saturation and hue."""
    if min(values) < 0 or values[3] > 0.5:
        raise ValueError(f"jitter is {values}, wanted four numbers >= 0, the last (hue) <= 0.5")
