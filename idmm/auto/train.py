"""``idmm train``: from a folder of images to a classifier in a given time, by what was measured to
do best."""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from accelerate import PartialState
from pydantic import TypeAdapter

from idmm import distributed
from idmm.auto.configs import stage_config
from idmm.auto.data import EXCLUDE, SKIPPED, all_images, count, data_of, readable_images
from idmm.auto.plan import (
    FILE,
    STARTUP,
    Kept,
    TrainState,
    check_comparison,
    make_plan,
    way_of,
)
from idmm.auto.pseudolabels import AGREEMENT, joined_by, pseudolabel
from idmm.config import parsing
from idmm.config.commands import TrainCommand
from idmm.data.fingerprint import image_changes, listed_again, listing_fingerprint, refuse_changes
from idmm.data.images import AUTO
from idmm.data.listing import list_images
from idmm.data.registry import resolve_name
from idmm.data.user_lists import SPLIT
from idmm.display import show
from idmm.errors import UserError
from idmm.files import WITHOUT, holds_run, made_folder, read_json, reading, write_json
from idmm.models.spec import model_spec
from idmm.notebook import Result
from idmm.progress import duration, log
from idmm.report.stats import compared
from idmm.runs.commands import finetune, pretrain
from idmm.runs.outputs import BASELINE, BASELINE_SIZE
from idmm.runs.resolve import check_out_of_images
from idmm.text import counted
from idmm.training import clock
from idmm.training.device import pick_device
from idmm.training.log import details_in_file, log_once, logging_by, screen
from idmm.training.run_folder import check_config

CHANCE = 0.05  # p-value below which a difference counts
LEAST = 0.1  # of the time, for each stage at least
IMAGES = "images.json"  # the digests of the images that the command began with
SHORTEST = 0.01  # minutes for all stages, which divide them to a thousandth


@contextlib.contextmanager
def _printed() -> Iterator[None]:
    """Print the log as the command line does, if the call came from Python."""
    if log.handlers:
        yield
        return
    with log_once(), logging_by(screen()):
        yield


@_printed()
def train(command: TrainCommand | dict | str, started_at: float | None = None) -> dict:
    """Train a classifier on a folder of images in ``command.minutes``; ``command.out`` is the run
    that fine-tunes it.

    Stage 1, if there is one, lies in OUT/stage1, its features joined with hand-made ones in
    OUT/features, a network on the given labels in OUT/teacher, the trial on held-out training
    images in OUT/trial, the comparison in OUT/scratch. Repeating the command resumes it.

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
    began = clock.now() if started_at is None else started_at
    command = parsing.build(TrainCommand, command)
    way_of(command)  # before anything is read
    command = replace(command, data=resolve_name(command.data)[0])
    out = Path(command.out)
    state = _load(command, out)
    new = not out.exists() or not any(out.iterdir())
    if state is None:
        check_out_of_images(command)
        # hidden: files that a kill left unfinished
        names = {path.name for path in out.glob("[!.]*")}
        if names - {SPLIT, EXCLUDE, SKIPPED, IMAGES}:
            raise UserError(f"out: '{out}' has other files. Name a new folder")
        made_folder(command.out)
    else:
        check_comparison(command, state.plan.way)  # --compare may be new
        _check_images(command, state)
    try:
        state = _of_first_process(state or _planned(command, out), command.device)
        if state.result:
            _print(
                f"{out}: finished already{'' if command.compare and not state.scratch else ', nothing to do'}"
            )
        else:
            _run(command, state, (clock.now() - began) / 60)
            state.save(out)
    except UserError:  # of a stage, too: another command may take the folder
        busy = any(holds_run(out / part) for part in ("", "stage1", "trial")) or any(
            out.rglob("*.lock")
        )
        if not busy:
            shutil.rmtree(out, ignore_errors=True) if new else (out / FILE).unlink(missing_ok=True)
        raise
    if command.compare and not state.scratch:
        state.scratch = _stage(command, state, "scratch", command.minutes)
        # the others may be ahead of files
        if distributed.rank() == 0:
            gain = compared(out, out / "scratch")
        else:
            gain = None
        state.gain = distributed.broadcast(gain)
        state.save(out)
    _print(
        "\n".join([*_report(state), f"{out / FILE}. The classifier is {out / 'model.safetensors'}"])
    )
    return Result(state.content)


def _print(text: str) -> None:
    if distributed.rank() == 0:
        show(text)


def _of_first_process(state: TrainState, device: str) -> TrainState:
    """Return the first process's state: another may have read the plan's file later."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        PartialState(cpu=pick_device(device) == "cpu")
    return distributed.broadcast(state)


