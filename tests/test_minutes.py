"""``train.minutes``: schedules and the end follow the clock, which the tests move."""

import pytest
from folders import result
from helpers import column, flags, inside, inside_ok, logged, metrics, read, refused, state
from pytest import approx
from test_distributed import together
from test_resume import stop_at

# 40 images: an epoch has two steps
SMALL = {
    "data__subset": {"per_class": 4},
    "train__epochs": None,
    "train__eval_every": None,
    "train__save_minutes": 60,
}
BOTH = pytest.mark.parametrize("stage", ["pretrain", "finetune"])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def rates_of(out):
    """The learning rates of the last phase, after each epoch."""
    records = metrics(out)
    return [record["lr"] for record in records if record["stage"] == records[-1]["stage"]]


@BOTH
def test_a_run_ends_in_its_time(stage, fake_clock, out):
    inside_ok(stage, out, **SMALL, train__minutes=4.0)
    results = result(out)
    assert results["seconds"] == approx(240, abs=8)
    assert results["minutes"] == 4.0
    assert results["epochs"] == len(metrics(out)) >= results["whole_epochs"] > 5
    assert rates_of(out)[-1] < 0.05 * max(rates_of(out)), "a cosine over the time"
    recipe = {"pretrain": 800, "finetune": 200}
    assert read(out / "config.yaml")["train"]["epochs"] == recipe[stage]
    assert "ends at about" in logged(out)


@pytest.mark.parametrize(
    "epochs, peak",
    [
        (0, 1),
        (2, 2),
        (100, 3),
    ],
)
def test_a_warmup_ends_after_its_epochs_or_at_a_tenth(epochs, peak, fake_clock, out):
    """A tenth of the time is three epochs."""
    inside_ok("pretrain", out, **SMALL, train__minutes=4.0, train__warmup_epochs=epochs)
    rates = rates_of(out)
    assert len(rates) == 30
    assert rates.index(max(rates)) + 1 == approx(peak, abs=1)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_a_command_counts_from_its_start(fake_clock, out):
    fake_clock.start = 120.0
    inside_ok("pretrain", out, **SMALL, train__minutes=4.0)
    assert result(out)["seconds"] == approx(240, abs=8)
    assert metrics(out)[-1]["step"] == approx(30, abs=2)


def test_checkpoints_are_no_part_of_the_pace(fake_clock, out):
    fake_clock.checkpoint = 20.0
    inside_ok("pretrain", out, **SMALL, train__minutes=1.0)
    assert state(out)["timer"]["image_seconds"] == approx(4 / 20)


@pytest.mark.parametrize(
    "every, image",
    [
        (1, 0.02),
        (None, 4 / 20 / 3),
    ],
)
def test_the_last_evaluation_has_its_time(every, image, fake_clock, out):
    """As measured before, or a third of a training image's time."""
    fake_clock.evaluated_image = image
    timed = {
        **SMALL,
        "train__minutes": 4.0,
        "train__eval_every": every,
        "stages": [{"size": 16}],
    }
    inside_ok("finetune", out, **timed)
    assert result(out)["seconds"] == approx(240, abs=16)
    assert "top1" in metrics(out)[-1]


def test_sizes_share_the_minutes_by_epochs_and_pixels(fake_clock, out):
    """16 and 32 px, of as many epochs each: a fifth, and the rest."""
    fake_clock.step = 1.0
    sizes = [{"size": 16}, {"size": 32}]
    inside_ok(
        "finetune",
        out,
        **SMALL,
        train__minutes=4.0,
        stages=sizes,
    )
    steps = {record["stage"]: record["step"] for record in metrics(out)}
    assert steps[1] == approx(0.2 * steps[2], abs=8)


def test_no_more_epochs_than_asked_for(fake_clock, out, tmp_path, capsys):
    """In the ratio of the sizes; progress is that of the steps then."""
    inside_ok("finetune", out, **SMALL, train__minutes=60, train__max_epochs=8)
    assert result(out)["epochs"] == result(out)["whole_epochs"] == 8
    assert rates_of(out)[-1] < 0.2 * max(rates_of(out))
    capsys.readouterr()
    for minutes, epochs, line in (
        (None, 4, "got 4 without minutes, expected minutes, or epochs instead"),
        (60, 1, "got 1, expected at least one epoch for each of 2 stages"),
    ):
        limits = {"train__minutes": minutes, "train__max_epochs": epochs}
        argv = [
            "finetune",
            *flags(
                "finetune",
                tmp_path / "none",
                **SMALL,
                **limits,
            ),
        ]
        assert refused(capsys, argv) == [f"train.max_epochs: {line}"]


def test_a_partial_epoch_has_its_record_and_a_warning(fake_clock, out):
    fake_clock.step = 100.0
    inside_ok("pretrain", out, **SMALL, train__minutes=0.5)
    assert result(out)["epochs"] == 1
    assert result(out)["whole_epochs"] == 0
    assert [(record["epoch"], record["step"]) for record in metrics(out)] == [(1, 1)]
    assert "training ended before it had seen every image once" in logged(out)


def test_a_resumed_run_goes_on_with_its_time(fake_clock, out):
    timed = {**SMALL, "train__minutes": 4.0}
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 1, 1)
        assert inside("finetune", out, **{**timed, "train__save_minutes": 0}) == 130
    assert state(out)["seconds"] > 0
    inside_ok("finetune", out, **timed)
    assert result(out)["seconds"] == approx(240, abs=8)
    records = metrics(out)
    assert len({(record["stage"], record["epoch"]) for record in records}) == len(records)
    steps = column(records, "step")
    assert steps == sorted(steps)
    assert steps[-1] <= 60
    assert inside("finetune", out, **timed) == 0, "finished"


def test_the_last_epoch_is_evaluated_on_a_slow_disk(fake_clock, tmp_path):
    """Time passes after an epoch that was not the last by the clock."""
    fake_clock.step = 0.4
    fake_clock.record = 0.8
    weights = tmp_path / "weights"  # kNN is measured if a run starts from some
    inside_ok("pretrain", weights, **{**SMALL, "train__epochs": 1})
    timed = {**SMALL, "train__batch_size": 40, "init": str(weights)}
    for number in range(5):
        minutes = (6 + 0.2 * number) / 60
        run = tmp_path / f"run{number}"
        inside_ok("pretrain", run, **timed, train__minutes=minutes)
        assert "knn" in metrics(run)[-1]


def test_processes_end_together(out):
    """By the first one's clock, in their time."""
    with together("pretrain", out, **SMALL, train__minutes=0.1) as processes:
        assert processes.wait() == 0, processes.said()
    assert result(out)["epochs"] == len(metrics(out))
    assert result(out)["seconds"] == approx(6, abs=5)


def test_folds_share_the_time(fake_clock, out):
    fake_clock.step = 1.0
    folds = {"data__folds": 2, "stages": [{"size": 16}]}
    inside_ok("finetune", out, **{**SMALL, **folds}, train__minutes=1.0)
    for fold in ("fold-1", "fold-2"):
        assert read(out / fold / "config.yaml")["train"]["minutes"] == 0.5
