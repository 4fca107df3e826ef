"""What a run settles before its first step, logs on the way and leaves behind; refused starts;
memory formats."""

import math
import re

import numpy as np
import pytest
import torch
from folders import paint, result, tree
from frozen import a_run
from helpers import (
    call,
    flags,
    inside,
    inside_ok,
    logged,
    metrics,
    refused,
    same,
    state,
    state_file,
    weights,
)
from PIL import Image
from test_resume import lines, stop_at
from torch._dynamo.testing import CompileCounter

from idmm.errors import Interrupted
from idmm.training import log, loop, precision

SHORT = {"data__subset": {"total": 40}, "train__save_minutes": 60}
ONE = {
    **SHORT,
    "stages": [{"size": 16}],
    "data__subset": {"per_class": 4},
}


def log_of(out):
    return (out / "log.txt").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tiny run, and the same interrupted in the second epoch and taken up."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        inside_ok("finetune", folder / "whole", **ONE)
        stop_at(patch, 1, 1, 1)
        assert inside("finetune", folder / "cut", **{**ONE, "train__save_minutes": 0}) == 130
        patch.undo()
        inside_ok("finetune", folder / "cut", **ONE)
    return folder


def test_curves_show_the_whole_history(runs):
    assert same(runs / "whole", runs / "cut")
    with (
        Image.open(runs / "whole/curves.png") as whole,
        Image.open(runs / "cut/curves.png") as resumed,
    ):
        assert whole.format == "PNG"
        assert np.asarray(whole).std() > 5
        # without the folder's name
        a, b = (np.asarray(image.convert("L"))[80:] for image in (whole, resumed))
        assert np.array_equal(a, b)


LINEAR = {
    "method__classifier": None,
    "method__classifier_init": None,
    "method__classifier_lr_scale": None,
}


