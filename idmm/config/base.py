"""Shared parts of the sections of a config."""

from inspect import get_annotations
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticKnownError

_frozen = dataclass(
    config=ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
    ),
    kw_only=True,
    frozen=True,
)

Probability = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Side = Annotated[int, Field(ge=8)]  # of an image (pixels)
CropMode = Literal["crop", "pad", "squash", "auto"]
CROP_MODES = {"crop": "center", "pad": "border", "squash": "squash"}  # and their names in timm
Device = Literal["auto", "cpu", "cuda", "mps"]
# Default of a key that must be given. It is checked after the types, so that --print_config works
# without the key.
REQUIRED: Any = None
# Keys that may differ when a run resumes: results do not depend on them.
RESUME_IGNORED = (
    "out",
    "resume",
    "compare",
    "device",
    "data.workers",
    "data.cache",
    "data.cache_dir",
    "train.device",
    "train.save_minutes",
    "train.monitor_every",
)
# Keys that name files and folders. Their spelling may differ when a run resumes.
PATHS = ("init", "data.root", "data.labels", "data.groups", "data.exclude")


class FieldErrors(ValueError):
    """Wrong fields of one section, found by a check that needs several of them.

    Its argument is a dict. By field: what is wrong and what is expected.
    """


@dataclass_transform(kw_only_default=True, frozen_default=True)
def section(cls: type) -> type:
    """Make a class a frozen, checked section of a config. A field without a docstring takes its
    base class's.

    The class variable ``COMMAND`` names the command that a config belongs to.
    """
    cls.__annotations__ = {name: _strict(kind) for name, kind in get_annotations(cls).items()}
    made = _frozen(cls)
    inherit_help(made)
    return made


def inherit_help(kind: Any) -> None:
    """Give the fields of a section without a docstring those of its base classes."""
    for name, info in kind.__pydantic_fields__.items():
        bases = [getattr(base, "__pydantic_fields__", {}).get(name) for base in kind.__mro__]
        info.description = next(
            (base.description for base in bases if base and base.description), None
        )


def _no_bool(kind: type, fault: Literal["int_type", "float_type"]) -> Any:
    def check(value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticKnownError(fault)
        return value

    return Annotated[kind, BeforeValidator(check)]


_NUMBERS = {int: _no_bool(int, "int_type"), float: _no_bool(float, "float_type")}


def _strict(kind: Any) -> Any:
    """Return a type whose numbers, at any depth, are not true or false, which pydantic takes for 1
    and 0."""
    origin = get_origin(kind)
    if origin in (None, ClassVar, Literal):
        if kind in (int, float):
            return _NUMBERS[kind]
        return kind
    origin = Union if origin is UnionType else origin
    return origin[tuple(_strict(one) for one in get_args(kind))]


PAIR = Field(min_length=2, max_length=2)


def rising(highest: float) -> AfterValidator:
    """Return the check of two numbers, 0 < first <= second <= ``highest``."""

    def check(values: list[float]) -> list[float]:
        if not 0 < values[0] <= values[1] <= highest:
            raise ValueError(
                f"got {values}, expected [min, max] with 0 < min <= max <= {highest:g}"
            )
        return values

    return AfterValidator(check)


def as_list(value: Any) -> Any:
    """Return a single value as a list of one."""
    if value is None or isinstance(value, (list, dict)):
        return value
    return [value]


Texts = Annotated[list[str], BeforeValidator(as_list)]
