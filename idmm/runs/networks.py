"""The networks of a run, first tried and then built."""

import functools
from collections.abc import Callable
from dataclasses import replace

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.phases import Phase
from idmm.errors import SizeError, UserError, checked
from idmm.files import holds_run
from idmm.methods.drloc import Localization
from idmm.models.base import Backbone
from idmm.models.build import try_size
from idmm.models.vit_init import can_init_vit
from idmm.seeding import derive, seeded
from idmm.training.run import AnyConfig, Run

HAND_MADE = ("hog", "hog_conv")
LabelledRun = Run[PretrainConfig | FinetuneConfig]
Attempt = Callable[[Phase, Backbone], object]  # builds the rest of the network on a backbone


def try_sizes(run: Run[AnyConfig], build_rest: Attempt | None = None) -> None:
    """Try the network of a new run at every size, so that no size is refused hours after the start.

    Raises:
        UserError: A line per fault, with the field.
    """
    assert run.config.out is not None
    if not holds_run(run.config.out):
        checked(*(functools.partial(try_phase, run, one, build_rest) for one in run.phases))


def try_phase(run: Run[AnyConfig], phase: Phase, build_rest: Attempt | None = None) -> None:
    """Build the network of a phase once.

    Raises:
        UserError: The backbone or what is built on it does not fit.
    """
    field = phase.field
    try:
        backbone = build_backbone(run, phase)
        if build_rest is not None:
            build_rest(phase, backbone)
        for name, size in phase.other_sizes:
            field = name
            try_size(backbone, run.spec.name, size, run.spec.in_chans)
    except SizeError as error:
        raise UserError(*(replace(fault, field=field) for fault in error.faults)) from None


def try_start(run: LabelledRun, phase: Phase, backbone: Backbone) -> None:
    """Raise UserError if a backbone cannot be pretrained, started or localized as asked."""
    name = run.spec.name
    if isinstance(run.config, PretrainConfig) and name in HAND_MADE:
        raise UserError.of(
            "model.name",
            f"{name} has hand-made features, which cannot be pretrained",
            "Probe or fine-tune it instead",
        )
    is_structured = run.config.model.start == "structured" and run.spec.init is None
    if is_structured and not can_init_vit(backbone):
        raise UserError.of(
            "model.start",
            f"structured, but {name} is not one of timm's vision transformers with learned "
            "positions, expected timm or auto",
        )
    build_localization(run, phase, backbone)


def build_backbone(run: Run[AnyConfig], phase: Phase, classes: int = 0) -> Backbone:
    """Build the backbone of a phase with fresh weights, and a classifier if there are classes."""
    dynamic = bool(phase.other_sizes)
    return run.spec.build(phase.size, run.config.seed, classes, dynamic=dynamic)


def build_localization(run: LabelledRun, phase: Phase, backbone: Backbone) -> Localization | None:
    """Build the head of ``drloc``, its fresh weights drawn from the run's seed.

    None: its weight is 0.
    """
    drloc = run.config.drloc
    if not drloc.weight:
        return None
    with seeded(derive(run.config.seed, "drloc", phase.size)):
        return Localization(backbone, drloc, phase.size, run.spec.in_chans)
