"""What is known of a run's backbone before it is built: from the config and the checkpoint that it starts from."""

from dataclasses import dataclass

import torch

from idmm import config
from idmm.errors import UserError
from idmm.models.build import check_kwargs, check_name, create_backbone
from idmm.models.channels import input_channels
from idmm.models.weights import Checkpoint, Report, read_checkpoint
from idmm.seeding import derive, seeded

DEFAULT_MODEL = "deit_tiny_patch16_224"


@dataclass(frozen=True)
class ModelSpec:
    """What is known of the backbone before it is built."""

    name: str  # timm's
    kwargs: dict  # for its constructor
    mean: list[float] | None  # of each channel, on pixel values in [0, 1]; None: nobody knows, it is to be measured
    std: list[float] | None
    drop_path: float  # stochastic depth rate
    init: Checkpoint | None  # weights to start from
    range: str | list[float] = "auto"  # of grey images of more than 8 bits, see config.Data
    patch_drop: float = 0.0  # share of patches left out in training
    in_chans: int = 3  # channels of its images

    def build(self, size: int, seed: int, num_classes: int = 0, dynamic: bool = False) -> torch.nn.Module:
        """Builds the backbone at an image size, its fresh weights from the seed; ``dynamic``: for others as well."""
        chans = {} if self.in_chans == 3 else {"in_chans": self.in_chans}
        kwargs = {**self.kwargs, **chans, "num_classes": num_classes}
        with seeded(derive(seed, "model")):
            return create_backbone(
                self.name, size, drop_path=self.drop_path, patch_drop=self.patch_drop, dynamic_size=dynamic, **kwargs
            )

    def load(self, model: torch.nn.Module, strict: bool = False) -> Report | None:
        """Loads the weights to start from into all but the classifier, the first layer adapted to other channels;
        returns what became of them, to be logged."""
        return None if self.init is None else self.init.load_into(model, strict=strict, in_chans=self.in_chans)


def model_spec(config, field: str = "init") -> ModelSpec:
    """Decides the model by the run's ``model``, ``data`` and checkpoint ``init``, which messages call ``field``.

    Raises:
        UserError: ``model.name`` or ``model.kwargs`` contradict the checkpoint, all in one; or ``data.mean`` or ``std``
            has not a number a channel.
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
    before = _channels(init, name, kwargs)
    chans = data.in_chans or before
    mean, std = _statistics(data, init, chans)
    scale = data.range if data.range != "auto" or init is None or chans != before else init.range
    return ModelSpec(name, kwargs, mean, std, model.drop_path, init, scale, model.patch_drop, chans)


def _channels(init: Checkpoint | None, name: str, kwargs: dict) -> int:
    """Returns the channels of a checkpoint's images, which a run without a wish goes on with; 3 without one."""
    if init is None:
        return 3
    return init.in_chans if init.name is not None else input_channels(name, kwargs, init.state) or 3


def _contradictions(config, init: Checkpoint, kwargs: dict) -> list[str]:
    model, faults = config.model, []
    if model.name not in (None, init.name):
        faults.append(f"model.name: '{model.name}', but '{init.source}' is {init.name}; leave it out or make it agree")
    for key, value in model.kwargs.items():
        if kwargs.get(key) != value:
            has = f"'{init.source}' has {kwargs.get(key)!r}"
            faults.append(f"model.kwargs: {key} is {value!r}, but {has}; leave it out or make it agree")
    return faults


def _statistics(data: config.Data, init: Checkpoint | None, chans: int) -> list[list[float] | None]:
    """Mean and std: the config's, else the checkpoint's, else ImageNet's of RGB; None where they are to be measured."""
    found = []
    for name, given in (("mean", data.mean), ("std", data.std)):
        values = given or list(getattr(init, name) if init else getattr(config, f"IMAGENET_{name.upper()}"))
        if given is None and init is not None and init.name is None and chans == 1:
            values = [round(sum(values) / 3, 6)]
        if given is not None and len(values) != chans:
            raise UserError(f"data.{name}: {len(values)} values for a model of {chans} channels, wanted one a channel")
        found.append(values if len(values) == chans else None)
    return found
