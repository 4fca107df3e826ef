"""What a run says on the way and leaves behind: its curves, refused starts."""

import re

import numpy as np
import pytest
from folders import paint, tree
from helpers import flags, inside, metrics, refused, same, state_file
from PIL import Image
from test_resume import lines, stop_at

from idmm import progress
from idmm.errors import Interrupted

SHORT = {"data__subset": {"total": 40}, "train__save_minutes": 60}
ONE = {**SHORT, "stages": [{"size": 16}], "data__subset": {"per_class": 4}}


def log_of(out):
    return (out / "log.txt").read_text()


# ------------------------------------------------------------------ what a run says and draws
@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tiny run of each stage, and the same interrupted in the second epoch and taken up."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for stage, more in (("pretrain", SHORT), ("finetune", ONE)):
            assert inside(stage, folder / stage, **more) == 0
            stop_at(patch, 1, 1, 1)
            assert inside(stage, folder / f"{stage}-2", **{**more, "train__save_minutes": 0}) == 130
            patch.undo()
            assert inside(stage, folder / f"{stage}-2", **more) == 0
    return folder


def test_pretraining_logs_what_the_monitor_saw(runs):
    said = log_of(runs / "pretrain")
    for record in metrics(runs / "pretrain"):
        (line,) = [line for line in said.splitlines() if f"pretrain epoch {record['epoch']}/3  loss" in line]
        for name in ("instance_accuracy", "feature_std", "feature_rank", "embedding_std", "scale"):
            assert f"  {name} {record[name]:.4g}" in line


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_each_stage_draws_its_curves_the_whole_history(stage, runs):
    assert same(runs / stage, runs / f"{stage}-2")
    with Image.open(runs / stage / "curves.png") as whole, Image.open(runs / f"{stage}-2" / "curves.png") as resumed:
        assert whole.format == "PNG" and np.asarray(whole).std() > 5
        a, b = (np.asarray(image.convert("L"))[80:] for image in (whole, resumed))  # without the folder's name
        assert np.array_equal(a, b)


LINEAR = {"method__classifier": None, "method__classifier_init": None, "method__classifier_lr_scale": None}


# ------------------------------------------------------------------ refused starts
def refusals(tmp_path):
    """What a run notices once its folder is there: flags, and a word of what it says."""
    one, flat, bad = tmp_path / "one", tmp_path / "flat", tmp_path / "bad"
    paint(one / "a.png", 0)
    for n in range(4):
        paint(flat / f"{n}.png", n)
    tree(bad, train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    (bad / "train/a/broken.png").write_bytes(b"no image")
    root = {"data__name": "folder", "data__subset": None}
    return [
        ("pretrain", {**root, "data__root": str(tmp_path / "none")}, "none"),
        ("pretrain", {**root, "data__root": str(one)}, "1 image to train on"),
        ("pretrain", {**root, "data__root": str(bad)}, "broken.png"),
        ("pretrain", {**root, "data__root": str(flat), **LINEAR, "method__name": "supcon"}, "CLASS"),
        ("finetune", {**root, "data__root": str(flat)}, "flat"),
        ("finetune", {"resume": "must"}, "holds no run to resume"),
    ]


def test_a_refused_run_leaves_no_folder(tmp_path, capsys):
    for number, (stage, changes, word) in enumerate(refusals(tmp_path)):
        out = tmp_path / f"runs-{number}" / "deep" / "run"
        assert word in "\n".join(refused(capsys, [stage, *flags(stage, out, **changes)])[-2:]), (stage, changes)
        assert not out.parent.parent.exists(), (stage, changes)


@pytest.mark.parametrize("folds", [None, 3])
def test_what_was_there_before_stays(folds, tmp_path, capsys):
    changes = {"train__keep": "best", "data__subset": None, "data__folds": folds}  # refused once the folder is there
    for there in ("runs/run", "runs/empty", "shelf"):
        (tmp_path / there).mkdir(parents=True)
    (tmp_path / "runs/run/notes.txt").write_text("mine")
    for out in ("runs/run", "runs/empty", "shelf/run"):
        refused(capsys, ["finetune", *flags("finetune", tmp_path / out, **changes)])
    assert (tmp_path / "runs/run/notes.txt").read_text() == "mine"
    assert list((tmp_path / "shelf").iterdir()) == [] and (tmp_path / "runs/empty").is_dir()


def test_interrupted_before_there_is_a_checkpoint(tmp_path, monkeypatch, capsys):
    from idmm.stages import pretrain as stage

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "store_run_images", interrupted)
    assert inside("pretrain", tmp_path / "run", **SHORT) == Interrupted.exit_code
    assert lines(capsys)[-1] == "interrupted before the end of a step. There is no checkpoint yet"
    assert not state_file(tmp_path / "run").exists()


# ------------------------------------------------------------------ the wait
def test_the_log_has_the_steps_and_the_expected_end(tmp_path, monkeypatch):
    """After the first steps; an image is a third of a training image's time in evaluation."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    assert inside("pretrain", tmp_path / "run", **SHORT, train__epochs=5) == 0
    line = r"pretrain: 10 steps of about \S+ s each. Training ends at about \d\d:\d\d, in \d+ s"
    assert re.search(line, log_of(tmp_path / "run"))
    assert re.search(r"pretrain: +50% 5/10 \[.*, loss [\d.]+, lr [\de.-]+\]", log_of(tmp_path / "run")), "in a file"
