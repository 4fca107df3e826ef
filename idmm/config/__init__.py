"""Every option of every stage.

A YAML key is the flag without dashes (``train.lr`` is ``--train.lr``). Types, ranges and help texts are read from the
classes of this package. pydantic checks all fields of a config at once, so that all faults are reported together.
"""

from idmm.config.base import PATHS, RESUME_IGNORED, section
from idmm.config.data import IMAGENET_MEAN, IMAGENET_STD, Data, Subset
from idmm.config.dense import DenseConfig, DetectConfig, SegmentConfig
from idmm.config.methods import METHODS, Method
from idmm.config.stages import Common, DrLoc, FinetuneConfig, FinetuneModel, Model, PretrainConfig, Stage
from idmm.config.train import FinetuneTrain, PretrainTrain, Train
from idmm.config.views import COLOURS, DEFAULT_COLOURS, Augment, Colours, CropGroup, Views, colours_of, global_groups

__all__ = [
    "COLOURS", "DEFAULT_COLOURS", "IMAGENET_MEAN", "IMAGENET_STD", "METHODS", "PATHS", "RESUME_IGNORED",
    "Augment", "Colours", "Common", "CropGroup", "Data", "DenseConfig", "DetectConfig", "DrLoc", "FinetuneConfig",
    "FinetuneModel", "FinetuneTrain", "Method", "Model", "PretrainConfig", "PretrainTrain", "SegmentConfig",
    "Stage", "Subset", "Train", "Views", "colours_of", "global_groups", "section",
]  # fmt: skip
