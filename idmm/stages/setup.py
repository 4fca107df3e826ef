"""The steps that all stages share: open the run, try the model, build it, plan the loop."""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator

import torch

from idmm import distributed
from idmm.data.loaders import BatchFn, BatchPlan
from idmm.data.split import counted
from idmm.data.store import Stores
from idmm.errors import Interrupted, SizeError, UserError, checked
from idmm.evaluation.evaluators import Evaluator
from idmm.files import holds_run
from idmm.methods.drloc import Localization
from idmm.models.build import try_size
from idmm.models.vit_init import can_init_vit
from idmm.seeding import derive, seeded
from idmm.training.log import logging_to
from idmm.training.outputs import ending
from idmm.training.plan import PhasePlan
from idmm.training.run_context import RunContext
from idmm.training.run_folder import RunFolder
from idmm.training.stage import Phase, RunSetup

log = logging.getLogger("idmm")


@contextlib.contextmanager
def open_run(setup: RunSetup) -> Iterator[RunContext]:
    """Open the run's folder, log and interrupts, and close them however the block ends.

    The model of a new run is tried at every size before there is a folder. A run that is refused leaves no folder. The
    log of a finished run only says so, else it begins with the notes of ``setup``.
    """
    check_sizes(setup)
    run = RunContext(setup.config, setup.started_at)
    with open_folder(run.folder, setup), run.interrupts:
        try:
            yield run
        except KeyboardInterrupt:
            checkpoint = run.folder.checkpoint_note or ". There is no checkpoint yet"
            raise Interrupted(f"{setup.config.out}: interrupted{checkpoint}. Repeat the command to continue") from None


@contextlib.contextmanager
def open_folder(folder: RunFolder, setup: RunSetup) -> Iterator[None]:
    """Log to a run's folder inside the block, first its notes or that it is finished, and close it at the end."""
    with folder, logging_to(folder.path):
        for note in (f"{folder.path}: finished already, nothing to do",) if folder.finished else setup.notes:
            log.info("%s", note)
        yield


def check_sizes(setup: RunSetup) -> None:
    """Try the model of a new run at every size, so that no size is refused hours after the start.

    Raises:
        UserError: A line per fault, with the field.
    """
    if not holds_run(setup.config.out):
        checked(*(functools.partial(try_model, setup, phase) for phase in setup.phases))


def try_model(setup: RunSetup, phase: Phase, with_weights: bool = False) -> None:
    """Build the model of a phase once.

    Raises:
        UserError: The backbone, drloc's head or, if requested, the weights to start from do not fit.
    """
    spec, field = setup.spec, phase.field
    try:
        backbone = build_backbone(setup, phase)
        setup.stage.check_network(phase, backbone, spec)
        for name, size in phase.other_sizes:
            field = name
            try_size(backbone, spec.name, size, spec.in_chans)
    except SizeError as error:
        raise UserError(*(f"{field}: {fault}" for fault in error.faults)) from None
    structured = getattr(setup.config.model, "start", "timm") == "structured" and spec.init is None
    if structured and not can_init_vit(backbone):
        line = f"{spec.name} is not one of timm's vision transformers with learned positions, expected timm or auto"
        raise UserError(f"model.start: structured, but {line}")
    if with_weights:
        spec.load(backbone)
    build_localization(setup, phase, backbone)


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


def plan_phase(
    setup: RunSetup,
    phase: Phase,
    images: Stores,
    transform: BatchFn,
    evaluators: list[Evaluator],
    score: str | None = None,
) -> PhasePlan:
    """Return what the loop needs to know about a phase, see :class:`PhasePlan`, and log how many steps it has.

    ``score`` names that of the best epoch, with ``train.keep`` best.
    """
    train, later_phases, count = setup.config.train, setup.phases[phase.number - 1 :], len(images.train)
    is_last = len(later_phases) == 1
    max_epochs, epochs, steps = None, phase.epochs, phase.steps(count)
    length = f"{steps} in {counted(phase.epochs, 'epoch')}"
    if train.minutes is not None:
        if train.max_epochs is not None:
            max_epochs = max(1, train.max_epochs * phase.epochs // sum(other.epochs for other in setup.phases))
        epochs, length = max_epochs or sys.maxsize, f"for train.minutes {train.minutes:g}"
    per_epoch, batch = counted(steps // phase.epochs, "step"), min(phase.batch_size, count)
    log.info("%s: %s of %d images per epoch, %s", phase.label, per_epoch, batch, length)
    order = derive(setup.config.seed, "stage", phase.number)
    processes = (distributed.rank(), distributed.world())
    return PhasePlan(
        phase=phase,
        batches=BatchPlan(count, phase.batch_size, epochs, order, *processes, train.accumulate),
        transform=transform,
        evaluators=evaluators,
        keep=score if score and is_last and train.keep == "best" else None,
        share=_cost(phase) / sum(map(_cost, later_phases)),
        max_epochs=max_epochs,
        ending=ending(setup, images) if is_last else (0, 0.0),
    )


def _cost(phase: Phase) -> int:
    """Return the share of ``train.minutes`` that a phase gets, relative to the other phases."""
    return phase.epochs * phase.size**2
