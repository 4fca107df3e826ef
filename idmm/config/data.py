"""The images."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

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


@section
class Data:
    """The images."""

    MAIN: ClassVar[str] = "root"

    name: str | None = None
    """Dataset: 'folder' (your own images under data.root), one of 'idmm data list', or 'hfds:NAME' (Hugging Face).
    Null: 'folder' where there is a data.root, else 'digits', which scikit-learn ships."""
    root: str | None = None
    """Folder of the dataset ('idmm data info NAME' shows how it is laid out). folder: ROOT/train/CLASS/* and
    ROOT/val/CLASS/* (or test); pretraining takes any tree."""
    download: bool = False
    """Fetch the dataset into data.root where it is not there yet and its source allows."""
    allow_size_mismatch: bool = False
    """Go on where a split has not as many images as the dataset's protocol; result.json then says so."""
    image_column: str | None = None
    """hfds: the column of images; null: the only one."""
    label_column: str | None = None
    """hfds: the column of classes; null: the only one."""
    workers: int | None = Field(None, ge=0)
    """Loader processes; 0 loads in the training process, null means one a core but one, 8 at most."""
    subset: Subset | None = None
    """Train on a part only, e.g. '{per_class: 10}', '{total: 10000}' or '{fraction: 0.1}'."""
    val_fraction: float = Field(0.0, ge=0, lt=1)
    """Share of the training images held out to evaluate on, in [0, 1); 0 holds out none."""
    on_error: Literal["fail", "skip"] = "fail"
    """Unreadable, empty or bomb-sized files: 'fail' lists them and stops before training; 'skip' goes on without."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels than this are refused as bombs (pixels)."""
    cache: Literal["auto", "ram", "disk", "off"] = "auto"
    """Where decoded images are kept: 'disk' (for later runs too, in data.cache_dir), 'ram', 'off' (decoded at every
    use), 'auto' (disk, else ram, where half of what is free holds them). Results are the same."""
    cache_dir: str | None = None
    """Folder of the cache on disk; null: $IDMM_CACHE, else ~/.cache/idmm. See 'idmm data cache' and its --clear."""
    mean: list[float] | None = Field(None, min_length=1, max_length=3)
    """Mean of each channel, on pixel values in [0, 1]; null: the init checkpoint's, else ImageNet's."""
    std: list[float] | None = Field(None, min_length=1, max_length=3)
    """Standard deviation of each channel, likewise."""
    in_chans: Literal[1, 3] | None = None
    """Channels the model sees: 3 (RGB) or 1 (grey); null: the init checkpoint's, else 3."""

    @model_validator(mode="after")
    def _check(self):
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and self.in_chans is not None and len(values) != self.in_chans:
                text = f"got {len(values)} values for in_chans {self.in_chans}, wanted one a channel"
                raise FieldError(name, text)
        if self.std is not None and min(self.std) <= 0:
            raise FieldError("std", f"got {self.std}, wanted numbers > 0")
        return self
