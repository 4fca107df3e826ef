"""The images."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from idmm.config.base import FieldErrors, section

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@section
class Subset:
    """A part of the training images. Give one of per_class, total and fraction."""

    per_class: int | None = Field(None, ge=1)
    """Images per class. Default: all."""
    total: int | None = Field(None, ge=1)
    """Images in total, drawn without regard to labels. Default: all."""
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of each class, or of all images if there are no labels, in (0, 1]. Default: all."""
    seed: int = Field(0, ge=0)
    """Seed of the draw. It does not depend on --seed, so that all training seeds use the same subset."""

    @model_validator(mode="after")
    def _check(self):
        if sum(value is not None for value in (self.per_class, self.total, self.fraction)) != 1:
            raise ValueError("expected exactly one of per_class, total, fraction")
        return self


def _range(value: Any) -> Any:
    """Refuse what is not 'auto', [low, high] or one such pair per channel."""
    pairs = value if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)) else [value]
    pairs = [pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None) for pair in pairs]
    real = all(type(number) in (int, float) and math.isfinite(number) for pair in pairs for number in pair)
    if value != "auto" and not (real and all(low < high for low, high in pairs)):
        raise ValueError(f"got {value!r}, expected auto or [low, high] with low < high")
    return value


@section
class Data:
    """The images."""

    name: str | None = None
    """Dataset: 'folder' (your own images), or one of 'idmm data list'. Default: folder with data.root, else digits."""
    root: str | None = None
    """Folder with train/CLASS/* and val/CLASS/* (or test). Pretraining takes any tree of images. Default: none."""
    workers: int | None = Field(None, ge=0)
    """Loader processes. Default: one per core but one, at most 8. 0: load in the training process."""
    subset: Subset | None = None
    """Train on a part, e.g. '{per_class: 10}', '{total: 10000}' or '{fraction: 0.1}'. Default: all."""
    exclude: str | None = None
    """File of images to skip, one path under data.root per line. 'idmm data check' writes one. Default: none."""
    groups: str | None = None
    """Images to keep in one split: a CSV file of path,group or a pattern, e.g. '(patient[0-9]+)_'. Default: none."""
    val_fraction: float | None = Field(None, ge=0, lt=1)
    """Share of the training images to hold out for evaluation. Default: none, in idmm train 0.2 without test images."""
    range: Annotated[Literal["auto"] | list[float] | list[list[float]], BeforeValidator(_range)] = "auto"
    """Values of 16-bit images that become black and white: [low, high], or a pair per channel. 'auto': measured."""
    cache: Literal["auto", "off"] = "auto"
    """Decoded images: 'auto' stores them in data.cache_dir if they fit into half of the free disk. 'off': no store."""
    cache_dir: str | None = None
    """Folder for decoded images. You can delete it at any time. Default: $IDMM_CACHE, else ~/.cache/idmm."""
    in_chans: int | None = Field(None, ge=1)
    """Channels of the model. 3 and 1 read pictures, others the files' channels. Default: those of --init, else 3."""
    mean: list[float] | None = Field(None, min_length=1)
    """Mean per channel, of values in [0, 1]. Default: that of --init, else ImageNet's for RGB, else measured."""
    std: list[Annotated[float, Field(gt=0)]] | None = Field(None, min_length=1)
    """Standard deviation per channel. Default: as for data.mean."""
    labelled: Subset | None = None
    """Use only some labels, e.g. '{per_class: 5}'. The other images count as unlabelled. Default: all."""
    labels: str | None = None
    """CSV file of path,class (also split, group) with paths under data.root. Default: folders are the classes."""
    folds: int | None = Field(None, ge=2)
    """Folds of a cross-validation, each one run in OUT/fold-N. Default: one run on the dataset's own test split."""
    fold: int | None = Field(None, ge=1)
    """Run only this fold, from 1. Default: all."""
    bands: list[Annotated[int, Field(ge=0)]] | None = Field(None, min_length=1)
    """Channels of the files to use, from 0, e.g. '[0, 3, 4]'. Default: all."""

    @property
    def channels(self) -> int | None:
        """Channels that the config asks for. None: the init checkpoint's, else 3."""
        return self.in_chans if self.bands is None else len(self.bands)

    @model_validator(mode="after")
    def _check(self):
        faults, used = {}, self.channels
        if self.in_chans not in (None, used):
            faults["in_chans"] = f"got {self.in_chans} for {used} bands, expected {used}, or no in_chans"
        if self.fold is not None and self.fold > (self.folds or 0):
            faults["fold"] = f"got {self.fold}, expected data.folds of at least {self.fold}"
        if faults:
            raise FieldErrors(faults)
        return self
