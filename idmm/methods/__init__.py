"""Training methods, one file each, imported by name: a library is imported only with the method that needs it."""

import importlib

from torch import nn

from idmm.config import Method as MethodConfig
from idmm.methods.base import Method, RunInfo


def method_class(name: str) -> type[Method]:
    """Return the class of a method by its name."""
    return {key.lower(): value for key, value in vars(importlib.import_module(f"idmm.methods.{name}")).items()}[name]


def create_method(backbone: nn.Module, info: RunInfo, config: MethodConfig) -> Method:
    """Make the pretraining method that ``config.name`` names (seed the global generators around it).

    Args:
        backbone: A timm model with ``num_classes=0``.
        info: Of the run.
        config: Resolved by :meth:`idmm.config.PretrainConfig.resolve`.
    """
    return method_class(config.name)(backbone, info, config)
