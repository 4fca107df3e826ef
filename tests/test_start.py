"""What a run does before its first step: timing precisions once for runs alike, choosing workers, compiling."""

import json
import os
import weakref

import pytest
import torch
from frozen import a_run
from helpers import VIT, call, flags, inside, logged, same, state
from torch._dynamo.testing import CompileCounter
from torch._inductor.runtime.runtime_utils import default_cache_dir

from idmm import calibrate, config, environment
from idmm.data import loaders

TIMED = "train.precision auto: timing a few steps"
BEFORE = "as timed before"
AUTO = {"train__precision": "auto", "train__epochs": 1, "data__subset": {"total": 40}, "train__accumulate": 1}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, empty; fp32 comes out twice as fast."""
    monkeypatch.setenv("IDMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "_timed_step", lambda *given: 0.1 if given[3] == "fp32" else 0.2)
    return tmp_path / "cache"


# ------------------------------------------------------------------ which precision
def test_runs_alike_are_timed_once(cache, tmp_path):
    for name, changes in {
        "a": {},
        "b": {"seed": 1, "train__lr": 0.001, "train__epochs": 2},
        "c": {"data__subset": {"total": 41}},  # a fold more or less
    }.items():
        assert inside("pretrain", tmp_path / name, **{**AUTO, **changes}) == 0
        said = logged(tmp_path / name)
        assert (TIMED in said, BEFORE in said) == ((True, False) if name == "a" else (False, True)), name
        assert "auto: fp32" in said and state(tmp_path / name)["precision"] == "fp32"
    (entry,) = json.loads((cache / "timed.json").read_text()).values()
    assert entry == {"fp32": 0.1, "bf16": 0.2}


@pytest.mark.parametrize(
    "change",
    [
        {"views__size": 24},
        {"model__kwargs": {**VIT, "depth": 3}},
        {"views__crops": [{"count": 3, "scale": [0.14, 1.0]}]},
        {"train__batch_size": 10},
        {"method__label_smoothing": 0.2},
    ],
)
def test_others_are_timed_again(cache, tmp_path, change):
    assert inside("pretrain", tmp_path / "a", **AUTO) == 0
    assert inside("pretrain", tmp_path / "b", **{**AUTO, **change}) == 0
    assert TIMED in logged(tmp_path / "b")


def test_other_threads_are_timed_again(cache, tmp_path, monkeypatch):
    assert inside("pretrain", tmp_path / "a", **AUTO) == 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # 3 would stay for the tests after this one
    assert inside("pretrain", tmp_path / "b", **AUTO) == 0
    assert TIMED in logged(tmp_path / "b")


@pytest.mark.parametrize("content", ["{", "[1]", '{"KEY": 3}', '{"KEY": {"fp32": "a", "bf16": 1.0}}', "\xff"])
def test_a_damaged_file_is_none(cache, tmp_path, content):
    assert inside("pretrain", tmp_path / "a", **AUTO) == 0
    (key,) = json.loads((cache / "timed.json").read_text())
    (cache / "timed.json").write_bytes(content.replace("KEY", key).encode("latin-1"))
    assert inside("pretrain", tmp_path / "b", **AUTO) == 0
    assert TIMED in logged(tmp_path / "b")
    assert json.loads((cache / "timed.json").read_text())[key] == {"fp32": 0.1, "bf16": 0.2}


def test_a_folder_that_cannot_be_written_is_none(cache, tmp_path):
    cache.write_text("a file")
    for name in "ab":
        assert inside("pretrain", tmp_path / name, **AUTO) == 0
        assert TIMED in logged(tmp_path / name)


def test_nothing_is_kept_without_a_cache(cache, tmp_path):
    assert inside("pretrain", tmp_path / "a", **AUTO, data__cache="off") == 0
    assert not cache.exists()


def test_it_is_shown_and_cleared(cache, tmp_path, capsys):
    assert inside("pretrain", tmp_path / "a", **AUTO) == 0
    (cache / "compiled/fx").mkdir(parents=True)
    (cache / "compiled/fx/code.cpp").write_text("int x;")
    capsys.readouterr()
    assert call(["data", "cache"]) == 0
    assert "timings of precisions, and code that train.compile made" in capsys.readouterr().out
    assert call(["data", "cache", "--clear"]) == 0
    assert "freed" in capsys.readouterr().out
    assert not (cache / "timed.json").exists() and not (cache / "compiled").exists()


def test_a_clear_answer_ends_the_timing(monkeypatch):
    steps, seconds = [], {}

    def timed(method, batch, device, precision):
        steps.append(precision)
        return seconds[precision]

    monkeypatch.setattr(calibrate, "_timed_step", timed)
    for bf16, wanted in ((2.0, 6), (1.1, 8)):
        steps.clear()
        seconds.update(fp32=1.0, bf16=bf16)
        calibrate.time_precisions(torch.nn.Identity(), {}, "cpu", ("fp32", "bf16"))
        assert steps == ["fp32", "bf16"] * (wanted // 2)


def test_no_memory_for_the_first_batch(tmp_path, monkeypatch, capsys):
    """A GPU may be full before anything is timed: a whole micro-batch is sent to it."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("idmm.session.draw_sample", full)
    assert inside("pretrain", tmp_path / "a", **AUTO) == 1
    assert "out of memory with a batch of 20 images: try " in capsys.readouterr().err


