"""Backbones: built by timm, loaded and saved with their names and sizes."""

from idmm.models.build import (
    backbone_state,
    check_kwargs,
    check_name,
    classifier_prefixes,
    create_backbone,
    export_kwargs,
    set_classes,
    takes_img_size,
)
from idmm.models.weights import Checkpoint, Report, load_backbone, load_weights, read_checkpoint, save_model

__all__ = [
    "Checkpoint",
    "Report",
    "backbone_state",
    "check_kwargs",
    "check_name",
    "classifier_prefixes",
    "create_backbone",
    "export_kwargs",
    "load_backbone",
    "load_weights",
    "read_checkpoint",
    "save_model",
    "set_classes",
    "takes_img_size",
]
