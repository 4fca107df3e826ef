"""Train vision transformers from scratch on a few thousand images.

    idmm.pretrain({"out": "runs/a", "data": {"root": "photos"}, "train": {"epochs": 100}})  # images alone: a backbone
    idmm.finetune({"out": "runs/b", "init": "runs/a", "data": {"root": "photos"}})  # labels: a classifier
    idmm.probe({"out": "runs/c", "init": "runs/a", "data": {"root": "photos"}})  # how good frozen features are
    idmm.transfer({"out": "runs/d", "sources": [...], "targets": [...]})  # which images to pretrain on: a grid of runs
    backbone = idmm.load_backbone("runs/a")  # [B, 3, H, W] -> [B, num_features], a timm model

``help(idmm.pretrain)`` lists the keys of a config and what is returned. ``losses``, ``models`` and ``data`` hold the
parts. All are imported when first used: torch takes seconds, ``--help`` must not.
"""

import importlib
from typing import Any

_WHERE = {
    "pretrain": "idmm.stages.pretrain",
    "finetune": "idmm.stages.finetune",
    "probe": "idmm.stages.probe",
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
