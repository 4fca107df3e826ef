"""The steps that all stages share: open the run, try the model, build it, plan the loop."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from idmm import distributed
from idmm.data.folder import root_folder
from idmm.data.loaders import BatchFn, BatchPlan
from idmm.data.split import counted
from idmm.errors import Interrupted, SizeError, UserError
from idmm.evaluation.evaluators import Evaluator
from idmm.files import holds_run
from idmm.methods.drloc import Localization
from idmm.models.build import try_size
from idmm.models.vit_init import can_init_vit
from idmm.progress import logging_to
from idmm.seeding import derive, seeded
from idmm.stages import Phase
from idmm.stages.resolve import RunSetup
from idmm.training.plan import PhasePlan
from idmm.training.run_context import RunContext

log = logging.getLogger("idmm")


# ---------------------------------------------------------------------- opening
@contextlib.contextmanager
def open_run(setup: RunSetup) -> Iterator[RunContext]:
    """Open the run's folder, log and interrupts, and close them however the block ends.

    The model of a new run is tried at every size before there is a folder. A run that is refused leaves no folder. The
    log of a finished run only says so, else it begins with the notes of ``setup``.
    """
    config, notes = setup.config, setup.notes
    check_sizes(setup)
    run = RunContext(config, setup.started_at)
    with run.folder, logging_to(run.folder.path), run.interrupts:
        try:
            if run.folder.finished:
                notes = (f"{config.out}: finished already, nothing to do",)
            elif config.data.name == "folder":
                root_folder(config.data)  # a missing folder needs no notes
            if run.folder.restarts:
                why = "a run was begun here but had saved no checkpoint yet (train.save_minutes)"
                notes = (f"{config.out}: {why}, so it starts from the beginning", *notes)
            for note in notes:
                log.info("%s", note)
            yield run
        except KeyboardInterrupt:
            checkpoint = run.folder.checkpoint_note or ". There is no checkpoint yet"
            raise Interrupted(f"interrupted before the end of a step{checkpoint}") from None


def check_sizes(setup: RunSetup) -> None:
    """Try the model of a new run at every size, so that no size is refused hours after the start.

    Raises:
        UserError: A line per fault, with the field.
    """
    if holds_run(setup.config.out):
        return
    faults = []
    for phase in setup.phases:
        try:
            try_model(setup, phase)
        except SizeError as error:
            faults += [f"{phase.field}: {fault}" for fault in error.faults]
        except UserError as error:
            faults += error.faults
    if faults:
        raise UserError(*dict.fromkeys(faults))


def try_model(setup: RunSetup, phase: Phase, with_weights: bool = False) -> None:
    """Build the model of a phase once.

    Raises:
        UserError: The backbone, drloc's head or, if requested, the weights to start from do not fit.
    """
    spec, backbone, faults = setup.spec, build_backbone(setup, phase), []
    setup.stage.check_network(phase, backbone, spec)
    for field, size in phase.other_sizes:
        try:
            try_size(backbone, spec.name, size, spec.in_chans)
        except SizeError as error:
            faults += [f"{field}: {fault}" for fault in error.faults]
    if faults:
        raise UserError(*faults)
    structured = getattr(setup.config.model, "start", "timm") == "structured" and spec.init is None
    if structured and not can_init_vit(backbone):
        line = f"{spec.name} is not one of timm's vision transformers with learned positions, expected timm or auto"
        raise UserError(f"model.start: structured, but {line}")
    if with_weights:
        spec.load(backbone)
    build_localization(setup, phase, backbone)


# ---------------------------------------------------------------------- building
def build_backbone(setup: RunSetup, phase: Phase, classes: int = 0) -> torch.nn.Module:
    """Build the backbone of a phase with fresh weights, and a classifier if there are ``classes``."""
    return setup.spec.build(phase.size, setup.config.seed, classes, dynamic=bool(phase.other_sizes))


def build_localization(setup: RunSetup, phase: Phase, backbone: torch.nn.Module) -> Localization | None:
    """Build the head of ``drloc``, its fresh weights drawn from the run's seed; None if its weight is 0."""
    drloc = getattr(setup.config, "drloc", None)
    if drloc is None or not drloc.weight:
        return None
    with seeded(derive(setup.config.seed, "drloc", phase.size)):
        return Localization(backbone, drloc, phase.size, setup.spec.in_chans)


# ---------------------------------------------------------------------- the loop's plan
def plan_phase(
    setup: RunSetup,
    phase: Phase,
    images: int,
    transform: BatchFn,
    evaluators: list[Evaluator],
    ending: tuple[int, float] = (0, 0.0),
    keep: str | None = None,
) -> PhasePlan:
    """Return what the loop needs to know about a phase on ``images`` training images, see :class:`PhasePlan`."""
    train, later_phases = setup.config.train, setup.phases[phase.number - 1 :]
    max_epochs, epochs = None, phase.epochs
    if train.minutes is not None:
        max_epochs = _share_max_epochs(setup.phases, train.max_epochs)[phase.number - 1]
        epochs = max_epochs or sys.maxsize
    order = derive(setup.config.seed, "stage", phase.number)
    processes = (distributed.rank(), distributed.world())
    return PhasePlan(
        number=phase.number,
        label=phase.label,
        epochs=phase.epochs,
        batches=BatchPlan(images, phase.batch_size, epochs, order, *processes, train.accumulate),
        transform=transform,
        lr=phase.lr,
        evaluators=evaluators,
        keep=keep,
        share=_cost(phase) / sum(map(_cost, later_phases)),
        max_epochs=max_epochs,
        ending=ending,
    )


def _cost(phase: Phase) -> int:
    """Return the share of ``train.minutes`` that a phase gets, relative to the other phases."""
    return phase.epochs * phase.size**2


def _share_max_epochs(phases: tuple[Phase, ...], max_epochs: int | None) -> list[int | None]:
    """Return at most ``max_epochs`` in all, in the ratio of the phases' epochs, at least one each; None: no limit."""
    if max_epochs is None:
        return [None] * len(phases)
    sum_of_epochs = sum(phase.epochs for phase in phases)
    for total in range(max_epochs, 0, -1):
        epochs = [max(1, round(total * phase.epochs / sum_of_epochs)) for phase in phases]
        if sum(epochs) <= max_epochs:
            return epochs
    return [1] * len(phases)


def log_length(setup: RunSetup, images: int) -> None:
    """Log how many steps a run on that many training images has."""
    minutes = setup.config.train.minutes
    for phase in setup.phases:
        steps, batch = phase.steps(images), min(phase.batch_size, images)
        per_epoch = counted(steps // phase.epochs, "step")
        length = f"{steps} in {counted(phase.epochs, 'epoch')}"
        if minutes is not None:
            length = f"for train.minutes {minutes:g}"
        log.info("%s: %s of %d images an epoch, %s", phase.label, per_epoch, batch, length)


# ---------------------------------------------------------------------- images
def with_statistics(setup: RunSetup, mean: list[float], std: list[float]) -> RunSetup:
    """Return the setup with the mean and std of the channels, which may have been measured from the images."""
    return replace(setup, spec=replace(setup.spec, mean=mean, std=std))