def refusals(tmp_path):
    """What a run notices once its folder is there: flags, and a word of what it says."""
    one = tmp_path / "one"
    flat = tmp_path / "flat"
    bad = tmp_path / "bad"
    paint(one / "a.png", 0)
    for n in range(4):
        paint(flat / f"{n}.png", n)
    tree(bad, train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    (bad / "train/a/broken.png").write_bytes(b"no image")
    root = {"data__name": "folder", "data__subset": None}
    return [
        ("pretrain", {**root, "data__root": str(one)}, "1 image to train on"),
        ("pretrain", {**root, "data__root": str(bad)}, "broken.png"),
        (
            "pretrain",
            {
                **root,
                "data__root": str(flat),
                **LINEAR,
                "method__name": "supcon",
            },
            "CLASS",
        ),
    ]


def test_a_refused_run_leaves_no_folder(tmp_path, capsys):
    for number, (stage, changes, word) in enumerate(refusals(tmp_path)):
        out = tmp_path / f"runs-{number}" / "deep" / "run"
        assert word in "\n".join(refused(capsys, [stage, *flags(stage, out, **changes)])[-2:]), (
            stage,
            changes,
        )
        assert not out.parent.parent.exists(), (stage, changes)


@pytest.mark.parametrize("folds", [None, 3])
def test_what_was_there_before_stays(folds, tmp_path, capsys):
    # refused once the folder is there
    changes = {"train__keep": "best", "data__subset": None, "data__folds": folds}
    for folder in ("runs/run", "runs/empty", "shelf"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/run/notes.txt").write_text("mine")
    for out in ("runs/run", "runs/empty", "shelf/run"):
        refused(capsys, ["finetune", *flags("finetune", tmp_path / out, **changes)])
    assert (tmp_path / "runs/run/notes.txt").read_text() == "mine"
    assert list((tmp_path / "shelf").iterdir()) == []
    assert (tmp_path / "runs/empty").is_dir()


def test_interrupted_before_there_is_a_checkpoint(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("idmm.training.run.Run.store", interrupted)
    assert inside("pretrain", tmp_path / "run", **SHORT) == Interrupted.exit_code
    assert (
        lines(capsys)[-1]
        == f"{tmp_path / 'run'}: interrupted. There is no checkpoint yet. Repeat the command "
        "to continue"
    )
    assert not state_file(tmp_path / "run").exists()


def test_the_log_has_the_steps_and_the_expected_end(tmp_path, monkeypatch, capsys):
    """After the first steps; an image is a third of a training image's time in evaluation."""
    monkeypatch.setattr("idmm.progress.LOG_SECONDS", 0.0)
    inside_ok("pretrain", tmp_path / "run", **SHORT, train__epochs=5)
    line = r"pretrain: 10 steps of about \S+ s each. Training ends at about \d\d:\d\d, in \d+ s"
    assert re.search(line, log_of(tmp_path / "run"))
    bar = r"pretrain: +50% 5/10 \[.*, loss [\d.]+, lr [\de.-]+\]"
    assert re.search(bar, capsys.readouterr().err)
    assert not re.search(bar, log_of(tmp_path / "run"))


def test_a_fitted_classifier_has_no_epoch_and_no_curve(tmp_path, capsys):
    out = tmp_path / "run"
    fitted = {
        "model__name": "hog_conv",
        "model__kwargs": {},
        "model__drop_path": None,
        "model__freeze": True,
        "stages": None,
        "train__size": 32,
        "train__epochs": 0,
        "train__batch_size": 2,
    }
    few = {"data__subset": {"per_class": 4}}
    assert inside("finetune", out, **fitted, **few) == 0
    assert metrics(out) == []
    assert result(out)["top1"] == result(out)["start_top1"]
    assert (out / "confusion.png").exists() and not (out / "curves.png").exists()
    assert "finished already" in again(capsys, out, **fitted, **few)
    capsys.readouterr()
    wrong = {**fitted, "train__minutes": 1}
    assert refused(capsys, ["finetune", *flags("finetune", tmp_path / "x", **wrong, **few)]) == [
        "train.epochs: got 0, expected model.freeze true, one stage and no minutes"
    ]


def again(capsys, out, **changes):
    """What a command prints that is repeated."""
    assert inside("finetune", out, **changes) == 0
    return capsys.readouterr().err


AUTO = {
    "train__precision": "auto",
    "train__epochs": 1,
    "data__subset": {"total": 40},
    "train__accumulate": 1,
}


def test_the_faster_precision_is_taken_once_in_a_runs_life(tmp_path, monkeypatch):
    """The first step saves it; a start after that times nothing."""
    steps = []

    def timed(method, batch, device, name):
        steps.append(name)
        return 0.1 if name == "bf16" else 0.2

    monkeypatch.setattr(precision, "_timed_step", timed)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert inside("pretrain", tmp_path / "a", **AUTO) == 130
    assert steps == ["fp32", "bf16"] * 2
    assert state(tmp_path / "a")["precision"] == "bf16"
    monkeypatch.setattr(precision, "_timed_step", lambda *_: pytest.fail("timed again"))
    inside_ok("pretrain", tmp_path / "a", **AUTO)
    assert "train.precision auto: bf16 (" in logged(tmp_path / "a")
    assert state(tmp_path / "a")["precision"] == "bf16"


@pytest.mark.parametrize("requested", [True, None], ids=["asked for", "a long run"])
def test_a_compiled_run_is_the_plain_one(requested, tmp_path, monkeypatch):
    """Without a request a run is compiled if it is long enough on its device. Model and loss
    are."""
    monkeypatch.setitem(loop.COMPILE_FROM, "cpu", 0.0 if requested is None else math.inf)
    # makes no code, but counts
    plain = torch.compile
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda function, **_: plain(function, backend=counter))
    torch._dynamo.reset()
    config = {
        **AUTO,
        "train__precision": "fp32",
        "data__subset": {"total": 200},
        "train__monitor_every": 0,
    }
    inside_ok("pretrain", tmp_path / "a", **config, train__compile=requested)
    torch._dynamo.reset()
    assert counter.frame_count >= 2
    inside_ok("pretrain", tmp_path / "b", **config, train__compile=False)
    for name, value in state(tmp_path / "b")["method"].items():
        torch.testing.assert_close(
            state(tmp_path / "a")["method"][name], value, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    "stage, part, batch",
    [
        (
            "pretrain",
            "runs.measure.extract_features",
            "256 images at a time. Try smaller images or batches, ",
        ),
        (
            "finetune",
            "runs.measure.extract_features",
            "20 images at a time. Try smaller images or batches, ",
        ),
    ],
)
def test_out_of_memory_before_training(stage, part, batch, tmp_path, monkeypatch, capsys):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"idmm.{part}", run_out)
    more = (
        {
            "model__name": None,
            "model__kwargs": None,
            "init": str(a_run(tmp_path)),
        }
        if stage == "finetune"
        else {}
    )
    argv = flags(
        stage,
        tmp_path / "run",
        **more,
        train__precision="auto",
        train__batch_size=20,
        train__accumulate=2,
    )
    errors = capsys.readouterr().err.splitlines() if call([stage, *argv]) == 1 else []
    assert errors
    assert errors[-1].startswith(f"out of memory with {batch}")
    for line in errors:
        assert "Traceback" not in line


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_shows_what_it_warns_of(rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    with log.logging_by(log.screen()), log.logging_to(tmp_path):
        log.log.warning("in the run")
    assert capsys.readouterr().err.count("in the run") == (1 if rank == 0 else 0)


NET = {
    "model__name": "resnet10t",
    "model__kwargs": {"channels": [8, 8, 16, 16]},
    "data__subset": {"total": 40},
}


def last(tensor):
    """Whether a convolution's weights [out, in, h, w] have a pixel's channels side by side, and
    could be otherwise."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


@pytest.fixture(scope="module")
def convnet(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    inside_ok("pretrain", out, **NET)
    return out


def test_a_run_keeps_the_format_and_exports_plain_tensors(convnet):
    saved = state(convnet)
    assert saved["channels_last"]
    assert last(saved["method"]["backbone.layer3.0.conv2.weight"])
    for tensor in weights(convnet).values():
        assert tensor.is_contiguous()


def test_a_stopped_run_goes_on_in_the_format_that_it_began_with(convnet, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert inside("pretrain", out, **NET) == 130
    inside_ok("pretrain", out, **NET)
    assert state(out)["channels_last"]
    assert same(out, convnet)
