"""``idmm train``: from a folder of images to a classifier in a given time."""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState

from idmm import distributed
from idmm.auto.configs import step_config
from idmm.auto.data import (
    EXCLUDE,
    SKIPPED,
    all_images,
    count,
    data_of,
    readable_images,
)
from idmm.auto.features import training_features
from idmm.auto.linear import fit_head
from idmm.auto.plan import (
    FEATURES,
    FILE,
    NETWORK,
    STAGE1,
    STARTUP,
    TRIAL,
    Classifier,
    TrainState,
    make_plan,
)
from idmm.auto.trial import choose_classifier
from idmm.config import FinetuneConfig, parsing
from idmm.config.commands import TrainCommand
from idmm.config.schema import flatten
from idmm.data.fingerprint import image_changes, listed_again, listing_fingerprint, refuse_changes
from idmm.data.images import AUTO
from idmm.data.listing import list_images
from idmm.data.registry import resolve_name
from idmm.data.split import Listing, with_unlabelled
from idmm.data.user_lists import SPLIT
from idmm.display import show
from idmm.errors import Fault, UserError
from idmm.evaluation.baseline import BASELINE, BASELINE_SIZE
from idmm.evaluation.evaluate import LinearHead
from idmm.files import (
    WITHOUT,
    Json,
    holds_run,
    made_folder,
    read_json,
    reading,
    write_json,
)
from idmm.models.hog_conv import CONVNET
from idmm.models.public import resolved_source
from idmm.models.spec import ModelSpec, model_spec
from idmm.notebook import Result
from idmm.progress import duration, log
from idmm.report.stats import compared
from idmm.runs.commands import finetune, pretrain
from idmm.runs.finetune import train_classifier
from idmm.runs.resolve import check_out_of_images, default_size, resolve_finetune
from idmm.text import counted
from idmm.training import clock
from idmm.training.device import pick_device
from idmm.training.log import details_in_file, log_once, logging_by, screen
from idmm.training.run_folder import check_config

CHANCE = 0.05  # p-value below which a difference counts
LEAST = 0.1  # of the time, for each step at least, but for folds of the trial
IMAGES = "images.json"  # the digests of the images that the command began with
SHORTEST = 0.01  # minutes for all steps, which divide them to a thousandth


@contextlib.contextmanager
def _printed() -> Iterator[None]:
    """Print the log as the command line does, if the call came from Python."""
    if log.handlers:
        yield
        return
    with log_once(), logging_by(screen()):
        yield


@_printed()
def train(command: TrainCommand | Json | str, started_at: float | None = None) -> Result:
    """Train a classifier on a folder of images in ``command.minutes``; ``command.out`` is the run
    that fine-tunes it.

    Stage 1, if there is one, lies in OUT/stage1, the features in OUT/features, the trial on
    held-out training images in OUT/trial, the comparison in OUT/scratch. Repeating the command
    resumes it.

    Args:
        command: A TrainCommand, a mapping of its keys (those of ``idmm train --help``), or the path
            of a YAML file.
        started_at: When the minutes began (``clock.now()``); None: now.

    Returns:
        What ``train.json`` holds: ``counts`` of the images, the ``plan`` with its reasons,
        ``candidates`` and their accuracy on held-out training images, the ``best`` of them,
        ``result``, that of the classifier, and with ``compare`` ``scratch``, that of training from
        scratch, and ``gain`` over it: ``points``, and ``p``, the chance of a difference as large
        between equals.

    Raises:
        UserError: No labels, a mistake in the flags, or ``out`` holds something else.
        RunError: Training could not go on.
    """
    if started_at is None:
        started_at = clock.now()
    command = parsing.build(TrainCommand, command)
    data, _ = resolve_name(command.data)
    command = replace(command, data=data, init=resolved_source(command.init))
    out = Path(command.out)
    state = _load(command, out)
    is_new = not out.exists() or not any(out.iterdir())
    listing = None
    if state is None:
        check_out_of_images(command)
        _check_files(out)
        made_folder(command.out)
    else:
        _check_images(command, state)
    try:
        if state is None:
            state, listing = _planned(command, out)
        state = _of_first_process(state, command.device)
        if not state.result:
            _run_steps(command, state, (clock.now() - started_at) / 60, listing)
            state.save(out)
        elif command.compare and not state.scratch:
            _print(f"{out}: finished already")
        else:
            _print(f"{out}: finished already, nothing to do")
    except UserError:  # of a step, too: another command may take the folder
        _release(out, is_new)
        raise
    if command.compare and not state.scratch:
        _compare(command, state)
    lines = _report(state)
    lines.append(f"{out / FILE}. The classifier is {out / 'model.safetensors'}")
    _print("\n".join(lines))
    return Result(state.content)


def _print(text: str) -> None:
    if distributed.rank() == 0:
        show(text)


