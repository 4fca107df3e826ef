"""``train.minutes``: as many epochs as fit into a time, found once by timed steps and kept with the run."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from folders import result
from helpers import flags, inside, logged, metrics, refused, same
from test_distributed import together
from test_resume import stop_at

from idmm import stages
from idmm.config import FinetuneConfig, PretrainConfig, parsing
from idmm.session import Session
from idmm.stages import budget, folds
from idmm.stages.advice import advice
from idmm.stages.assemble import assemble
from idmm.stages.budget import Rates, fitting, forecast
from idmm.transfer.config import merged, parse_grid

SMALL = {"data__subset": {"per_class": 4}, "train__epochs": None, "train__save_minutes": 60}
RATE = Rates(start=1.0, image=0.05, look=0.001, save=0.0)


# ------------------------------------------------------------------ how many epochs
def test_epochs_whose_time_is_nearest_to_the_aim():
    def linear(epochs):
        return 10 + 3 * epochs[0]

    assert fitting([800], linear, 57, 60) == [16], "58 s are nearer than 55"
    assert fitting([800], linear, 56.4, 60) == [15]
    assert fitting([800], linear, 57, 57.5) == [15], "58 s would be too long"
    assert fitting([1], linear, 10, 13) == [1] and fitting([1], linear, 10, 12.9) is None
    assert fitting([1], linear, -5, -1) is None, "the time is over"
    assert fitting([200], lambda epochs: 1e-4 * epochs[0], 3600, 3700) == [36_000_000]


@pytest.mark.parametrize("aim", [40, 77.7, 300, 5000])
def test_the_epochs_of_several_sizes_keep_their_ratio(aim):
    def seconds(epochs):
        return 2 * epochs[0] + 7 * epochs[1]

    first, second = fitting([200, 100], seconds, aim, 1.05 * aim)
    assert abs(first - 2 * second) <= 2 and abs(seconds([first, second]) - aim) <= 8 / 2 + 0.5
    assert fitting([800, 1], seconds, 30, 32)[1] == 1, "no size goes without"


@pytest.mark.parametrize(("held", "looked_at"), [(None, 90), (20, 110)])
def test_a_joint_runs_test_images_are_counted_once(held, looked_at):
    """As they are tested; features are taken of them twice more, before and after."""

    class Store(SimpleNamespace):
        def __len__(self):
            return self.n

    stores = {
        "train": Store(n=40, cache="off"),
        "val": held and Store(n=held),
        "test": Store(n=30, cache="off", labels=np.arange(30) % 2),
    }
    train = {"epochs": 2, "monitor_every": 0}
    parts = assemble(PretrainConfig(out="a", method={"label_weight": 1.0}, train=train))
    seconds = forecast(parts, [Rates(start=0.0, image=0.0, look=1.0, save=0.0)], SimpleNamespace(**stores), drawn=0.0)
    assert seconds == pytest.approx(looked_at + 2 * budget.EPOCH)


def fake(patch, rates=(RATE, RATE), timed=False):
    """Makes what a run measures known: seconds before its first step, and rates one phase after the other; if ``timed``
    it measures them all the same, for half a second."""
    rates, measure = iter(rates), budget._rates

    def known(*args):
        if timed:
            measure(*args)
        return next(rates)

    patch.setattr(Session, "seconds", property(lambda self: 10.0))
    patch.setattr(budget, "TRIAL", (0.0, 0.5, 1.0, 0.5))
    patch.setattr(budget, "_rates", known)
    patch.setattr(budget, "drawing_seconds", lambda run: 0.1)


def sizes(*epochs):
    """The stages of tiny fine-tuning, with epochs."""
    return [{"size": 16, "epochs": epochs[0]}, {"size": 32, "lr": 0.001, "batch_size": 24, "epochs": epochs[1]}]


# 40 images. Pretraining: an epoch takes 2.05 s (2 to train, 0.01 around it, 0.04 to look at 40 images), and beside 10 s
# before the first step 1 to start and 3 * 0.1 to draw: 3 epochs end after 17.45 s, next to 0.95 * 18. Fine-tuning: 2.37
# (360 images are looked at) and 2.7, features of 360 images twice 0.36: 4 epochs end after 22.9, next to 0.95 * 24.
ASKED = {"pretrain": {**SMALL, "train__minutes": 0.3}, "finetune": {**SMALL, "train__minutes": 0.4}}
FOUND = {"pretrain": {**SMALL, "train__epochs": 3}, "finetune": {**SMALL, "stages": sizes(2, 2)}}
BOTH = pytest.mark.parametrize("stage", list(ASKED))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs whose epochs can be found by hand, and others that are asked for as many."""
    folder = tmp_path_factory.mktemp("minutes")
    for stage, asked in ASKED.items():
        with pytest.MonkeyPatch.context() as patch:
            fake(patch, timed=True)
            assert inside(stage, folder / stage, **asked) == 0
        assert inside(stage, folder / f"{stage}-epochs", **FOUND[stage]) == 0
    return folder


