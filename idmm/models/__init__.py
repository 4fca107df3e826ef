"""Backbones: built by timm, with T2T-ViT and CvT registered there, loaded and saved with their names and sizes."""

from idmm.models.build import (
    backbone_state,
    check_kwargs,
    check_name,
    classifier_prefixes,
    create_backbone,
    export_kwargs,
    feature_width,
    takes_img_size,
)
from idmm.models.cvt import CvT
from idmm.models.grid import logits_and_grid, token_grid
from idmm.models.t2t import T2TViT
from idmm.models.weights import Checkpoint, Report, load_backbone, load_weights, read_checkpoint, save_model

__all__ = [
    "Checkpoint",
    "CvT",
    "Report",
    "T2TViT",
    "backbone_state",
    "check_kwargs",
    "check_name",
    "classifier_prefixes",
    "create_backbone",
    "export_kwargs",
    "feature_width",
    "load_backbone",
    "load_weights",
    "logits_and_grid",
    "read_checkpoint",
    "save_model",
    "takes_img_size",
    "token_grid",
]
