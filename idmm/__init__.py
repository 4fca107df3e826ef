"""Train image networks on a few thousand images, few of them labelled.

    # to a classifier, in a given time
    idmm.train({"data": {"root": "DIR"}, "minutes": 20, "out": "runs/x"})
    # which images to label next
    idmm.suggest({"data": {"root": "DIR"}, "count": 50, "out": "labels/1"})
    idmm.pretrain({"data": {"root": "DIR"}, "out": "runs/a"})  # from images
    idmm.finetune({"init": "runs/a", "data": {"root": "DIR"}, "out": "runs/b"})  # from labels
    # boxes, in COCO's format
    idmm.detect({"init": "runs/a", "data": {"root": "DIR"}, "out": "runs/d"})
    # a class for each pixel
    idmm.segment({"init": "runs/a", "data": {"root": "DIR"}, "out": "runs/e"})
    # how good are the features?
    idmm.probe({"init": "runs/a", "data": {"root": "DIR"}, "out": "runs/c"})
    idmm.transfer("grid.yaml")  # which data to pretrain on?
    # a timm model: images [B, 3, H, W] -> features [B, d]
    backbone = idmm.load_backbone("runs/a", img_size=224)
    clf = idmm.load_classifier("runs/b")
    clf.predict(["a.jpg", image, array])[0].label  # its class, also .probability and .top
    idmm.embed("runs/a", ["a.jpg", image, array])  # features, float32 [N, d]

``idmm pretrain --help`` and its like list the keys of a config.
Building blocks: ``idmm.losses.instance_discrimination_loss``,
``idmm.losses.DenseRelativeLocalization``, ``idmm.models.create_backbone``,
``idmm.models.token_grid``, ``idmm.data.DATASETS``. All are imported on first use, because torch
takes seconds and ``--help`` must not.
"""

import importlib
from typing import Any

_FUNCTIONS = {
    "train": "idmm.auto.train",
    "suggest": "idmm.inference.suggest",
    "pretrain": "idmm.runs.commands",
    "finetune": "idmm.runs.commands",
    "detect": "idmm.runs.commands",
    "segment": "idmm.runs.commands",
    "probe": "idmm.runs.commands",
    "transfer": "idmm.grid.transfer",
    "load_backbone": "idmm.models.weights",
    "load_classifier": "idmm.evaluation.predictor",
    "embed": "idmm.evaluation.predictor",
}
_PACKAGES = ("data", "losses", "models")
__all__ = [*_FUNCTIONS, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name == "__version__":
        return importlib.import_module("idmm.files").idmm_version()
    if name in _PACKAGES:
        return importlib.import_module(f"idmm.{name}")
    raise AttributeError(f"module 'idmm' has no attribute '{name}'")
