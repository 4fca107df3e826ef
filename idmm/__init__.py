"""Train vision transformers from scratch on a few thousand images.

``pretrain``, ``finetune``, ``transfer`` and ``load_backbone`` are the Python interface; ``losses``, ``models`` and
``data`` hold the parts. All are imported when first used: torch takes seconds, ``--help`` must not.
"""

import importlib
from typing import Any

_WHERE = {
    "pretrain": "idmm.stages.pretrain",
    "finetune": "idmm.stages.finetune",
    "load_backbone": "idmm.models.weights",
}
_PARTS = ("data", "losses", "models", "transfer")  # the last is called like a function
__all__ = [*_WHERE, *_PARTS]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"idmm.{name}")
    raise AttributeError(f"module 'idmm' has no attribute '{name}'")
