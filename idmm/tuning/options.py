"""What ``idmm tune`` compares: a few values of each option that a method reads, the recipe's own among them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from idmm.config import PretrainConfig, global_groups, parsing
from idmm.config.methods import keys_read
from idmm.config.views import Colours

LOWS = (0.14, 0.2, 0.35, 0.5)  # smallest global crop (share of the area)
STRENGTHS = (0.0, 0.25, 0.5)  # of the recipe's colours
RATES = (1 / 3, 3, 10)  # times the recipe's learning rate
SCALES = (5.0, 10.0, 30.0)  # where the cosine N-way layer's scale starts
CUTMIX = (0.0, 0.5)
STRONG = ("jitter", "channel_jitter")  # strengths of colours
FAINTER = ("grey_prob", "blur_prob", "solarize_prob", "channel_drop")  # probabilities that go with them


@dataclass(frozen=True)
class Option:
    """Something that trials differ in."""

    name: str
    title: str  # for people
    usual: Any  # the recipe's value
    values: list  # to compare, in order, the recipe's among them


def options_of(base: PretrainConfig) -> list[Option]:
    """Returns the options of a recipe whose method's own values are filled in."""
    crops, method, reads, found = base.views.crops, base.method, keys_read(base.method), []

    def add(name: str, title: str, usual: Any, others: Iterable) -> None:
        found.append(Option(name, title, usual, sorted({usual, *others})))

    low, high = crops[0].scale
    add("crop_scale", "smallest global crop, share of the area", low, (n for n in LOWS if n < high))
    if global_groups(crops, base.views.size) < len(crops):
        add("local_crops", "small crops beside the global ones", True, [False])
    add("colour_strength", "colours, grey and blur, times the recipe's", 1.0, STRENGTHS)
    add("lr", "peak learning rate", base.train.lr, (float(f"{base.train.lr * times:.2g}") for times in RATES))
    if "classifier_scale" in reads and method.classifier == "cosine":
        add("classifier_scale", "start of the N-way layer's scale", method.classifier_scale, SCALES)
    if "cutmix_alpha" in reads:
        add("cutmix_alpha", "CutMix's alpha, 0 for none", method.cutmix_alpha, CUTMIX)
    return found


def shown(value: Any) -> str:
    """Returns a value of an option for people."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else f"{value:g}"


def applied(base: PretrainConfig, choice: dict[str, Any], epochs: int) -> PretrainConfig:
    """Returns the config of a choice of the options, by name.

    Without the local crops an epoch costs less; ``epochs`` counts epochs of the recipe's number of crops, so that all
    choices cost alike.
    """
    crops, strength = base.views.crops, choice["colour_strength"]
    whole, before = global_groups(crops, base.views.size), sum(group.count for group in crops)
    low = choice["crop_scale"]
    crops = [replace(group, scale=[low, group.scale[1]]) for group in crops[:whole]] + crops[whole:]
    if not choice.get("local_crops", True):
        crops = crops[:whole]
    epochs = max(1, round(epochs * before / sum(group.count for group in crops)))
    views = replace(_fainter(base.views, strength), crops=[_fainter(group, strength) for group in crops])
    method = replace(base.method, **{n: choice[n] for n in ("classifier_scale", "cutmix_alpha") if n in choice})
    return replace(base, views=views, method=method, train=replace(base.train, lr=choice["lr"], epochs=epochs))


def _fainter(colours: Colours, strength: float) -> Colours:
    """The same with colours of a part of their strength; of blur, grey and the like it is the probability."""
    changed = {n: round(strength * v, 4) for n in FAINTER if (v := getattr(colours, n)) is not None}
    for name in STRONG:
        if (values := getattr(colours, name)) is not None:
            changed[name] = [round(strength * v, 4) for v in values]
    return replace(colours, **changed) if strength != 1 else colours


def differences(base: PretrainConfig, other: PretrainConfig) -> dict:
    """Returns the keys in which a config differs from another one, nested as in a YAML file."""
    before, found = parsing.flatten(parsing.plain(base)), {}
    for key, value in parsing.flatten(parsing.plain(other)).items():
        if value != before[key]:
            section, _, name = key.rpartition(".")
            found.setdefault(section, {})[name] = value
    return found
