"""Every option of every stage.

A YAML key is the flag without dashes (``train.lr`` is ``--train.lr``). Types, ranges and help texts
are read from the classes of this package. pydantic checks all fields of a config at once, so that
all faults are reported together.
"""

from idmm.config.base import PATHS, RESUME_IGNORED, section
from idmm.config.data import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Augment,
    CropGroup,
    Data,
    Subset,
    Views,
    global_groups,
)
from idmm.config.dense import DenseConfig, DetectConfig, SegmentConfig
from idmm.config.methods import METHODS, Method
from idmm.config.register import register_options
from idmm.config.stages import (
    DrLoc,
    FinetuneConfig,
    FinetuneTrain,
    Model,
    PretrainConfig,
    PretrainTrain,
    Train,
)

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "METHODS",
    "PATHS",
    "RESUME_IGNORED",
    "Augment",
    "CropGroup",
    "Data",
    "DenseConfig",
    "DetectConfig",
    "DrLoc",
    "FinetuneConfig",
    "FinetuneTrain",
    "Method",
    "Model",
    "PretrainConfig",
    "PretrainTrain",
    "SegmentConfig",
    "Subset",
    "Train",
    "Views",
    "global_groups",
    "register_options",
    "section",
]
