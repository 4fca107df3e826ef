"""What the sections of a config have in common."""

from typing import Annotated, Any, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_checked = dataclass(
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True),
    kw_only=True,
)


class FieldError(ValueError):
    """What a check of several keys found wrong with one of them.

    Args:
        field: The key, within the section that is checked.
        text: What it is and what is wanted.

    Attributes:
        each: It and others that were found with it, all of which are told.
    """

    def __init__(self, field: str, text: str):
        super().__init__(f"{field}: {text}")
        self.field, self.text = field, text
        self.each = [self]


@dataclass_transform(kw_only_default=True)
def section(cls: type) -> type:
    """Makes a class of keys with their checks; a key without a docstring here has its base class's.

    The class variable ``STAGE`` names the stage that a config is of.
    """
    made = _checked(cls)
    for name, info in made.__pydantic_fields__.items():
        bases = [getattr(base, "__pydantic_fields__", {}).get(name) for base in made.__mro__]
        info.description = next((base.description for base in bases if base and base.description), None)
    return made


# What may differ when a run is taken up again: results do not depend on it.
FREE = ("out", "resume", "data.workers", "data.cache", "data.cache_dir", "train.device", "train.save_minutes")
FREE += ("train.monitor_every",)
FREE += ("device",)  # of a probe
# Keys that name files and folders; how they are written does not matter either.
PATHS = ("init", "data.root", "data.labels", "data.groups", "data.exclude")


def rising(most: float) -> Any:
    """Returns the type of two numbers, 0 < first <= second <= ``most``."""

    def check(values: list[float]) -> list[float]:
        if not 0 < values[0] <= values[1] <= most:
            raise ValueError(f"got {values}, wanted [min, max] with 0 < min <= max <= {most:g}")
        return values

    return Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(check)]


def several(given: Any) -> Any:
    """One is a list of one."""
    return given if given is None or isinstance(given, (list, dict)) else [given]


def once(given: list | None) -> list | None:
    """Refuses a list that has something twice."""
    twice = sorted({repr(value) for value in given or () if given.count(value) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return given