def no_timing(patch):
    patch.setattr(budget, "_rates", lambda *_: pytest.fail("timed again"))


@BOTH
def test_the_epochs_by_hand(stage, runs):
    found = result(runs / stage)
    config = yaml.safe_load((runs / stage / "config.yaml").read_text())
    assert (found["minutes"], config["train"]["minutes"]) == (ASKED[stage]["train__minutes"],) * 2
    if stage == "pretrain":
        assert found["epochs"] == config["train"]["epochs"] == 3
        assert "train.minutes 0.3: 3 epochs of about 2 s; ends at about " in logged(runs / stage)
    else:
        assert found["epochs"] == 4 and [one["epochs"] for one in config["stages"]] == [2, 2]
        assert "2 epochs of about 2 s at 16 px, 2 epochs of about 2 s at 32 px; ends" in logged(runs / stage)
    assert "of about" not in logged(runs / stage).partition("ends at about")[2], "nothing is timed twice"
    assert "epochs" not in result(runs / "finetune-epochs")


@BOTH
def test_weights_are_those_of_as_many_epochs(stage, runs):
    """The schedule, too, has that length, and timing leaves no trace."""
    assert same(runs / stage, runs / f"{stage}-epochs")
    assert metrics(runs / stage) == metrics(runs / f"{stage}-epochs")


def test_no_more_epochs_than_asked_for(runs, tmp_path, capsys):
    """In the ratio of the sizes; with time for more, the weights are those of as many epochs."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
        more = {**SMALL, "train__minutes": 60, "train__max_epochs": 4}
        assert inside("finetune", tmp_path / "run", **more) == 0
    assert same(tmp_path / "run", runs / "finetune") and result(tmp_path / "run")["epochs"] == 4
    assert "train.max_epochs 4: so the run ends early" in logged(tmp_path / "run")
    capsys.readouterr()
    said = refused(capsys, ["finetune", *flags("finetune", tmp_path / "none", **SMALL, train__max_epochs=4)])
    assert said == ["train.max_epochs: got 4 without minutes; wanted minutes, or epochs alone"]
    few = {**SMALL, "train__minutes": 60, "train__max_epochs": 1}
    said = refused(capsys, ["finetune", *flags("finetune", tmp_path / "none", **few)])
    assert said == ["config: train.max_epochs 1 is less than an epoch for each of 2 stages; give more"]


def test_an_odd_number_of_epochs_for_two_sizes(tmp_path):
    """In their ratio there are 2 or 4."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
        more = {**SMALL, "train__minutes": 60, "train__max_epochs": 3}
        assert inside("finetune", tmp_path / "run", **more) == 0
    assert result(tmp_path / "run")["epochs"] == 2
    said = logged(tmp_path / "run")
    assert "train.max_epochs 3: so the run ends early" in said and "one epoch more would not fit" not in said
    assert "try" in said and "more minutes and a larger --train.max_epochs" in said


