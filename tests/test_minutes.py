"""``train.minutes``: schedules and the end follow the clock, which the tests inject."""

import time

import pytest
import yaml
from folders import result
from helpers import flags, inside, logged, metrics, refused, state
from test_distributed import together
from test_resume import stop_at

from idmm.config import FinetuneConfig, parsing
from idmm.data.loaders import BatchPlan
from idmm.runs import folds
from idmm.runs.resolve import resolve_finetune
from idmm.training import clock, loop
from idmm.training.clock import ByClock, Length, Timer
from idmm.training.run_folder import RunFolder

SMALL = {"data__subset": {"per_class": 4}, "train__epochs": None, "train__save_minutes": 60}
BOTH = pytest.mark.parametrize("stage", ["pretrain", "finetune"])
STEP = loop.Loop._step


@pytest.fixture
def seconds(monkeypatch):
    """A clock that only steps and checkpoints move, by as many seconds each as the list has."""
    at = [0.0]
    each = [1.0, 0.0]
    save = RunFolder.save_state

    def step(loop, *args):
        at[0] += each[0]
        return STEP(loop, *args)

    def slow(folder, saved):
        at[0] += each[1]
        save(folder, saved)

    monkeypatch.setattr(clock, "now", lambda: at[0])
    monkeypatch.setattr(loop.Loop, "_step", step)
    monkeypatch.setattr(RunFolder, "save_state", slow)
    return each


@BOTH
def test_a_run_ends_in_its_time(stage, seconds, tmp_path):
    """40 images; 20 of a step in pretraining, so two steps an epoch. The learning rate ends near
    zero."""
    assert inside(stage, tmp_path / "run", **SMALL, train__minutes=1.0) == 0
    found = result(tmp_path / "run")
    records = metrics(tmp_path / "run")
    assert abs(found["seconds"] - 60) < 5
    assert found["minutes"] == 1.0
    assert found["epochs"] == len(records) >= found["whole_epochs"] > 5
    *_, rates = (
        [r["lr"] for r in records if r["stage"] == n] for n in range(1, records[-1]["stage"] + 1)
    )
    assert rates[-1] < 0.05 * max(rates), "a cosine over the time"
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert config["train"]["epochs"] == {"pretrain": 800, "finetune": 200}[stage], (
        "as the recipe has it"
    )
    assert "ends at about" in logged(tmp_path / "run")


def test_checkpoints_are_no_part_of_the_pace(seconds, tmp_path):
    seconds[1] = 20.0
    assert inside("pretrain", tmp_path / "run", **SMALL, train__minutes=1.0) == 0
    assert state(tmp_path / "run")["timer"]["image_seconds"] == pytest.approx(1 / 20)


def test_sizes_share_the_minutes_by_epochs_and_pixels(seconds, tmp_path):
    """16 and 32 px, of as many epochs each: a fifth, and the rest."""
    sizes = [{"size": 16}, {"size": 32}]
    assert inside("finetune", tmp_path / "run", **SMALL, train__minutes=4.0, stages=sizes) == 0
    steps = {record["stage"]: record["step"] for record in metrics(tmp_path / "run")}
    assert steps[1] == pytest.approx(0.2 * steps[2], abs=8)


def test_no_more_epochs_than_asked_for(seconds, tmp_path, capsys):
    """In the ratio of the sizes; progress is that of the steps then."""
    assert (
        inside("finetune", tmp_path / "run", **SMALL, train__minutes=60, train__max_epochs=4) == 0
    )
    found = result(tmp_path / "run")
    assert found["epochs"] == found["whole_epochs"] == 4
    capsys.readouterr()
    said = refused(
        capsys, ["finetune", *flags("finetune", tmp_path / "none", **SMALL, train__max_epochs=4)]
    )
    assert said == ["train.max_epochs: got 4 without minutes, expected minutes, or epochs instead"]
    few = {**SMALL, "train__minutes": 60, "train__max_epochs": 1}
    said = refused(capsys, ["finetune", *flags("finetune", tmp_path / "none", **few)])
    assert said == ["train.max_epochs: got 1, expected at least one epoch for each of 2 stages"]


def test_a_partial_epoch_has_its_record_and_too_few_minutes_a_warning(seconds, tmp_path):
    seconds[0] = 100.0
    assert inside("pretrain", tmp_path / "run", **SMALL, train__minutes=0.5) == 0
    found, (record,) = result(tmp_path / "run"), metrics(tmp_path / "run")
    assert (found["epochs"], found["whole_epochs"], record["epoch"], record["step"]) == (1, 0, 1, 1)
    assert "training ended before it had seen every image once" in logged(tmp_path / "run")


