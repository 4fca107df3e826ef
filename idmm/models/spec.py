"""Resolve a run's backbone before it is built, from the config and the checkpoint in ``init``."""

from dataclasses import dataclass

import torch

from idmm import config
from idmm.errors import UserError
from idmm.models.build import check_kwargs, check_name, create_backbone
from idmm.models.weights import Checkpoint, Report, read_checkpoint
from idmm.seeding import derive, seeded

DEFAULT_MODEL = "deit_tiny_patch16_224"


@dataclass(frozen=True)
class ModelSpec:
    """Everything about the backbone that is known before it is built."""

    name: str  # timm's
    kwargs: dict  # for its constructor
    in_chans: int
    # one number per channel. None: measured from the training images later
    mean: list[float] | None
    std: list[float] | None
    drop_path: float  # stochastic depth rate
    init: Checkpoint | None  # weights to start from
    range: str | list = "auto"  # value range of images with more than 8 bits, see config.Data
    bands: list[int] | None = None  # channels of the files to use, see config.Data

    def build(
        self, size: int, seed: int, num_classes: int = 0, dynamic: bool = False
    ) -> torch.nn.Module:
        """Build the backbone for an image size (pixels) with fresh weights. ``dynamic``: for other
        sizes, too."""
        chans = {} if self.in_chans == 3 else {"in_chans": self.in_chans}
        kwargs = {**self.kwargs, **chans, "num_classes": num_classes}
        with seeded(derive(seed, "model")):
            model = create_backbone(
                self.name, size, drop_path=self.drop_path, dynamic_size=dynamic, **kwargs
            )
        self.set_statistics(model)
        return model

    def load(self, model: torch.nn.Module) -> Report | None:
        """Load the weights to start from, except the classifier. The first layer is adapted to
        other channels.

        Returns:
            A report for the log, or None without ``init``.
        """
        report = None if self.init is None else self.init.load_into(model)
        self.set_statistics(model)
        return report

    def set_statistics(self, model: torch.nn.Module) -> None:
        """Pass known mean and std to a model that undoes the normalisation of its images (hog)."""
        if None not in (self.mean, self.std) and hasattr(model, "set_statistics"):
            model.set_statistics(self.mean, self.std)


def model_spec(config, field: str = "init") -> ModelSpec:
    """Resolve the model from a run's ``model``, ``data`` and checkpoint ``init``, called ``field``
    in messages.

    Raises:
        UserError: ``model.name`` or ``model.kwargs`` contradict the checkpoint (all faults
            together), or the number of values differs from the number of channels.
    """
    if config.init is None:
        init = None
    else:
        init = read_checkpoint(config.init, field)
    model = config.model
    data = config.data
    if init is None or init.name is None:
        if init is not None and model.name is None:
            raise UserError(
                f"model.name: '{init.source}' does not name its model. Give its timm name"
            )
        name = model.name or DEFAULT_MODEL
        kwargs = model.kwargs
    else:
        reserved = ("num_classes", "img_size", "in_chans")
        name = init.name
        kwargs = {key: value for key, value in init.kwargs.items() if key not in reserved}
        end = "Leave it out or make it agree"
        faults = []
        if model.name not in (None, init.name):
            faults.append(f"model.name: '{model.name}', but '{init.source}' is {init.name}. {end}")
        for key, value in model.kwargs.items():
            if kwargs.get(key) != value:
                faults.append(
                    f"model.kwargs: {key} is {value!r}, but '{init.source}' has {kwargs.get(key)!r}. {end}"
                )
        if faults:
            raise UserError(*faults)
    check_name(name)
    check_kwargs(model.kwargs)
    init_chans = 3 if init is None else init.in_chans
    chans = init_chans if data.channels is None else data.channels
    # the checkpoint's values are valid for these channels
    same = init is not None and chans == init_chans
    if same and data.bands is not None:
        same = init.extra.get("bands") in (None, data.bands)
    if same and data.bands is None:
        bands = init.extra.get("bands")
    else:
        bands = data.bands
    mean, std = (
        _statistics(statistic, data, init, chans, bands is None, same)
        for statistic in ("mean", "std")
    )
    if same and data.range == "auto":
        value_range = init.range
    else:
        value_range = data.range
    # one per channel
    if isinstance(value_range[0], (list, tuple)):
        ranges = value_range
    else:
        ranges = []
    pictures = bands is None and chans in (1, 3)
    if ranges and (pictures or len(ranges) != chans):
        if pictures:
            expected = "expected one for pictures, [low, high]"
        else:
            expected = f"expected one per channel, {chans}"
        raise UserError(f"data.range: {len(ranges)} ranges, {expected}")
    return ModelSpec(name, kwargs, chans, mean, std, model.drop_path, init, value_range, bands)


def _statistics(
    name: str, data: config.Data, init: Checkpoint | None, chans: int, pictures: bool, same: bool
) -> list[float] | None:
    """Return mean or std by ``name``: the config's, else the checkpoint's, else ImageNet's. None:
    to be measured."""
    values = getattr(data, name)
    if values is None and init is not None:
        values = list(getattr(init, name))
        if pictures and chans == 1 and len(values) == 3 and "bands" not in init.extra:
            values = [round(sum(values) / 3, 6)]  # of grey images with weights from RGB
        elif not same or len(values) != chans:
            values = None
    elif values is None and pictures and chans == 3:
        values = list(getattr(config, f"IMAGENET_{name.upper()}"))
    if values is not None and len(values) != chans:
        raise UserError(
            f"data.{name}: {len(values)} values for {chans} channels, expected one per channel"
        )
    return values
