"""``train.minutes``: how many epochs fit into the time that a run is given, found once, before its first step.

Steps and evaluations are timed on a copy of the run that is thrown away: its weights start anew afterwards.
"""

import bisect
import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from idmm import distributed
from idmm.calibrate import written_bytes
from idmm.data.split import counted
from idmm.engine import Loop
from idmm.errors import UserError
from idmm.evaluate import evaluating
from idmm.methods import Method
from idmm.progress import brief, duration, log, not_logged
from idmm.session import Session
from idmm.stages import Phase
from idmm.stages.assemble import Assembly, LoadedSplits
from idmm.stages.results import ending_seconds

AIM = 0.95  # of the minutes: what is left makes up for a machine that slows down
SHORT = 0.85  # of the minutes: a run that ends before this says why
TRIAL = 0.03, 2.0, 0.1, 60.0  # seconds of timing: this share of the run, at least so many, within this share and bound
BLOCKS = 5  # that the timed steps are split into; their median forgets what else the machine did for a moment
LOOKING = 0.2  # of the trial, at most, for evaluation
EPOCH, SAVE, SPEED = 0.01, 0.02, 100e6  # seconds around an epoch and a checkpoint, bytes a second of the latter


class TooShort(UserError):
    """Not even one epoch, of so many ``seconds``, fits into the minutes that a run was given; ``wanted`` are enough."""

    def __init__(self, minutes: float, why: str, wanted: float, seconds: float):
        super().__init__(f"train.minutes: got {minutes:g}, but {why}; wanted at least {wanted:g}")
        self.why, self.wanted, self.seconds = why, wanted, seconds


@dataclass(frozen=True)
class Rates:
    """What a phase costs (seconds)."""

    start: float  # until the first step is done: the model, the workers, what compiles
    image: float  # an image in training
    look: float  # an image in evaluation
    save: float  # a checkpoint


def within_minutes(
    run: Session,
    parts: Assembly,
    splits: LoadedSplits,
    batches: Callable[[Phase, LoadedSplits], Iterable[dict]],
    prepare: Callable[[Method], None] = lambda method: None,
) -> Assembly:
    """Returns the parts with as many epochs as fit into ``train.minutes``, in the ratio of the recipe's, and writes
    them to config.yaml; the parts as they are where there are no minutes, or the run is taken up again.

    All processes must call together, and go by the first one's clock.

    Args:
        run: Its time so far, reading the images included, is spent.
        parts: The epochs of their phases give the ratio.
        splits: The images.
        batches: Makes what is evaluated between epochs, of a phase and the images at its size.
        prepare: What is done with a method before its first step, and costs nothing when it is done again.

    Raises:
        UserError: Not even one epoch fits.
    """
    minutes = parts.config.train.minutes
    if minutes is None or run.folder.state is not None:
        return parts
    share, least, bound, most = TRIAL
    trial = min(max(share * 60 * minutes, least), bound * 60 * minutes, most)
    log.info("train.minutes %g: steps are timed for some %s, then the epochs are known", minutes, duration(trial))
    each = trial / len(parts.phases)
    rates = [_rates(run, parts, phase, splits.at(phase.size), batches, prepare, each) for phase in parts.phases]
    drawn = drawing_seconds(run) if run.folder.leader else 0.0

    def seconds(epochs: list[int]) -> float:
        return forecast(parts.with_epochs(epochs), rates, splits, drawn)

    left, shares = 60 * minutes - run.seconds, [phase.epochs for phase in parts.phases]
    found = fitting(shares, seconds, left - (1 - AIM) * 60 * minutes, left)
    found, takes, left = distributed.broadcast((found, seconds(found or [1] * len(rates)), left))
    each = [len(splits.train) * rate.image for rate in rates]
    if found is None:
        raise _too_short(parts, each, 60 * minutes - left, takes)
    cap = parts.config.train.max_epochs
    if capped := cap is not None and sum(found) > cap:
        found = next(few for total in range(cap, 0, -1) if sum(few := shared(shares, total)) <= cap)
        takes = distributed.broadcast(seconds(found))
    parts = parts.with_epochs(found)
    run.folder.write_config(parts.config)
    _say(parts, each, 60 * minutes - left, takes, capped)
    return parts


