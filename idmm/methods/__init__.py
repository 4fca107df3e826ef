"""Training methods, one file each, imported by name: a library is imported only with the method
that needs it."""

import importlib

from torch import nn

from idmm.config import Method as MethodConfig
from idmm.methods.base import Method, RunInfo


def create_method(backbone: nn.Module, info: RunInfo, config: MethodConfig) -> Method:
    """Make the pretraining method that ``config.name`` names (seed the global generators around
    it).

    Args:
        backbone: A timm model with ``num_classes=0``.
        info: Of the run.
        config: Filled by :meth:`idmm.config.PretrainConfig.fill_from_method`.
    """
    module = importlib.import_module(f"idmm.methods.{config.name}")
    classes = {name.lower(): value for name, value in vars(module).items()}
    return classes[config.name](backbone, info, config)