# ---------------------------------------------------------------------- the images and the plan
def _load(command: TrainCommand, out: Path) -> TrainState | None:
    """Return the state that an earlier call of the same command saved."""
    if not (out / FILE).exists():
        return None
    with reading(out / FILE, "Name a new folder"):
        state = TypeAdapter(TrainState).validate_python(read_json(out / FILE, "Name a new folder"))
    check_config(out, parsing.flatten(state.command), parsing.flatten(parsing.to_dict(command)))
    return state


def _check_images(command: TrainCommand, state: TrainState) -> None:
    """Raise UserError if the images changed since the command began. If it is finished, they may be
    gone."""
    file = Path(command.out) / IMAGES
    finished = state.result and (state.scratch or not command.compare)
    list_all = functools.partial(all_images, command.data)
    if finished:
        listing = listed_again(list_all, command.data)
    else:
        listing = list_all()
    if listing is not None and file.exists():
        with reading(file, WITHOUT):
            saved = read_json(file, WITHOUT)
            changes = image_changes(saved, listing_fingerprint(listing, saved))
        refuse_changes(changes, command.out)


def _planned(command: TrainCommand, out: Path) -> TrainState:
    """List the images and choose what to do. Broken images are skipped now."""
    resolved = command
    weights = None
    if command.init:  # its weights have the model and the channels
        spec = model_spec(command)
        data = replace(command.data, in_chans=spec.in_chans, bands=spec.bands)
        model = replace(command.model, name=spec.name, kwargs=spec.kwargs)
        resolved = replace(command, data=data, model=model)
        weights = spec.init
    opened_at = time.time()
    data, listing, deep = readable_images(resolved.data, out)
    foreign = weights is not None and (
        data.channels != weights.in_chans or (deep and weights.range == AUTO)
    )
    counts = count(listing, data, foreign)
    plan = make_plan(replace(resolved, data=data), counts)
    if plan.way == "pretrain" and data.subset and command.data.labels is not None:
        whole = list_images(replace(data, subset=None), labelled=False, unlabelled=False)
        if whole.train.labels is None:  # stage 1 would draw from images without labels, too
            raise UserError(
                "data.subset: some training images have no label. Pass data.labelled instead"
            )
    if distributed.rank() == 0:
        everything = listing_fingerprint(all_images(command.data))
        write_json(out / IMAGES, everything | {"time": opened_at})
    return TrainState(parsing.to_dict(command), parsing.to_dict(data), counts, plan)


# ---------------------------------------------------------------------- the runs
def _run(command: TrainCommand, state: TrainState, before: float) -> None:
    """Log the plan and run its stages in the time that is left after ``before`` (minutes).

    The time of each stage is saved when it begins, so that it can be resumed.
    """
    out = Path(command.out)
    minutes_of = state.minutes
    results = {}
    begun = minutes_of.keys() & state.plan.shares.keys()
    minutes_of["before"] += distributed.broadcast(before)  # of each start
    remaining = command.minutes - minutes_of["before"]
    for line in state.plan.why:
        log.info("%s", line)
    end = time.strftime("until about %H:%M", time.localtime(time.time() + 60 * remaining))
    if command.compare:
        more = f", then {command.minutes:g} min from scratch (--compare)"
    else:
        more = ""
    log.info("%g min at most, %s%s", command.minutes, "resumed" if begun else end, more)
    if remaining < SHORTEST and not begun:
        gone = f"{duration(60 * before)} were gone before the first stage"
        least = max(2 * before, before + STARTUP / 60)
        raise UserError(
            f"minutes: got {command.minutes:g}, but {gone}, expected at least {least:.2g}"
        )
    shares = list(state.plan.shares.items())
    for number, (part, share) in enumerate(shares):
        if part == "last" and "choice" not in minutes_of:
            minutes_of["choice"] = _choose_classifier(command, state, results, remaining)
        if part == "last":
            remaining -= minutes_of["choice"]
        minutes = remaining * share / sum(share for _, share in shares[number:])
        # a first stage that ends early leaves the last one no more than its share
        if state.plan.pseudolabel:
            minutes = min(minutes, share * command.minutes)
        minutes_of.setdefault(
            part, distributed.broadcast(round(max(minutes, LEAST * command.minutes), 3))
        )
        state.save(out)
        results[part] = _stage(command, state, part, minutes_of[part])
        remaining -= results[part]["seconds"] / 60
    state.result = results["last"]
    # the baseline that learned from the given labels, not from pseudo-labels
    if state.learns_pseudolabels:
        baseline = {
            BASELINE: state.pseudolabels.baseline_top1,
            BASELINE_SIZE: state.pseudolabels.given,
        }
        state.result = results["last"] | baseline
        if distributed.rank() == 0:
            write_json(out / "result.json", state.result)


