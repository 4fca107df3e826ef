"""Methods from outside the package: their options become options of pretraining."""

from typing import Annotated, Any, Union

from pydantic import Field
from pydantic.dataclasses import rebuild_dataclass

from idmm.config.base import inherit_help
from idmm.config.methods import METHODS, Method, with_name
from idmm.config.schema import keys_of
from idmm.config.stages import PretrainConfig


def register_options(kind: type[Method]) -> None:
    """Accept the options of a method by the default of their ``name``. The last of a name holds."""
    METHODS[kind.name] = kind
    methods: Any = Union[*METHODS.values()]
    chosen: Any = Annotated[methods, Field(discriminator="name"), with_name]
    PretrainConfig.__dataclass_fields__["method"].type = chosen
    # its decorator returns a plain class to type checkers
    rebuild_dataclass(PretrainConfig, force=True)  # type: ignore[arg-type]
    inherit_help(PretrainConfig)
    keys_of.cache_clear()
