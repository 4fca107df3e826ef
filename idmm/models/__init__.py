"""Backbones: timm's with T2T-ViT, CvT and hog registered, and their checkpoints."""

from idmm.models import cvt, hog, hog_conv, t2t
from idmm.models.base import Backbone
from idmm.models.build import create_backbone, feature_width
from idmm.models.grid import token_grid
from idmm.models.weights import Checkpoint, load_backbone, read_checkpoint

REGISTERED = (cvt, hog, hog_conv, t2t)  # with timm, by their import
__all__ = [
    "Backbone",
    "Checkpoint",
    "create_backbone",
    "feature_width",
    "load_backbone",
    "read_checkpoint",
    "token_grid",
]