def _of_first_process(state: TrainState, device: str) -> TrainState:
    """Return the first process's state: another may have read the plan's file later."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=pick_device(device) == "cpu")
    first: TrainState = distributed.broadcast(state)
    return first


# ---------------------------------------------------------------------- the folder
def _load(command: TrainCommand, out: Path) -> TrainState | None:
    """Return the state that an earlier call of the same command saved."""
    if not (out / FILE).exists():
        return None
    with reading(out / FILE, "Name a new folder"):
        state = TrainState.of_content(read_json(out / FILE, "Name a new folder"))
    check_config(out, flatten(state.command), flatten(parsing.to_dict(command)))
    return state


def _check_files(out: Path) -> None:
    """Raise UserError if a folder without a state has files of others."""
    names = {path.name for path in out.glob("[!.]*")}  # hidden: files that a kill left unfinished
    if names - {SPLIT, EXCLUDE, SKIPPED, IMAGES}:
        raise UserError(Fault("out", f"'{out}' has other files", "Name a new folder"))


def _release(out: Path, is_new: bool) -> None:
    """Remove the state of a command that failed, or its new folder, unless a run began."""
    has_run = any(holds_run(out / step) for step in ("", "stage1"))
    if has_run or any(out.rglob("*.lock")):
        return
    if is_new:
        shutil.rmtree(out, ignore_errors=True)
    else:
        for name in (FEATURES, NETWORK):
            shutil.rmtree(out / name, ignore_errors=True)
        (out / FILE).unlink(missing_ok=True)


# ---------------------------------------------------------------------- the images and the plan
def _check_images(command: TrainCommand, state: TrainState) -> None:
    """Raise UserError if the images changed since the command began.

    If it is finished, they may be gone.
    """
    file = Path(command.out) / IMAGES
    listing: Listing | None
    if state.result and (state.scratch or not command.compare):
        listing = listed_again(functools.partial(all_images, command.data), command.data)
    else:
        listing = all_images(command.data)
    if listing is not None and file.exists():
        with reading(file, WITHOUT):
            saved = read_json(file, WITHOUT)
            images = listing_fingerprint(with_unlabelled(listing), saved)
            changes = image_changes(saved, images)
        refuse_changes(changes, command.out)


def _planned(command: TrainCommand, out: Path) -> tuple[TrainState, Listing]:
    """List the images and choose what to do. Broken images are skipped now."""
    spec = _spec(command, command.init)
    data = command.data
    if spec.init is not None:  # its weights have the channels
        data = replace(data, in_chans=spec.in_chans, bands=spec.bands)
    opened_at = time.time()
    images = all_images(data)
    chosen, listing, is_deep = readable_images(data, out, images)
    weights_size = None
    is_foreign = False
    if spec.init is not None:
        known = spec.init
        is_foreign = chosen.channels != known.in_chans or (is_deep and known.range == AUTO)
        weights_size = default_size(spec)
    model = replace(command.model, name=spec.name, kwargs=spec.kwargs)
    counts = count(listing)
    plan = make_plan(replace(command, model=model), counts, weights_size, is_foreign)
    if plan.way == "pretrain" and chosen.subset and data.labels is not None:
        whole = list_images(replace(chosen, subset=None), labelled=False, unlabelled=False)
        if whole.train.labels is None:  # stage 1 would draw from images without labels, too
            raise UserError.of(
                "data.subset", "some training images have no label", "Pass data.labelled instead"
            )
    if distributed.rank() == 0:
        content = listing_fingerprint(with_unlabelled(images))
        write_json(out / IMAGES, content | {"time": opened_at})
    state = TrainState(parsing.to_dict(command), parsing.to_dict(chosen), counts, plan)
    return state, listing


def _spec(command: TrainCommand, init: str | None) -> ModelSpec:
    """Return the network that learns, from weights or fresh."""
    model = command.model
    if init is None and model.name is None:
        model = replace(model, **CONVNET)
    return model_spec(replace(command, init=init, model=model))


# ---------------------------------------------------------------------- the steps
def _run_steps(
    command: TrainCommand, state: TrainState, before: float, listing: Listing | None
) -> None:
    """Log the plan and run its steps in the time that is left after ``before`` (minutes).

    The time of each step is saved when it begins, so that it can be resumed. ``listing``: The
    images, if this process chose them.
    """
    out = Path(command.out)
    state.before += distributed.broadcast(before)  # of each start
    remaining = command.minutes - state.before
    _log_plan(command, state, remaining)
    if remaining < SHORTEST and not state.minutes:
        least = max(2 * before, before + STARTUP / 60)
        raise UserError(
            Fault(
                "minutes",
                f"got {command.minutes:g}, but {duration(60 * before)} were gone before the first "
                f"stage, expected at least {least:.2g}",
            )
        )
    init = command.init
    if state.plan.way == "pretrain":
        remaining -= _run_step(command, state, "stage1", STAGE1 * remaining)["seconds"] / 60
        init = str(out / "stage1")
    started_at = clock.now()
    data = data_of(command, state)
    if listing is None:
        listing = list_images(data, labelled=True, unlabelled=True)
    state.save(out)
    spec = _spec(command, init)
    features = training_features(command, state, data, spec, listing.train, remaining)
    spent = distributed.broadcast((clock.now() - started_at) / 60)
    remaining -= state.minutes.setdefault("features", round(spent, 3))
    state.save(out)
    if state.best is None:
        remaining -= choose_classifier(command, state, features, remaining, _run_step)
    head = None
    started_at = clock.now()
    if features is not None:
        head = fit_head(features, command.seed)
    remaining -= (clock.now() - started_at) / 60
    result = _run_step(command, state, "last", remaining, head)
    if state.counts.untrained:
        result = {**result, "untrained_classes": state.counts.untrained}
        if distributed.rank() == 0:
            write_json(out / "result.json", result)
    state.result = result


def _log_plan(command: TrainCommand, state: TrainState, remaining: float) -> None:
    """Log the plan and the time that is left (minutes)."""
    for line in state.plan.why:
        log.info("%s", line)
    end = time.strftime("until about %H:%M", time.localtime(time.time() + 60 * remaining))
    if state.minutes:
        end = "resumed"
    more = ""
    if command.compare:
        more = f", then {command.minutes:g} min from scratch (--compare)"
    log.info("%g min at most, %s%s", command.minutes, end, more)


def _run_step(
    command: TrainCommand,
    state: TrainState,
    step: str,
    minutes: float,
    head: LinearHead | None = None,
) -> Json:
    """Run a step for so many minutes and return its result.

    The terminal gets a line and the progress. ``head``: What the classifier starts from.
    """
    least = SHORTEST if step.startswith(TRIAL) else LEAST * command.minutes
    minutes = distributed.broadcast(round(max(minutes, least), 3))
    minutes = state.minutes.setdefault(step, minutes)
    state.save(Path(command.out))
    config = step_config(command, state, step, minutes)
    folder = Path(config["out"])
    time_limit = duration(60 * minutes)
    if step == "last" and state.best == Classifier.LINEAR:
        time_limit = "fitted without training"
    log.info(
        "%s%s: %s. Details: %s",
        state.label(step),
        ", resumed" if holds_run(folder) else "",
        time_limit,
        folder / "log.txt",
    )
    with details_in_file():
        if step == "stage1":
            return pretrain(config)
        if step == "scratch":
            return finetune(config)
        run = resolve_finetune(parsing.build(FinetuneConfig, config))
        return train_classifier(run, head)


def _compare(command: TrainCommand, state: TrainState) -> None:
    """Train from scratch, and compare the classifier with it."""
    out = Path(command.out)
    state.scratch = _run_step(command, state, "scratch", command.minutes)
    gain = None
    if distributed.rank() == 0:  # the others may be ahead of files
        gain = compared(out, out / "scratch")
    state.gain = distributed.broadcast(gain)
    state.save(out)


# ---------------------------------------------------------------------- the report
def _report(state: TrainState) -> list[str]:
    """Return the lines of the result.

    They are accuracy, baseline, largest class and the gain, if there was a comparison.
    """
    result = state.result
    assert result is not None  # of a finished command
    low, high = result["top1_interval"]
    groups = ""
    if "test_groups" in result:
        groups = f" of {counted(result['test_groups'], 'group')}"
    lines = [
        *_candidate_lines(state),
        f"{state.best}: top-1 {result['top1']:.1f} % ({low:.1f} to {high:.1f}) "
        f"on {result['test_size']} test images{groups}",
        f"  the baseline, fitted to {result[BASELINE_SIZE]} of {state.counts.labelled} labelled "
        f"images: {result[BASELINE]:.1f} %",
        f"  the largest class every time: {result['largest_class']:.1f} %",
    ]
    if low <= result[BASELINE]:
        lines.append(
            "  This is not clearly better than the baseline on these test images. "
            "Add labels or --minutes"
        )
    gain = state.gain
    scratch = state.scratch
    if gain and scratch:
        verdict = "a gain" if gain["points"] > 0 else "a loss"
        if gain["p"] >= CHANCE:
            verdict = "too small to tell from chance"
        lines += [
            f"  from scratch at {state.plan.scratch_size} px, in {scratch['seconds']:.0f} s: "
            f"{scratch['top1']:.1f} %",
            f"  the difference: {gain['points']:+.1f} points, {verdict} (p = {gain['p']:.2g})",
        ]
    return lines


def _candidate_lines(state: TrainState) -> list[str]:
    """Return what was tried and what is kept."""
    if not state.candidates:
        return []
    lines = ["accuracy on held-out training images:"]
    for label, top1 in state.candidates.items():
        kept = " (kept)" if label == state.best else ""
        lines.append(f"  {label}: {top1:.1f} %{kept}")
    return lines