def length_result(parts: Assembly) -> dict:
    """Returns what ``result.json`` says of a run with ``train.minutes``: those, and the epochs of all phases."""
    minutes = parts.config.train.minutes
    return {} if minutes is None else {"minutes": minutes, "epochs": sum(phase.epochs for phase in parts.phases)}


def _sizes(parts: Assembly, each: list[float]) -> list[str]:
    """Returns what an epoch of each phase takes (seconds), as people say it."""
    several = len(parts.phases) > 1
    return [f"{brief(t)} s" + f" at {phase.size} px" * several for t, phase in zip(each, parts.phases, strict=True)]


def _say(parts: Assembly, each: list[float], spent: float, takes: float, capped: bool) -> None:
    minutes, sizes = parts.config.train.minutes, _sizes(parts, each)
    epochs = [counted(phase.epochs, "epoch") for phase in parts.phases]
    counts = ", ".join(f"{n} of about {t}" for n, t in zip(epochs, sizes, strict=True))
    ends = time.strftime("%H:%M", time.localtime(time.time() + takes))
    log.info("train.minutes %g: %s; ends at about %s, after %s", minutes, counts, ends, duration(spent + takes))
    if capped:
        log.info("train.max_epochs %d: so the run ends early", parts.config.train.max_epochs)
    elif spent + takes < SHORT * 60 * minutes:
        log.info("train.minutes %g: one epoch more would not fit, so the run ends early", minutes)


def _too_short(parts: Assembly, each: list[float], spent: float, takes: float) -> "TooShort":
    """Says what a run of one epoch a phase takes, of which ``spent`` seconds are gone and ``takes`` are to come."""
    wanted = 1.1 * (spent + takes) / 60 / AIM
    digits = 1 - math.floor(math.log10(wanted))
    wanted = math.ceil(wanted * 10**digits) / 10**digits
    line = f"an epoch takes {' and '.join(_sizes(parts, each))}, and the run around it"
    line += f" {duration(spent + takes - sum(each))}"
    return TooShort(parts.config.train.minutes, line, wanted, sum(each))


def shared(shares: list[int], total: int) -> list[int]:
    """Returns about ``total`` epochs in the ratio of ``shares``, at least one each."""
    return [max(1, round(total * share / sum(shares))) for share in shares]


def fitting(shares: list[int], seconds: Callable[[list[int]], float], aim: float, most: float) -> list[int] | None:
    """Returns epochs in the ratio of ``shares``, at least one each, whose ``seconds`` are nearest to ``aim`` and at
    ``most`` so many; None where there are none. ``seconds`` must not fall with the epochs."""

    high = 1
    while seconds(shared(shares, high)) <= aim:
        high *= 2
    fits = bisect.bisect_right(range(1, high), aim, key=lambda total: seconds(shared(shares, total)))
    near = [shared(shares, total) for total in (max(1, fits), fits + 1)]
    near = [found for found in near if seconds(found) <= most]
    return min(near, key=lambda found: abs(seconds(found) - aim), default=None)


def forecast(parts: Assembly, rates: list[Rates], splits: LoadedSplits, drawn: float) -> float:
    """Returns the seconds from the first step to ``result.json``, each phase at its rates, where drawing the curves of
    a single epoch takes ``drawn``."""
    train, images, held = parts.config.train, len(splits.train), len(splits.val or splits.test or ())
    total = ending_seconds(parts, splits, [rate.look for rate in rates], drawn)
    for phase, rate in zip(parts.phases, rates, strict=True):
        training = phase.epochs * (images * rate.image + EPOCH)
        looking = parts.stage.looks(parts.config, phase, images, held) * rate.look
        saved = min(phase.steps(images), (training + looking) / max(1e-9, 60 * train.save_minutes))
        total += rate.start + training + looking + (2 + saved) * rate.save
    return total


