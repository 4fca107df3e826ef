"""Whole runs, read from top to bottom, and the table of them. No torch before a stage starts: planners ask here."""

import importlib
from dataclasses import dataclass
from typing import Any

from idmm import options
from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config_commands import ProbeConfig


@dataclass(frozen=True)
class StageEntry:
    """A stage by name.

    Attributes:
        config: The class of its config.
        name: Of the module here, and of the function in it that runs the stage.
    """

    config: type
    name: str

    def build(self, given: Any) -> Any:
        """Returns the stage's config, see :func:`idmm.options.build`."""
        return options.build(self.config, given)

    def run(self, given: Any) -> dict:
        """Runs the stage; returns what ``result.json`` holds."""
        return getattr(importlib.import_module(f"idmm.stages.{self.name}"), self.name)(given)


STAGES = {
    "pretrain": StageEntry(PretrainConfig, "pretrain"),
    "finetune": StageEntry(FinetuneConfig, "finetune"),
    "probe": StageEntry(ProbeConfig, "probe"),
}
