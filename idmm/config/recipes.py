"""What null in the config means to a pretraining method, and what it refuses. No torch: plans ask too."""

import importlib.util
from dataclasses import replace

from idmm.config.methods import METHODS, Method, keys_read, projects, unread
from idmm.config.parsing import changed
from idmm.config.stages import PretrainConfig
from idmm.config.views import COLOURS, DEFAULT_COLOURS, CropGroup, Views, group_sizes
from idmm.errors import UserError, install


def default_crops(name: str) -> list[CropGroup]:
    """Returns a method's groups of crops."""
    return [CropGroup(**group) for group in METHODS[name].crops]


def _filled_views(views: Views, name: str) -> tuple[Views, list[str]]:
    """Fills in the crops and colours that are left to the method; a colour that is given holds for all its crops."""
    recipe, notes = METHODS[name], []
    given = {colour for colour in COLOURS if getattr(views, colour) is not None}
    crops = views.crops
    if crops is None:
        crops = [replace(group, **dict.fromkeys(given)) for group in default_crops(name)]
        shown = ", ".join(_shown(group) for group in crops)
        notes.append(f"views.crops: {shown} of the area, {name}'s")
    notes += [f"views.{key}: {value}, {name}'s" for key, value in recipe.colours.items() if key not in given]
    colours = {key: recipe.colours.get(key, getattr(DEFAULT_COLOURS, key)) for key in COLOURS if key not in given}
    return replace(views, crops=crops, **colours), notes


def _shown(group: CropGroup) -> str:
    own = {name: getattr(group, name) for name in COLOURS if getattr(group, name) is not None}
    colours = "".join(f", {name} {value}" for name, value in own.items())
    return f"{group.count} of {group.scale[0]:g} to {group.scale[1]:g}" + (f" ({colours[2:]})" if own else "")


def resolve_method(config: PretrainConfig) -> tuple[PretrainConfig, list[str]]:
    """Fills in what ``method``, ``views`` and ``train.warmup_epochs`` leave to the method.

    Returns:
        The config, with null left only where the data or the model decide, and lines for the log.

    Raises:
        UserError: Fields that the method does not read, crops that it cannot take, a library that is missing.
    """
    method, recipe, reads = config.method, METHODS[config.method.name], keys_read(config.method)
    faults = [*unread(method, changed(method)), *_missing(method), *_label_faults(config)]
    views, view_notes = _filled_views(config.views, method.name)
    given, wanted = sum(group.count for group in views.crops), recipe.exactly or recipe.at_least
    if given < wanted or (recipe.exactly and given > wanted):
        exactness = "" if recipe.exactly else "at least "
        faults.append(f"views.crops: {given} crops an image, but {method.name} compares {exactness}{wanted}")
    faults += _drloc_faults(config, views)
    faults += pass_faults(config, config.train.batch_size)
    if faults:
        raise UserError(*faults)
    null = {name: value for name, value in reads.items() if getattr(method, name) is None and value is not None}
    notes = [f"method.{name}: {value}, {method.name}'s" for name, value in null.items() if value is not False]
    notes += view_notes
    train = config.train
    if train.warmup_epochs is None and recipe.warmup_epochs is not None:
        train = replace(train, warmup_epochs=recipe.warmup_epochs)
        notes.append(f"train.warmup_epochs: {recipe.warmup_epochs:g}, {method.name}'s")
    return replace(config, method=replace(method, **null), views=views, train=train), notes


def pass_faults(config: PretrainConfig, batch_size: int) -> list[str]:
    """Returns what is wrong with a method that compares the images of a pass if a pass has one.

    Args:
        config: The run's.
        batch_size: Images of a step, which may be fewer than asked for (images).
    """
    name, passes = config.method.name, config.train.accumulate
    if not METHODS[name].within_pass or batch_size // passes > 1:
        return []
    shown = f"train.batch_size: {batch_size}" + (f", in train.accumulate's {passes} passes" if passes > 1 else "")
    return [f"{shown}: {name} compares the images of a pass with one another; wanted at least 2 of them"]


def learns_labels(config: PretrainConfig) -> bool:
    """Whether a run trains a classifier beside its backbone, on what labels there are."""
    return bool(config.method.label_weight)


def needs_labels(config: PretrainConfig) -> bool:
    """Whether a run's method is of use on labelled images alone."""
    return METHODS[config.method.name].labelled


def _label_faults(config: PretrainConfig) -> list[str]:
    """What is wrong with keys that say whose labels are used, and how."""
    method, faults = config.method, []
    if method.instance_decay != Method().instance_decay and not learns_labels(config):
        why = "the N-way loss is all there is to learn from; wanted none, or a label_weight > 0"
        faults.append(f"method.instance_decay: {method.instance_decay!r}, but method.label_weight is 0: {why}")
    if config.data.labelled is not None and needs_labels(config):
        why = f"{method.name} cannot use images without labels; --data.subset draws the images to train on"
        faults.append(f"data.labelled: {why}")
    elif config.data.labelled is not None and not learns_labels(config):
        wanted = "wanted a weight > 0, or no labelled"
        faults.append(f"data.labelled: no label is used, as method.label_weight is 0; {wanted}")
    return faults


def _drloc_faults(config: PretrainConfig, views: Views) -> list[str]:
    """A line for each group of crops whose size ``drloc`` does not take: its head knows one grid."""
    sizes = enumerate(group_sizes(views)) if config.drloc.weight else ()
    wanted = f"drloc.weight is {config.drloc.weight:g}, whose loss takes crops of views.size ({views.size}) alone"
    return [f"views.crops[{n}].size: {size}, but {wanted}" for n, size in sizes if size != views.size]


def _missing(method: Method) -> list[str]:
    wanted = dict.fromkeys([*(["lightly"] if projects(method) else []), *METHODS[method.name].libraries])
    return [
        f"method.name: {method.name} needs {name}; install it with: {install('baselines')}"
        for name in wanted
        if importlib.util.find_spec(name) is None
    ]
