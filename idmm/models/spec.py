"""What is known of a run's backbone before it is built: from the config and the checkpoint that it starts from."""

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
    """What is known of the backbone before it is built; ``mean`` and ``std`` have a number a channel, or are None until
    they are measured from the training images."""

    name: str  # timm's
    kwargs: dict  # for its constructor
    in_chans: int
    mean: list[float] | None
    std: list[float] | None
    drop_path: float  # stochastic depth rate
    init: Checkpoint | None  # weights to start from
    range: str | list = "auto"  # of images of more than 8 bits, see config.Data
    bands: list[int] | None = None  # which channels of the files are used, see config.Data

    def build(self, size: int, seed: int, num_classes: int = 0, dynamic: bool = False) -> torch.nn.Module:
        """Builds the backbone at an image size, its fresh weights from the seed; ``dynamic``: for others as well."""
        chans = {} if self.in_chans == 3 else {"in_chans": self.in_chans}
        kwargs = {**self.kwargs, **chans, "num_classes": num_classes}
        with seeded(derive(seed, "model")):
            model = create_backbone(self.name, size, drop_path=self.drop_path, dynamic_size=dynamic, **kwargs)
        self.set_statistics(model)
        return model

    def load(self, model: torch.nn.Module) -> Report | None:
        """Loads the weights to start from into all but the classifier, the first layer adapted to other channels;
        returns what became of them, to be logged."""
        report = None if self.init is None else self.init.load_into(model, in_chans=self.in_chans)
        self.set_statistics(model)
        return report

    def set_statistics(self, model: torch.nn.Module) -> None:
        """Gives mean and std to a model that undoes the normalisation of its images (hog), if they are known."""
        if self.mean is not None and hasattr(model, "set_statistics"):
            model.set_statistics(self.mean, self.std)


def model_spec(config, field: str = "init") -> ModelSpec:
    """Decides the model by the run's ``model``, ``data`` and checkpoint ``init``, which messages call ``field``.

    Raises:
        UserError: ``model.name`` or ``model.kwargs`` contradict the checkpoint, all in one; or values are not
            as many as channels.
    """
    init = None if config.init is None else read_checkpoint(config.init, field)
    model, data = config.model, config.data
    if init is None or init.name is None:
        if init is not None and model.name is None:
            raise UserError(f"model.name: '{init.source}' does not say which model it is; wanted is its timm name")
        name, kwargs = model.name or DEFAULT_MODEL, model.kwargs
    else:
        skip = ("num_classes", "img_size", "in_chans")
        kwargs = {key: value for key, value in init.kwargs.items() if key not in skip}
        faults = _contradictions(config, init, kwargs)
        if faults:
            raise UserError(*faults)
        name = init.name
    check_name(name)
    check_kwargs(model.kwargs)
    before = 3 if init is None else init.in_chans
    chans = before if data.channels is None else data.channels
    same = init is not None and chans == before  # what the checkpoint knows of its channels holds
    bands = init.extra.get("bands") if same and data.bands is None else data.bands
    mean, std = _statistics(data, init, chans, bands is None, same)
    scale = init.range if same and data.range == "auto" else data.range
    _check_range(scale, chans, bands is None and chans in (1, 3))
    return ModelSpec(name, kwargs, chans, mean, std, model.drop_path, init, scale, bands)


def _check_range(scale: str | list, chans: int, pictures: bool) -> None:
    """Raises UserError where there is a range for each channel, but of other channels than there are."""
    if isinstance(scale, str) or not isinstance(scale[0], (list, tuple)) or (len(scale) == chans and not pictures):
        return
    wanted = "pictures have one, [low, high]" if pictures else f"wanted one for each of {chans} channels"
    raise UserError(f"data.range: {len(scale)} ranges; {wanted}")


def _contradictions(config, init: Checkpoint, kwargs: dict) -> list[str]:
    model, faults = config.model, []
    if model.name not in (None, init.name):
        faults.append(f"model.name: '{model.name}', but '{init.source}' is {init.name}; leave it out or make it agree")
    for key, value in model.kwargs.items():
        if kwargs.get(key) != value:
            has = f"'{init.source}' has {kwargs.get(key)!r}"
            faults.append(f"model.kwargs: {key} is {value!r}, but {has}; leave it out or make it agree")
    return faults


def _statistics(
    data: config.Data, init: Checkpoint | None, chans: int, pictures: bool, same: bool
) -> tuple[list[float] | None, list[float] | None]:
    """Mean and std: the config's, else the checkpoint's where its channels are the ``same``, without one ImageNet's for
    RGB; None where they are to be measured."""
    found = []
    for name in ("mean", "std"):
        values = getattr(data, name)
        if values is None and init is not None:
            values = list(getattr(init, name))
            if pictures and chans == 1 and len(values) == 3 and "bands" not in init.extra:
                values = [round(sum(values) / 3, 6)]  # of grey images under weights that learned from RGB
            elif not same or len(values) != chans:
                values = None
        elif values is None and pictures and chans == 3:
            values = list(getattr(config, f"IMAGENET_{name.upper()}"))
        if values is not None and len(values) != chans:
            raise UserError(f"data.{name}: {len(values)} values for a model of {chans} channels, wanted one a channel")
        found.append(values)
    return found[0], found[1]
