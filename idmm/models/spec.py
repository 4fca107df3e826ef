"""Resolve a run's backbone before it is built, from the config and the checkpoint in ``init``."""

from dataclasses import dataclass

from torch import nn

from idmm import config
from idmm.config.commands import ProbeConfig, TrainCommand
from idmm.config.stages import Backbone as ModelConfig
from idmm.errors import Fault, UserError
from idmm.models.base import Backbone
from idmm.models.build import Kwargs, check_kwargs, check_name, create_backbone
from idmm.models.hog import Hog
from idmm.models.weights import Checkpoint, Range, Report, read_checkpoint
from idmm.seeding import derive, seeded

DEFAULT_MODEL = "deit_tiny_patch16_224"
_IMAGENET = {"mean": config.IMAGENET_MEAN, "std": config.IMAGENET_STD}
_OF_IMAGES = ("num_classes", "img_size", "in_chans")  # arguments that are not of the architecture
_CONFLICT = "Leave it out or make it agree"
# those that say what the model and its images are
WithModel = (
    config.PretrainConfig | config.FinetuneConfig | config.DenseConfig | ProbeConfig | TrainCommand
)


@dataclass(frozen=True)
class ModelSpec:
    """Everything about the backbone that is known before it is built."""

    name: str  # timm's
    kwargs: Kwargs  # for its constructor
    in_chans: int
    # one number per channel. None: measured from the training images later
    mean: list[float] | None
    std: list[float] | None
    drop_path: float  # stochastic depth rate
    init: Checkpoint | None  # weights to start from
    range: Range = "auto"  # value range of images with more than 8 bits, see config.Data
    bands: list[int] | None = None  # channels of the files to use, see config.Data

    def build(
        self,
        size: int,
        seed: int,
        num_classes: int = 0,
        dynamic: bool = False,
    ) -> Backbone:
        """Build the backbone for an image size (pixels) with fresh weights.

        ``dynamic``: for other sizes, too.
        """
        kwargs = {**self.kwargs, "num_classes": num_classes}
        if self.in_chans != 3:
            kwargs["in_chans"] = self.in_chans
        with seeded(derive(seed, "model")):
            model = create_backbone(
                self.name, size, drop_path=self.drop_path, dynamic_size=dynamic, **kwargs
            )
        self.set_statistics(model)
        return model

    def load(self, model: Backbone) -> Report | None:
        """Load the weights to start from, except the classifier.

        The first layer is adapted to other channels.

        Returns:
            A report for the log, or None without ``init``.
        """
        report = None if self.init is None else self.init.load_into(model)
        self.set_statistics(model)
        return report

    def set_statistics(self, model: nn.Module) -> None:
        """Pass known mean and std to a model that undoes the normalisation of its images."""
        if isinstance(model, Hog) and self.mean is not None and self.std is not None:
            model.set_statistics(self.mean, self.std)


def model_spec(config: WithModel, field: str = "init") -> ModelSpec:
    """Resolve the model from a run's ``model``, ``data`` and checkpoint ``init``.

    Args:
        config: Of the run.
        field: Name of ``init`` in messages.

    Raises:
        UserError: ``model.name`` or ``model.kwargs`` contradict the checkpoint (all faults
            together), or the number of values differs from the number of channels.
    """
    model = config.model
    data = config.data
    init = None
    if config.init is not None:
        init = read_checkpoint(config.init, field)
    name, kwargs = _architecture(model, init)
    check_name(name)
    check_kwargs(model.kwargs)
    bands = data.bands
    value_range: Range = data.range
    chans = data.channels
    if chans is None:
        chans = 3 if init is None else init.in_chans
    known = None  # the checkpoint, if its values are valid for these channels
    if init is not None and init.in_chans == chans and init.bands in (None, bands or init.bands):
        known = init
        bands = bands or init.bands
        if value_range == "auto":
            value_range = init.range
    statistics = {}
    for statistic in _IMAGENET:
        values = getattr(data, statistic)
        if values is None:
            values = _statistic(statistic, init, known, chans, bands)
        if values is not None and len(values) != chans:
            raise UserError.of(
                f"data.{statistic}",
                f"{len(values)} values for {chans} channels, expected one per channel",
            )
        statistics[statistic] = values
    _check_ranges(value_range, chans, bands)
    return ModelSpec(
        name,
        kwargs,
        chans,
        **statistics,
        drop_path=model.drop_path,
        init=init,
        range=value_range,
        bands=bands,
    )


def _architecture(model: ModelConfig, init: Checkpoint | None) -> tuple[str, Kwargs]:
    """Return name and arguments of the model: the config's, or the checkpoint's, which agree."""
    if init is None:
        return model.name or DEFAULT_MODEL, model.kwargs
    if init.name is None:
        if model.name is None:
            raise UserError.of(
                "model.name", f"'{init.source}' does not name its model", "Give its timm name"
            )
        return model.name, model.kwargs
    kwargs = {key: value for key, value in init.kwargs.items() if key not in _OF_IMAGES}
    faults = []
    if model.name not in (None, init.name):
        faults.append(
            Fault("model.name", f"'{model.name}', but '{init.source}' is {init.name}", _CONFLICT)
        )
    for key, value in model.kwargs.items():
        saved = kwargs.get(key)
        if saved != value:
            faults.append(
                Fault(
                    "model.kwargs",
                    f"{key} is {value!r}, but '{init.source}' has {saved!r}",
                    _CONFLICT,
                )
            )
    if faults:
        raise UserError(*faults)
    return init.name, kwargs


def _check_ranges(value_range: Range, chans: int, bands: list[int] | None) -> None:
    """Raise UserError unless there is one value range, or one per channel of no picture."""
    if not isinstance(value_range[0], (list, tuple)):
        return
    count = len(value_range)
    if bands is None and chans in (1, 3):
        text = f"{count} ranges, expected one for pictures, [low, high]"
    elif count != chans:
        text = f"{count} ranges, expected one per channel, {chans}"
    else:
        return
    raise UserError.of("data.range", text)


def _statistic(
    name: str,
    init: Checkpoint | None,
    known: Checkpoint | None,
    chans: int,
    bands: list[int] | None,
) -> list[float] | None:
    """Return mean or std by ``name``: the checkpoint's, or ImageNet's. None: to be measured."""
    if init is None:
        return list(_IMAGENET[name]) if bands is None and chans == 3 else None
    values: list[float] = list(getattr(init, name))
    if bands is None and chans == 1 and len(values) == 3 and init.bands is None:
        return [round(sum(values) / 3, 6)]  # of grey images with weights from RGB
    return values if known is not None and len(values) == chans else None
