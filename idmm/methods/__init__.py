"""Training methods, one file each. A library is imported only with the method that needs it."""

import pkgutil
from collections.abc import Callable

from idmm.config import Method as MethodConfig
from idmm.config import register_options
from idmm.methods.base import Method, RunInfo
from idmm.models import Backbone

__all__ = ["Method", "RunInfo", "create_method", "register_method"]
# the class of each pretraining method, or where it is. Its arguments are the backbone, RunInfo and
# the method's options
METHODS: dict[str, str | Callable[..., Method]] = {
    "idmm": "idmm.methods.idmm:IDMM",
    "simclr": "idmm.methods.simclr:SimCLR",
    "supcon": "idmm.methods.supcon:SupCon",
    "mocov2": "idmm.methods.mocov2:MoCoV2",
    "mocov3": "idmm.methods.mocov3:MoCoV3",
    "dino": "idmm.methods.dino:DINO",
    "supervised": "idmm.methods.supervised:Supervised",
}


def register_method(options: type[MethodConfig], method: Callable[..., Method]) -> None:
    """Add a pretraining method of your own, so that ``method.name`` selects it.

    Call it before a config is made, in each Python process that runs or resumes the method.

    Args:
        options: A :func:`idmm.config.section` that inherits from :class:`idmm.config.Method`. The
            default of its ``name`` is the method's name.
        method: A :class:`Method` with the arguments backbone, :class:`RunInfo` and options.
    """
    register_options(options)
    METHODS[options.name] = method


def create_method(backbone: Backbone, info: RunInfo, config: MethodConfig) -> Method:
    """Make the pretraining method that ``config.name`` names.

    Seed the global generators around it.

    Args:
        backbone: A timm model with ``num_classes=0``.
        info: Of the run.
        config: Filled by :meth:`idmm.config.PretrainConfig.fill_from_method`.
    """
    method = METHODS[config.name]
    if isinstance(method, str):
        method = pkgutil.resolve_name(method)
    return method(backbone, info, config)
