"""What the sections of a config have in common."""

import inspect
from typing import Annotated, Any, ClassVar, dataclass_transform, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticKnownError

_checked = dataclass(
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, coerce_numbers_to_str=True),
    kw_only=True,
)


STAGED: dict[str, type] = {}  # the configs that recipes are written for, by the stage's name


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

    Class variables: ``STAGE`` names the stage whose recipes are read by it, ``MAIN`` the key that is meant where the
    section is given as one word.
    """
    cls.__annotations__ = {name: _unboolean(kind) for name, kind in inspect.get_annotations(cls).items()}
    made = _checked(cls)
    if "STAGE" in vars(cls):
        STAGED[cls.STAGE] = made
    for name, info in made.__pydantic_fields__.items():
        bases = [getattr(base, "__pydantic_fields__", {}).get(name) for base in made.__mro__]
        info.description = next((base.description for base in bases if base and base.description), None)
    return made


def _unboolean(kind: Any) -> Any:
    """Makes true and false no numbers, which they are in Python and to pydantic."""
    found = _types(kind)
    if ClassVar in (kind, get_origin(kind)) or bool in found or not found & {int, float}:
        return kind
    wanted = "float_type" if float in found else "int_type"

    def check(value: Any) -> Any:
        if any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value])):
            raise PydanticKnownError(wanted)
        return value

    return Annotated[kind, BeforeValidator(check)]


def _types(kind: Any) -> set:
    """A type and all types within it; of a Literal, those of its values."""
    inner = [item if isinstance(item, type) or get_args(item) else type(item) for item in get_args(kind)]
    return {kind} if not inner else {kind for item in inner for kind in _types(item)}


# What may differ when a run is taken up again: results do not depend on it.
FREE = ("out", "resume", "data.workers", "data.cache", "data.cache_dir", "train.device", "train.save_minutes")
FREE += ("train.monitor_every",)
FREE += ("device",)  # of a probe


def check_range(values: list[float], low: float, high: float | None, name: str) -> None:
    """Raises FieldError unless values are two numbers, low < first <= second (<= high)."""
    first, second = values
    if not low < first <= second or (high is not None and second > high):
        bound = f" <= {high:g}" if high is not None else ""
        raise FieldError(name, f"got {values}, wanted [min, max] with {low:g} < min <= max{bound}")


def check_strengths(colours: Any) -> None:
    """Raises FieldError unless ``jitter`` has strengths of what it changes."""
    if colours.jitter is not None and (min(colours.jitter) < 0 or colours.jitter[3] > 0.5):
        raise FieldError("jitter", f"got {colours.jitter}, wanted four numbers >= 0, the last (hue) <= 0.5")


def several(given: Any) -> Any:
    """One is a list of one."""
    return given if given is None or isinstance(given, (list, dict)) else [given]


def once(given: list | None) -> list | None:
    """Refuses a list that has something twice."""
    twice = sorted({repr(value) for value in given or () if given.count(value) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice")
    return given