@BOTH
@pytest.mark.parametrize("place", [(1, 0, 0), (1, 1, 1)])
def test_a_resumed_run_keeps_its_epochs(stage, place, runs, tmp_path, monkeypatch):
    """From before the first step on, so that a kill does not change them."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
        stop_at(patch, *place)
        assert inside(stage, tmp_path / "run", **{**ASKED[stage], "train__save_minutes": 0}) == 130
    no_timing(monkeypatch)
    assert inside(stage, tmp_path / "run", **ASKED[stage]) == 0
    assert same(tmp_path / "run", runs / stage)
    assert result(tmp_path / "run")["seconds"] >= 10, "those before the stop count"


@BOTH
def test_a_finished_run_does_nothing_and_is_held_to_its_minutes(stage, runs, monkeypatch, capsys):
    no_timing(monkeypatch)
    assert inside(stage, runs / stage, **ASKED[stage]) == 0
    assert "finished already, nothing to do" in capsys.readouterr().err
    other = {**ASKED[stage], "train__minutes": 7.0}
    asked = ASKED[stage]["train__minutes"]
    first, second = refused(capsys, [stage, *flags(stage, runs / stage, **other)])
    assert first == f"train.minutes: the run in '{runs / stage}' has {asked}, asked for now is 7.0"
    assert second.endswith("belongs to another config; name a new folder or ask for the same")


@BOTH
def test_too_short_for_an_epoch(stage, tmp_path, monkeypatch, capsys):
    fake(monkeypatch)
    out = tmp_path / "deep" / "run"
    (line,) = refused(capsys, [stage, *flags(stage, out, **ASKED[stage] | {"train__minutes": 0.15})])[-1:]
    each, wanted = ("2 s", 0.26) if stage == "pretrain" else ("2 s at 16 px and 2 s at 32 px", 0.36)
    around = "11 s" if stage == "pretrain" else "14 s"
    said = f"an epoch takes {each}, and the run around it {around}; wanted at least {wanted}"
    assert line == f"train.minutes: got 0.15, but {said}"
    assert not out.parent.exists()
    fake(monkeypatch)
    assert inside(stage, out, **ASKED[stage] | {"train__minutes": wanted}) == 0, "the advice is good"


def test_a_long_epoch_leaves_a_gap(tmp_path, monkeypatch):
    fake(monkeypatch, rates=[Rates(1.0, 0.5, 0.001, 0.0)])
    assert inside("pretrain", tmp_path / "run", **SMALL, train__minutes=0.75) == 0
    assert "train.minutes 0.75: one epoch more would not fit, so the run ends early" in logged(tmp_path / "run")


def test_advice_does_not_name_epochs():
    config = FinetuneConfig(out="a", train={"minutes": 1.0, "epochs": 2, "batch_size": 16})
    (line,) = advice(config, stages.STAGES["finetune"].phases(config), 64)
    assert line.endswith("few to learn from; try --train.batch_size 8 and more minutes")


# ------------------------------------------------------------------ timed
@BOTH
def test_it_ends_in_time(stage, tmp_path, monkeypatch):
    """By the processor's clock, which does not count what else the machine does."""
    monkeypatch.setattr(time, "monotonic", time.process_time)
    began = time.monotonic()
    assert inside(stage, tmp_path / "run", **SMALL, train__minutes=0.1) == 0
    taken, found = time.monotonic() - began, result(tmp_path / "run")
    assert abs(found["seconds"] - taken) < 0.5 and 0.7 * 6 < taken < 1.2 * 6
    assert found["epochs"] == len(metrics(tmp_path / "run"))


def test_processes_agree(tmp_path):
    """Two of them make as many timed steps, and come to one answer, here that the time is too short."""
    with together("pretrain", tmp_path / "run", **SMALL, train__minutes=0.01) as processes:
        assert processes.wait() == 2
    assert processes.said().count("train.minutes: got 0.01, but an epoch takes ") == 1
    assert not (tmp_path / "run").exists()


