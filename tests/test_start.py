"""What a run settles before its first step: the precision, loader workers, what is compiled; memory that runs out."""

import pytest
import torch
from frozen import a_run
from helpers import call, flags, inside, logged, same, state
from test_resume import stop_at
from torch._dynamo.testing import CompileCounter

from idmm.data import loaders
from idmm.training import environment, precision

AUTO = {"train__precision": "auto", "train__epochs": 1, "data__subset": {"total": 40}, "train__accumulate": 1}


# ------------------------------------------------------------------ which precision
def test_the_faster_precision_is_taken_once_in_a_runs_life(tmp_path, monkeypatch):
    """It is in the state before the first step; a start after that times nothing."""
    steps = []

    def timed(method, batch, device, name):
        steps.append(name)
        return 0.1 if name == "bf16" else 0.2

    monkeypatch.setattr(precision, "_timed_step", timed)
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 0, 0)
        assert inside("pretrain", tmp_path / "a", **AUTO) == 130
    assert steps == ["fp32", "bf16"] * 2 and state(tmp_path / "a")["precision"] == "bf16"
    monkeypatch.setattr(precision, "_timed_step", lambda *_: pytest.fail("timed again"))
    assert inside("pretrain", tmp_path / "a", **AUTO) == 0
    assert "train.precision auto: bf16 (" in logged(tmp_path / "a") and state(tmp_path / "a")["precision"] == "bf16"


def test_timing_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "time_precisions", lambda *given: dict(fp32=0, bf16=TIME(*given)["bf16"]))
    for name in ("auto", "fp32"):
        assert inside("pretrain", tmp_path / name, **{**AUTO, "train__precision": name}) == 0
    assert same(tmp_path / "auto", tmp_path / "fp32")


TIME = precision.time_precisions


# ------------------------------------------------------------------ loader workers
def test_workers_are_as_many_as_there_may_be(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(loaders, "most_workers", lambda: 1)
    monkeypatch.setattr(precision, "most_workers", lambda: 1)
    load = loaders._load
    monkeypatch.setattr(
        loaders, "_load", lambda fn, requests, workers: asked.append(workers) or load(fn, requests, workers)
    )
    given = {**AUTO, "train__precision": "fp32", "train__monitor_every": 0, "method__classifier_init": None}
    for name, workers in (("null", "null"), ("zero", 0)):
        assert inside("pretrain", tmp_path / name, **given, data__workers=workers) == 0
    assert asked[0] == 1 and asked[-1] == 0 and same(tmp_path / "null", tmp_path / "zero")


# ------------------------------------------------------------------ threads
def test_a_run_taken_up_on_other_threads_says_so(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "idmm")
    for threads in (2, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        caplog.clear()
        environment.started(tmp_path, "cpu", environment.now())
    assert "going on with threads: 1, 2 before" in caplog.text and "OMP_NUM_THREADS=2" in caplog.text
    found = environment.read(tmp_path)
    assert found["threads"] == 1 and [start.get("threads") for start in found["starts"]] == [2, 2, None]


# ------------------------------------------------------------------ compiling
def test_a_compiled_run_is_the_plain_one(tmp_path, monkeypatch):
    plain, counter = torch.compile, CompileCounter()  # makes no code, but counts
    monkeypatch.setattr(torch, "compile", lambda function, **_: plain(function, backend=counter))
    torch._dynamo.reset()
    given = {**AUTO, "train__precision": "fp32", "data__subset": {"total": 50}, "train__monitor_every": 0}
    assert inside("pretrain", tmp_path / "a", **given, train__compile=True) == 0
    torch._dynamo.reset()
    assert counter.frame_count >= 1
    assert inside("pretrain", tmp_path / "b", **given) == 0
    for name, value in state(tmp_path / "b")["method"].items():
        torch.testing.assert_close(state(tmp_path / "a")["method"][name], value, rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize(
    ("stage", "part", "batch"),
    [
        ("pretrain", "stages.pretrain.extract_features", "256 images at a time. Try a smaller --views.size, "),
        (
            "finetune",
            "stages.first_weights.extract_features",
            "20 images at a time. Try a smaller --train.batch_size, ",
        ),
        ("pretrain", "training.precision.time_precisions", "a batch of 20 images: try --train.accumulate 4 "),
    ],
)
def test_out_of_memory_before_training(stage, part, batch, tmp_path, monkeypatch, capsys):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"idmm.{part}", run_out)
    more = {"model__name": None, "model__kwargs": None, "init": str(a_run(tmp_path))} if stage == "finetune" else {}
    given = flags(stage, tmp_path / "run", **more, train__precision="auto", train__batch_size=20, train__accumulate=2)
    said = capsys.readouterr().err.splitlines() if call([stage, *given]) == 1 else []
    assert said and said[-1].startswith(f"out of memory with {batch}") and not any("Traceback" in line for line in said)