def test_the_timed_batch_does_not_stay_in_memory(tmp_path, monkeypatch):
    from idmm.engine import Loop

    drawn, step = [], Loop._step

    def draw(*given):
        sample = calibrate.draw_sample(*given)
        drawn.append(weakref.ref(sample))
        return sample

    def stepped(loop, *given):
        assert drawn[0]() is None
        return step(loop, *given)

    monkeypatch.setattr("idmm.session.draw_sample", draw)
    monkeypatch.setattr(Loop, "_step", stepped)
    assert inside("pretrain", tmp_path / "a", **AUTO) == 0 and drawn


# ------------------------------------------------------------------ loader workers
@pytest.mark.parametrize(
    "loading, training, most, wanted",
    [(0.01, 1.0, 7, 0), (0.1, 1.0, 7, 1), (1.0, 1.0, 7, 2), (9.0, 1.0, 7, 7), (1.0, 1.0, 0, 0)],
)
def test_as_few_workers_as_keep_up(loading, training, most, wanted):
    assert calibrate.needed_workers(loading, training, most) == wanted


def test_workers_are_chosen_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "most_workers", lambda: 3)
    monkeypatch.setattr(calibrate, "needed_workers", lambda loading, training, most: most - 2)
    given = {**AUTO, "train__precision": "fp32"}
    assert inside("pretrain", tmp_path / "null", **given, data__workers="null") == 0
    assert "data.workers: 1, as loading a batch takes " in logged(tmp_path / "null")
    assert inside("pretrain", tmp_path / "zero", **given, data__workers=0) == 0
    assert "data.workers" not in logged(tmp_path / "zero")
    assert same(tmp_path / "null", tmp_path / "zero")


def test_processes_of_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(loaders, "cores", lambda: 8)
    assert loaders.most_workers() == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert loaders.most_workers() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert loaders.most_workers() == 0


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
def test_compiled_before_the_first_step(tmp_path, monkeypatch):
    """Nothing is compiled later for a smaller last batch, and timing leaves no gradients."""
    from idmm.engine import Loop

    seen, step, plain, counter = [], Loop._step, torch.compile, CompileCounter()  # makes no code, but counts

    def counted(loop, *args):
        if not seen:
            assert all(p.grad is None for p in loop.method.parameters())
        seen.append(counter.frame_count)
        return step(loop, *args)

    monkeypatch.setattr(torch, "compile", lambda function, **_: plain(function, backend=counter))
    monkeypatch.setattr(Loop, "_step", counted)
    monkeypatch.setenv("IDMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch itself leaves it
    torch._dynamo.reset()
    given = {**AUTO, "train__precision": "fp32", "data__subset": {"total": 50}, "train__epochs": 2}
    more = {"train__monitor_every": 0, "method__classifier_init": None}
    assert inside("pretrain", tmp_path / "a", **given, **more, train__compile=True) == 0
    torch._dynamo.reset()
    assert len(seen) == 6 and seen[0] >= 1 and seen[-1] == seen[0], seen  # batches of 20, 20 and 10 images
    place = tmp_path / "cache/compiled"
    assert "train.compile: took " in logged(tmp_path / "a") and f"; kept in '{place}' for" in logged(tmp_path / "a")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(place)
    assert inside("pretrain", tmp_path / "b", **given, **more) == 0
    for name, value in state(tmp_path / "b")["method"].items():
        torch.testing.assert_close(state(tmp_path / "a")["method"][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("why", ["named", "a file", "no cache"])
def test_code_is_kept_elsewhere(why, tmp_path, monkeypatch):
    named = str(tmp_path / "mine") if why == "named" else default_cache_dir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
    if why == "a file":
        (tmp_path / "cache").touch()
    given = config.Data(cache="off" if why == "no cache" else "auto", cache_dir=str(tmp_path / "cache"))
    calibrate.keep_compiled(config.PretrainConfig(data=given))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == named
    assert not (tmp_path / "cache").is_dir()


@pytest.mark.parametrize("images", [1, 2, 3, 9])
def test_compiling_takes_as_many_steps_in_each_process(images, monkeypatch):
    """Micro-batches of processes may differ by an image, and steps of some methods wait for each other."""
    sizes = []
    monkeypatch.setattr(calibrate, "_timed_step", lambda method, batch, *_: sizes.append(len(batch["index"])))
    sample = calibrate.Sample({}, {"index": torch.arange(images)}, images, images, 0.0)
    calibrate.compile_ahead(torch.nn.Identity(), sample, "cpu", "fp32")
    assert sizes == [images, min(images, max(2, images - 1))]


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize(
    ("stage", "part", "batch"),
    [
        ("pretrain", "stages.pretrain.extract_features", "256 images at a time; try a smaller --views.size, "),
        ("finetune", "stages.finetune.extract_features", "20 images at a time; try a smaller --train.batch_size, "),
        ("pretrain", "session.draw_sample", "a batch of 20 images: try --train.accumulate 4 "),
    ],
)
def test_out_of_memory_before_training(stage, part, batch, tmp_path, monkeypatch, capsys):
    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"idmm.{part}", run_out)
    more = {"model__name": None, "model__kwargs": None, "init": str(a_run(tmp_path))} if stage == "finetune" else {}
    given = flags(stage, tmp_path / "run", **more, train__batch_size=20, train__accumulate=2)
    said = capsys.readouterr().err.splitlines() if call([stage, *given]) == 1 else []
    assert said and said[-1].startswith(f"out of memory with {batch}") and not any("Traceback" in line for line in said)