@BOTH
def test_a_resumed_run_goes_on_with_its_time(stage, seconds, tmp_path, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 1, 1)
        asked = {**SMALL, "train__minutes": 3.0}
        assert inside(stage, tmp_path / "run", **{**asked, "train__save_minutes": 0}) == 130
    saved = state(tmp_path / "run")
    assert (
        saved["timer"]["warmup_end"] is None
        or saved["timer"]["warmup_end"] <= saved["timer"]["progress"]
    )
    assert saved["seconds"] > 0
    assert 0 < saved["timer"]["progress"] < 1
    assert inside(stage, tmp_path / "run", **asked) == 0
    assert abs(result(tmp_path / "run")["seconds"] - 180) < 5
    epochs = [(record["stage"], record["epoch"]) for record in metrics(tmp_path / "run")]
    assert len(set(epochs)) == len(epochs), "none twice"
    made = [record["step"] for record in metrics(tmp_path / "run")]
    assert made == sorted(made)
    assert made[-1] <= 180
    assert inside(stage, tmp_path / "run", **asked) == 0, "finished"


@BOTH
def test_the_last_epoch_is_evaluated_on_a_slow_disk(stage, seconds, tmp_path, monkeypatch):
    """Time passes after an epoch that was not the last by the clock: steps of 0.4 s, 0.8 s to write
    a record."""
    seconds[0], at, add = 0.4, clock.now.__closure__[0].cell_contents, RunFolder.add_metrics

    def slowly(folder, record):
        at[0] += 0.8
        add(folder, record)

    monkeypatch.setattr(RunFolder, "add_metrics", slowly)
    start = {"init": str(tmp_path / "weights")} if stage == "pretrain" else {}
    if start:
        assert (
            inside("pretrain", start["init"], data__subset={"per_class": 4}, train__epochs=1) == 0
        )
    for more in (0.0, 0.2, 0.4, 0.6, 0.8):
        minutes = {"train__minutes": (20 + more) / 60, "train__batch_size": 40}
        assert inside(stage, tmp_path / f"run{more}", **SMALL, **start, **minutes) == 0
        assert ("knn" if start else "top1") in metrics(tmp_path / f"run{more}")[-1]


def by_clock(start, minutes, warmup_epochs=0, **length):
    """A started clock of a phase of 1 step per epoch, which had ``start`` seconds before."""
    made = ByClock(Length(BatchPlan(4, 4, 100, 0), steps=100, **length), minutes, warmup_epochs)
    made.start(start, 0)
    return made


def test_progress_follows_time_or_steps_and_never_falls():
    timer = by_clock(10.0, 110 / 60, 5, max_epochs=50)
    assert timer.measure(10.0, 0) == 0 and timer.measure(60.0, 1) == 0.5
    assert timer.measure(10.0, 25) == 0.5, "by steps"
    timer.advance(0.4, 9)
    assert timer.measure(20.0, 9) == 0.4
    assert timer.measure(500.0, 9) == 1.0


def test_time_for_the_end_is_set_aside():
    """A third of a training image's time, until an evaluation was measured."""
    timer = by_clock(0.0, 100 / 60, final_images=30, final_seconds=5.0)
    assert timer.remaining(0.0) == 95
    timer.count_step(0.5)
    assert timer.remaining(0.0) == pytest.approx(90)
    timer.count_evaluation(1.0)
    assert timer.remaining(0.0) == 65 and timer.measure(65.0, 1) == 1.0


def test_a_warmup_ends_after_its_epochs_or_at_a_tenth():
    by_steps = by_clock(0.0, 100 / 60, 4)
    by_steps.advance(0.02, 2)
    assert by_steps.timer.warmup_end is None and by_steps.schedule_progress(2) == pytest.approx(
        0.05
    )
    by_steps.advance(0.04, 4)
    assert by_steps.timer.warmup_end == 0.04 and by_steps.schedule_progress(4) == pytest.approx(
        clock.WARMUP
    )
    by_steps.advance(1.0, 90)
    assert by_steps.schedule_progress(90) == pytest.approx(1.0)
    by_time = by_clock(0.0, 100 / 60, 100)
    by_time.advance(0.12, 3)
    again = by_clock(0.0, 100 / 60, 100)
    again.load(Timer(**vars(by_time.timer)), at_end=False)
    assert again.timer.warmup_end == 0.12 and again.timer.progress == 0.12
    assert by_clock(0.0, 1.0).schedule_progress(0) == 0, "no warm-up"


def test_processes_end_together(tmp_path):
    """By the first one's clock, in the time that they were given."""
    with together("pretrain", tmp_path / "run", **SMALL, train__minutes=0.1) as processes:
        assert processes.wait() == 0, processes.said()
    found = result(tmp_path / "run")
    assert found["epochs"] == len(metrics(tmp_path / "run"))
    assert abs(found["seconds"] - 6) < 5


def test_a_command_counts_from_its_start():
    config = parsing.build(FinetuneConfig, {"out": "a", "model": {"name": "vit_tiny_patch16_224"}})
    assert resolve_finetune(config, 5.0).started_at == 5.0
    assert abs(resolve_finetune(config).started_at - time.monotonic()) < 1


def test_folds_share_the_time():
    config = FinetuneConfig(out="a", data={"folds": 4}, train={"minutes": 2.0})
    assert folds.config_of_fold(config, 1, 4).train.minutes == 0.5