def test_a_command_counts_from_its_start():
    with stages.counted_from(5.0):
        assert stages.beginning() == 5.0, "its first run"
        assert abs(stages.beginning() - time.monotonic()) < 1, "a later one, the next fold"
    assert abs(stages.beginning() - time.monotonic()) < 1


def test_folds_share_the_time():
    config = FinetuneConfig(out="a", data={"folds": 4}, train={"minutes": 2.0})
    assert [one.train.minutes for one in folds.each_fold(config)] == [0.5] * 4


# ------------------------------------------------------------------ epochs or minutes: what is said last
def parsed(tmp_path, *argv, kind=FinetuneConfig, **files):
    names = []
    for name, content in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(content))
        names += ["--config", str(tmp_path / name)]
    return parsing.parse(kind, [*names, *argv], "idmm").train


def test_the_later_one_counts(tmp_path):
    minutes, epochs = {"train": {"minutes": 3}}, {"train": {"epochs": 7}}
    staged = {"stages": [{"size": 32, "epochs": 2}]}
    assert parsed(tmp_path, "--train.minutes", "2", a=epochs).minutes == 2
    assert parsed(tmp_path, "--train.epochs", "7", a=minutes).minutes is None
    bound = parsed(tmp_path, "--train.epochs", "7", a={"train": {"minutes": 3, "max_epochs": 9}})
    assert (bound.epochs, bound.minutes, bound.max_epochs) == (7, None, None)
    assert parsed(tmp_path, "--stages", "[{size: 32, epochs: 2}]", a=minutes).minutes is None
    assert parsed(tmp_path, "--stages", "[{size: 32}]", a=minutes).minutes == 3
    assert (
        parsed(tmp_path, a=minutes, b=epochs).minutes is None and parsed(tmp_path, a=minutes, b=staged).minutes is None
    )
    assert parsed(tmp_path, a=epochs, b=minutes).minutes == 3
    assert parsed(tmp_path, a={"train": {"minutes": 3, "epochs": 7}}).minutes == 3, "a run's config.yaml"


@pytest.mark.parametrize("kind", [PretrainConfig, FinetuneConfig])
def test_both_as_flags_are_a_mistake(kind, tmp_path, capsys):
    line = "train.minutes: given beside epochs, which it replaces; give one of the two"
    argv = [kind.STAGE, "--train.minutes", "3", "--out", tmp_path / "run"]
    assert refused(capsys, [*argv, "--train.epochs", "4"]) == [line]
    if kind is FinetuneConfig:
        assert refused(capsys, [*argv, "--stages", "[{size: 32, epochs: 4}]"]) == [line]
    grid = ["transfer", "--targets", "[digits]", "--out", tmp_path / "run"]
    asked = [f"--{kind.STAGE}.train.minutes", "3", f"--{kind.STAGE}.train.epochs", "3"]
    assert refused(capsys, [*grid, *asked]) == [f"--{kind.STAGE}.{line}"]
    assert refused(capsys, [*argv, "--train.minutes", "0"]) == ["train.minutes: got 0, wanted greater than 0"]
    assert not (tmp_path / "run").exists()


def test_in_a_grid_too(tmp_path):
    """An entry's epochs over the grid's minutes, a flag's over the file's."""
    assert merged({"train.minutes": 3}, {"train": {"epochs": 4}}) == {"train": {"epochs": 4}}
    assert merged({"train": {"epochs": 4}}, {"train.minutes": 3}) == {"train": {"epochs": 4, "minutes": 3}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"targets": ["digits"], "finetune": {"train": {"minutes": 3}}}))
    argv = ["--config", str(tmp_path / "grid.yaml"), "--out", "out", "--finetune.train.epochs", "4"]
    assert parse_grid(argv, "idmm").finetune == {"train": {"epochs": 4}}
