"""Backbones: timm's with T2T-ViT, CvT and hog registered, and their checkpoints."""

from idmm.models.build import create_backbone, feature_width
from idmm.models.cvt import CvT
from idmm.models.grid import token_grid
from idmm.models.hog import Hog
from idmm.models.hog_conv import HogConv
from idmm.models.t2t import T2TViT
from idmm.models.weights import Checkpoint, load_backbone, read_checkpoint, save_model

__all__ = [
    "Checkpoint",
    "CvT",
    "Hog",
    "HogConv",
    "T2TViT",
    "create_backbone",
    "feature_width",
    "load_backbone",
    "read_checkpoint",
    "save_model",
    "token_grid",
]
