"""The images."""

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from idmm.config.base import FieldError, section

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@section
class Subset:
    """A part of the training images. Give one of per_class, total and fraction."""

    per_class: int | None = Field(None, ge=1)
    """Images of each class."""
    total: int | None = Field(None, ge=1)
    """Images in all, drawn without regard to labels."""
    fraction: float | None = Field(None, gt=0, le=1)
    """Share of each class (of all images where there are no labels), in (0, 1]."""
    seed: int = Field(0, ge=0)
    """Seed of the draw; its own, so that the subset stays the same over training seeds."""

    @model_validator(mode="after")
    def _check(self):
        if sum(value is not None for value in (self.per_class, self.total, self.fraction)) != 1:
            raise ValueError("give exactly one of per_class, total and fraction")
        return self


def _range(value: Any) -> Any:
    """Raises ValueError unless it is a word, a range or ranges that :class:`Data` knows."""
    pairs = value if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)) else [value]
    if value != "auto" and not all(map(_is_range, pairs)):
        raise ValueError(f"got {value!r}, wanted auto or [low, high] with low < high")
    return value


def _is_range(pair: Any) -> bool:
    numbers = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else [None]
    real = all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
    return real and numbers[0] < numbers[1]


@section
class Data:
    """The images."""

    name: str | None = None
    """Dataset: 'folder' (your own images under data.root), or one of 'idmm data list'. Null: 'folder' where there is a
    data.root, else 'digits', which scikit-learn ships."""
    root: str | None = None
    """Folder of the dataset ('idmm data info NAME' shows how it is laid out). folder: ROOT/train/CLASS/* and
    ROOT/val/CLASS/* (or test); pretraining takes any tree, and with ROOT/train the images of ROOT/unlabelled too."""
    workers: int | None = Field(None, ge=0)
    """Loader processes; 0 loads in the training process, null means one a core but one, 8 at most."""
    subset: Subset | None = None
    """Train on a part only, e.g. '{per_class: 10}', '{total: 10000}' or '{fraction: 0.1}'. Images of ROOT/unlabelled,
    which pretraining takes all, do not count."""
    labelled: Subset | None = None
    """idmm train, and pretraining with method.label_weight: whose labels are used, e.g. '{per_class: 5}', drawn as
    data.subset draws, from what that leaves, so that fine-tuning with this as its data.subset trains on the same
    images; the others count as images without labels; null: all that there are."""
    labels: str | None = None
    """folder: CSV file of path,class for images that are not sorted into class folders, paths under data.root; its
    header may name a column split (train, val or test) and a column group, too. Images without a row are left out of
    fine-tuning and used by pretraining as images without labels; null: the folders are the classes."""
    exclude: str | None = None
    """File of images to leave out of all splits, a path under data.root a line; 'idmm data check' writes one
    (exclude.txt); null: none."""
    groups: str | None = None
    """Images that belong together (of a patient, plate or video): val_fraction and folds hold out all of them or none.
    A CSV file of path,group, or a regular expression whose bracket finds the group in the path, e.g.
    '(patient[0-9]+)_'; null: the column group of data.labels, if any."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the training images held out to evaluate on, in [0, 1); 0 holds out none."""
    folds: int | None = Field(None, ge=2)
    """k-fold cross-validation for sets too small for one split: the training images are dealt out to so many folds of
    equal shares of each class, and as many runs in OUT/fold-1, OUT/fold-2 ... are each tested on one of them; null: one
    run, on the dataset's own test split."""
    fold: int | None = Field(None, ge=1)
    """Run this fold alone, from 1; null: all."""
    range: Annotated[Literal["auto"] | list[float] | list[list[float]], BeforeValidator(_range)] = "auto"
    """Values of images of more than 8 bits that 0 and 1 (black and white) stand for, the same for all images: [low,
    high], of bands also a pair for each channel; 'auto' (the init checkpoint's, else the smallest and largest value of
    the training images, of bands each channel's). 8-bit images stay as they are."""
    on_error: Literal["fail", "skip"] = "fail"
    """Unreadable, empty or bomb-sized files: 'fail' lists them and stops before training; 'skip' goes on without."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels than this are refused as bombs (pixels)."""
    cache: Literal["auto", "off"] = "auto"
    """Decoded images: 'auto' keeps them in data.cache_dir for later runs if half of the free disk holds them, 'off'
    decodes at each use. Results are the same."""
    cache_dir: str | None = None
    """Folder of decoded images, which may be removed at any time; null: $IDMM_CACHE, else ~/.cache/idmm."""
    in_chans: int | None = Field(None, ge=1)
    """Channels the model sees; null: the init checkpoint's, else 3. 3 and 1 are pictures, read as RGB (of 1 their
    brightness); any other number are bands: the channels of the files as they are, all files with that many."""
    bands: list[int] | None = Field(None, min_length=1)
    """Which channels of the files are used, in that order, from 0, e.g. '[0, 3, 4]'; channels are then bands also where
    they are 1 or 3. Null: all."""
    mean: list[float] | None = Field(None, min_length=1)
    """Mean of each channel, on pixel values in [0, 1]; null: the init checkpoint's, else of RGB ImageNet's, else
    measured from the training images."""
    std: list[float] | None = Field(None, min_length=1)
    """Standard deviation of each channel, likewise."""

    @property
    def channels(self) -> int | None:
        """Channels that are asked for; None: the init checkpoint's, else 3."""
        return self.in_chans if self.bands is None else len(self.bands)

    @model_validator(mode="after")
    def _check(self):
        if min(self.bands or [0]) < 0:
            raise FieldError("bands", f"got {self.bands}, wanted numbers of channels, from 0")
        if self.bands is not None and len(set(self.bands)) < len(self.bands):
            raise FieldError("bands", f"got {self.bands}, wanted each channel once")
        used = self.channels
        if self.in_chans not in (None, used):
            raise FieldError("in_chans", f"got {self.in_chans} for {used} bands; wanted {used}, or to leave it out")
        if used is not None:
            lengths = {"mean": self.mean, "std": self.std}
            if not isinstance(self.range, str) and isinstance(self.range[0], list):
                lengths["range"] = self.range
            key = f"in_chans {used}" if self.bands is None else f"{used} bands"
            wrong = [
                FieldError(name, f"got {len(values)} values for {key}, wanted one a channel")
                for name, values in lengths.items()
                if values is not None and len(values) != used
            ]
            if wrong:
                wrong[0].each = wrong
                raise wrong[0]
        if self.std is not None and min(self.std) <= 0:
            raise FieldError("std", f"got {self.std}, wanted numbers > 0")
        if self.fold is not None and self.fold > (self.folds or 0):
            of = "folds is not given" if self.folds is None else f"there are {self.folds} folds"
            raise FieldError("fold", f"got {self.fold}, but {of}; wanted folds, and one of them")
        return self