def _choose_classifier(
    command: TrainCommand, state: TrainState, results: dict[str, dict], remaining: float
) -> float:
    """Choose what the last stage trains. Return the minutes that this took."""
    began = clock.now()
    plan = state.plan
    out = Path(command.out)
    outcome = None
    # with few labels: pseudo-labels are used if similar images agree on the class
    if plan.pseudolabel:
        if distributed.rank() == 0:
            if plan.way == "pretrain":
                source = str(out / "stage1")
            else:
                source = command.init
            if "teacher" in plan.shares:
                teacher = str(out / "teacher")
            else:
                teacher = None
            outcome = pseudolabel(
                source, teacher, plan, data_of(command, state), command.device, command.seed, out
            )
        state.pseudolabels, candidates = distributed.broadcast(outcome)
        agreement = state.pseudolabels.agreement
        if plan.joined:
            state.best = joined_by(agreement)
            state.candidates = candidates
        else:
            if agreement >= AGREEMENT:
                state.best = Kept.PSEUDO
            else:
                state.best = Kept.PRETRAINED
    elif plan.trial:
        state.choose_by_trial(results["trial"], 60 * remaining)
        state.best = distributed.broadcast(state.best)  # clocks of processes differ
    elif plan.joined:  # no trial can hold out some of the labelled images
        state.best = Kept.TUNED
    return distributed.broadcast((clock.now() - began) / 60)


def _stage(command: TrainCommand, state: TrainState, part: str, minutes: float) -> dict:
    """Run a stage for so many minutes and return its result. The terminal gets a line and the
    progress."""
    config = stage_config(command, state, part, minutes)
    folder = Path(config["out"])
    parts = [*state.plan.shares, *(["scratch"] if command.compare else [])]
    step = f"step {parts.index(part) + 1} of {len(parts)}"
    if state.is_fitted(part):
        time_of_stage = "fitted without training"
    else:
        time_of_stage = duration(60 * minutes)
    resumed = ", resumed" if holds_run(folder) else ""
    log.info(
        "%s%s: %s, %s. Details: %s",
        step,
        resumed,
        state.label(part),
        time_of_stage,
        folder / "log.txt",
    )
    with details_in_file():
        if part == "stage1":
            return pretrain(config)
        return finetune(config)


# ---------------------------------------------------------------------- the report
def _report(state: TrainState) -> list[str]:
    """Return the lines of the result: accuracy, baseline, largest class and the gain, if there was
    a comparison."""
    lines = []
    result = state.result
    pseudolabel = state.plan.pseudolabel
    if state.command["pseudolabel"] is None:
        cause = "labels are few"
    else:
        cause = "--pseudolabel is true"
    if state.candidates:
        lines.append("accuracy on held-out training images:")
        leads = state.best == max(state.candidates, key=state.candidates.get)
        if leads:
            kept = "kept"
        else:
            kept = f"kept, as {cause if pseudolabel else 'it trains longer in the end'}"
        for label, value in state.candidates.items():
            lines.append(
                f"  {label}: {value:.1f} %" + (f" ({kept})" if label == state.best else "")
            )
        if state.best not in state.candidates:
            why = cause if pseudolabel else "the trial was too short"
            lines.append(f"  {state.best}: kept by a rule and not measured, as {why}")
        elif state.plan.trial and Kept.TUNED not in state.candidates:
            why = "the trial was too short for one pass over the images. Try more --minutes"
            lines.append(f"  {Kept.TUNED}: not trained, as {why}")
    low, high = result["top1_interval"]
    tested = f"({low:.1f} to {high:.1f}) on {result['test_size']} test images"
    if "test_groups" in result:
        tested += f" of {counted(result['test_groups'], 'group')}"
    lines.append(f"{state.best or state.plan.way}: top-1 {result['top1']:.1f} % {tested}")
    baseline = "  the baseline, fitted to {baseline_train_size} of {labelled} labelled images: {baseline_top1:.1f} %"
    lines.append(baseline.format(**result, labelled=state.counts.labelled))
    lines.append(f"  the largest class every time: {result['largest_class']:.1f} %")
    if low <= result["baseline_top1"]:
        lines.append(
            "  This is not clearly better than the baseline on these test images. Add labels or --minutes"
        )
    if state.gain:
        points = state.gain["points"]
        p = state.gain["p"]
        scratch = state.scratch
        verdict = "a gain" if points > 0 else "a loss"
        if p < CHANCE:
            verdict = verdict
        else:
            verdict = "too small to tell from chance"
        seconds = scratch["seconds"]
        size = state.size("scratch")
        lines.append(f"  from scratch at {size} px, in {seconds:.0f} s: {scratch['top1']:.1f} %")
        lines.append(f"  the difference: {points:+.1f} points, {verdict} (p = {p:.2g})")
    return lines