# ---------------------------------------------------------------------- timing
def drawing_seconds(run: Session) -> float:
    """Returns what drawing the curves of a single epoch takes, the import of matplotlib left out."""
    from idmm.pictures import curves_figure, save

    began, picture = time.monotonic(), run.folder.path / "last" / "trial.png"
    with contextlib.suppress(Exception):  # what cannot be drawn costs no time in the end
        record = {"epoch": 1, "stage": 1, "step": 1, "loss": 1.0, "lr": 1.0, "seconds": 1.0}
        save(curves_figure({"": [[record]]}), picture)
    picture.unlink(missing_ok=True)
    return time.monotonic() - began


def _rates(
    run: Session, parts: Assembly, phase: Phase, splits: LoadedSplits, batches, prepare, seconds: float
) -> Rates:
    """Times a phase for about so many seconds, on a run of its own that ends here."""
    began, train = time.monotonic(), splits.train
    classes = None if train.classes is None else len(train.classes)
    with not_logged():  # of a trial's parts: the run's own say it again
        method = parts.method(phase, parts.backbone(phase, classes), len(train), classes)
        plan = parts.plan(phase, train, [])
    start = time.monotonic() - began
    prepare(method)
    run.start(method, plan.transform, plan.batches)
    scaler = None if run.accelerator.scaler is None else run.accelerator.scaler.state_dict()
    began = time.monotonic()
    with not_logged():
        loop = Loop(run, method, plan)
    with contextlib.closing(loop.trial()) as steps:
        float(next(steps)[0])
        start += time.monotonic() - began
        image = _image_seconds(steps, seconds, -(-2 * loop.workers // plan.batches.accumulate))
    look = _look_seconds(run, lambda: batches(phase, splits), loop.averaged, LOOKING * seconds)
    kept, _ = written_bytes(method, bool(parts.config.train.ema))
    run.accelerator.free_memory()  # else it holds the trial's model and optimizer to the end
    if scaler is not None:
        run.accelerator.scaler.load_state_dict(scaler)
    return Rates(start, image, look, SAVE + kept / SPEED)


def _image_seconds(steps: Iterator[tuple[torch.Tensor, int]], seconds: float, ahead: int) -> float:
    """Returns the seconds of an image in training: the median over :data:`BLOCKS` of steps, for about so many seconds.

    The first steps are not counted, whose ``ahead`` batches the workers had made before.
    """
    late = time.monotonic() + 2 * seconds
    for _ in range(ahead):
        float(next(steps)[0])
        if distributed.any_process(time.monotonic() > late)[0]:
            break
    rates, over = [], False
    while len(rates) < BLOCKS and not over:
        began, images, done = time.monotonic(), 0, False
        while not done:
            loss, count = next(steps)
            images += count
            done = distributed.any_process(time.monotonic() - began >= seconds / BLOCKS)[0]
        float(loss)  # waits for the device
        rates.append((time.monotonic() - began) / images)
        over = distributed.any_process(time.monotonic() > late)[0]
    return statistics.median(rates)


@torch.no_grad()
def _look_seconds(run: Session, evaluated: Callable[[], Iterable[dict]], model, seconds: float) -> float:
    """Returns the seconds of an image in evaluation, the first batch left out, which is slower."""
    began, spent = time.monotonic(), []
    late = began + seconds
    with evaluating(model):
        for batch in itertools.chain.from_iterable(evaluated() for _ in range(2)):  # few images make a single batch
            with run.autocast():
                out = model(batch["images"].to(run.device))
            out = out[0]["scores"] if isinstance(out, list) else out  # of a detector
            float(out.sum())  # waits for the device
            now = time.monotonic()
            spent.append((now - began, len(batch["images"])))
            began = now
            if now > late and len(spent) > 1:
                break
    taken, images = (sum(of[1:]) for of in (zip(*spent, strict=True) if spent else ((), ())))
    return taken / max(1, images) / distributed.world()  # of few images a process may have none
