"""A run killed, interrupted or starved at any moment ends as if nothing had happened, or says in
one line why not."""

import errno
import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from folders import paint, tree
from helpers import (
    STAGES,
    call,
    column,
    inside,
    inside_ok,
    metrics,
    outside,
    read,
    same,
    start,
    state,
    state_file,
    temporary,
)

from idmm.errors import Interrupted
from idmm.files import Lock
from idmm.methods.finetune import Finetune
from idmm.methods.idmm import IDMM
from idmm.training import loop

METHODS = {"pretrain": IDMM, "finetune": Finetune}
# stage, epoch and step at which runs are cut: in mid-epoch
PLACE = {"pretrain": (1, 1, 2), "finetune": (2, 0, 2)}
BOTH = pytest.mark.parametrize("stage", list(STAGES))
ORIGINAL_SAVE = loop.Loop._save
CPU_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: 99 bytes."
)


@pytest.fixture(scope="session")
def cut(tmp_path_factory):
    """Runs that stopped at ``PLACE``, to be copied."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.MonkeyPatch.context() as patch:
        for stage in STAGES:
            stop_at(patch, *PLACE[stage])
            assert inside(stage, folder / stage) == 130
            assert where(folder / stage) == PLACE[stage]
    return {stage: folder / stage for stage in STAGES}


def stop_at(patch, stage, epoch, step):
    """Makes the next run save and stop there, as Ctrl-C would."""

    def save(loop, *position):
        ORIGINAL_SAVE(loop, *position)
        if (loop.plan.phase.number, *position) == (stage, epoch, step):
            raise Interrupted("stopped by the test")

    patch.setattr(loop.Loop, "_save", save)


def where(out):
    """Stage, epoch and step of a run's checkpoint."""
    saved = state(out)
    return saved["stage"], saved["epoch"], saved["step"]


def stamp(path):
    """Changes whenever the file is replaced; None while it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def snapshot(out):
    """Every file of a run but the log and the lock, with its time and content."""
    files = {}
    for path in out.rglob("*"):
        if path.is_file() and path.suffix not in (".txt", ".lock"):
            files[path] = (path.stat().st_mtime_ns, path.read_bytes())
    return files


OF_OLD = "is of the old ones. Restore them, or name a new --out"


def lines(capsys):
    return capsys.readouterr().err.strip().splitlines()


def begun(out):
    """Whether the first epoch is over."""
    path = out / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def once(metric_records):
    """Whether no epoch is there twice."""
    keys = [(record["stage"], record["epoch"]) for record in metric_records]
    return len(keys) == len(set(keys)) and keys == sorted(keys)


@BOTH
def test_killed_at_random_moments(stage, whole, tmp_path):
    """SIGKILL again and again, at least once in mid-epoch; then the same command once more (also:
    other workers)."""
    out = tmp_path / "run"
    rng = random.Random(stage)
    places = []
    while len(places) < 2 or not any(step % 5 for _, _, step in places):
        assert len(places) < 6, f"no kill in mid-epoch: {places}"
        with start(stage, out, data__workers=2) as process:
            for _ in range(rng.randint(1, 3)):
                before = stamp(state_file(out))
                if not process.until(lambda before=before: stamp(state_file(out)) != before):
                    break
            time.sleep(rng.uniform(0, 0.03))  # a step takes about as long
            assert process.popen.poll() is None, (
                f"ended before it was killed: {places} {process.said()}"
            )
            process.send(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        places.append(where(out))
    assert places == sorted(set(places)), "every run came further than the one before it"
    inside_ok(stage, out, data__workers=2)
    assert same(out, whole[stage])
    assert metrics(out) == metrics(whole[stage])
    assert once(metrics(out))
    assert not temporary(out)


@pytest.mark.parametrize(
    "stage, number",
    [
        ("pretrain", signal.SIGTERM),
        ("finetune", signal.SIGINT),
    ],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_asked_to_stop(stage, number, whole, tmp_path):
    """A signal to the whole process group, loader workers included: saved, 130, and the rerun ends
    alike."""
    out = tmp_path / "run"
    with start(stage, out, data__workers=2, train__save_minutes=60) as process:
        assert process.until(lambda: begun(out)), process.said()
        process.send(number)
        assert process.wait() == 130, process.said()
        output = process.said().splitlines()
    _, epoch, step = where(out)
    assert output[-1].startswith("interrupted")
    assert "Traceback" not in "".join(output)
    # else it fell between two steps: into an evaluation, or the change of stages
    if "from epoch" in output[-1]:
        assert (
            output[-1]
            == f"interrupted. The same command resumes from epoch {epoch + 1}, step {step}"
        )
    assert not (out / "result.json").exists()
    assert not temporary(out)
    inside_ok(stage, out)
    assert same(out, whole[stage])
    assert metrics(out) == metrics(whole[stage])


def test_killed_after_the_first_step_and_in_use(whole, tmp_path, capsys):
    """The first step is saved whatever save_minutes is. While the run lives, its folder is
    locked."""
    out = tmp_path / "run"
    with start("pretrain", out, train__save_minutes=60) as process:
        assert process.until(lambda: begun(out)), process.said()
        process.send(signal.SIGSTOP)
        assert where(out) == (1, 0, 1)
        assert process.popen.poll() is None
        before = snapshot(out)
        assert inside("pretrain", out) == 2
        assert lines(capsys) == [
            f"out: '{out}' is in use by another run. Wait for it or name another folder"
        ]
        assert snapshot(out) == before
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    inside_ok("pretrain", out)
    assert same(out, whole["pretrain"])
    assert metrics(out) == metrics(whole["pretrain"])


def _zeroed(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def _moments(saved, *names):
    for values in saved["optimizer"]["state"].values():
        values.update(_zeroed({name: values[name] for name in names}))


def _part(saved, prefix):
    for name, tensor in saved["method"].items():
        if name.startswith(prefix):
            tensor.zero_()


SPOIL = {
    "one weight": lambda saved: next(iter(saved["method"].values())).view(-1)[0].add_(0.01),
    "no moments": lambda saved: saved["optimizer"].update(state={}),
    "second moment": lambda saved: _moments(saved, "exp_avg_sq"),
    "count of steps": lambda saved: _moments(saved, "step"),
    "epoch": lambda saved: saved.update(epoch=saved["epoch"] + 1),
    "step": lambda saved: saved.update(step=saved["step"] + 1),
    "precision": lambda saved: saved.update(precision="bf16"),
}
SPOIL_PRETRAIN = {"N-way layer": lambda saved: _part(saved, "classifier")}
SPOIL_FINETUNE = {
    "stage": lambda saved: saved.update(stage=1),
    "averages": lambda saved: saved.update(ema=_zeroed(saved["ema"])),
}
SPOILED = [("pretrain", *item) for item in {**SPOIL, **SPOIL_PRETRAIN}.items()]
SPOILED += [("finetune", *item) for item in SPOIL_FINETUNE.items()]


def resumed(stage, cut, tmp_path, spoil):
    """Goes on in a copy of a run that was cut, its state spoiled."""
    out = shutil.copytree(cut[stage], tmp_path / "run")
    assert read(out / "config.yaml")["out"] != str(out), "where it lies is free to differ"
    saved = state(out)
    spoil(saved)
    torch.save(saved, state_file(out))
    return out, inside(stage, out)


@BOTH
def test_resumed_state_is_enough(stage, cut, whole, tmp_path):
    """The positive control: a copy of the cut run, left as it is, ends like the whole one."""
    out, code = resumed(stage, cut, tmp_path, lambda saved: None)
    assert code == 0
    assert same(out, whole[stage])
    assert metrics(out) == metrics(whole[stage])


@pytest.mark.parametrize(
    "stage, part, spoil", SPOILED, ids=[f"{s}-{part}" for s, part, _ in SPOILED]
)
def test_state_is_needed(stage, part, spoil, cut, whole, tmp_path):
    """Each part of the state that weights depend on, altered: the run refuses, or the result
    differs."""
    out, code = resumed(stage, cut, tmp_path, spoil)
    assert code in (1, 2) or not same(out, whole[stage])


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # the lock is let go
def test_torn_state_is_refused(cut, tmp_path, capsys):
    out, code = resumed("finetune", cut, tmp_path, lambda saved: saved.pop("ema"))
    line = f"{state_file(out)}: is damaged (it is not what idmm wrote). Delete it to start over"
    assert code == 2
    assert lines(capsys)[-1] == line
    state_file(out).write_bytes(state_file(out).read_bytes()[:1000])
    before = snapshot(out)
    assert inside("finetune", out) == 2
    assert lines(capsys)[-1] == line
    assert snapshot(out) == before


def test_sums_of_the_epoch_are_kept(cut, whole, tmp_path):
    """The loss of an epoch that was cut in two is that of all its images: it depends on the sums in
    the state."""
    out, code = resumed(
        "pretrain",
        cut,
        tmp_path,
        lambda saved: saved.update(sums=dict.fromkeys(saved["sums"], 0.0)),
    )
    assert code == 0
    assert same(out, whole["pretrain"])
    assert metrics(out) != metrics(whole["pretrain"])


def test_metrics_are_mended(cut, whole, tmp_path):
    """Records past the checkpoint are written again."""
    out = shutil.copytree(cut["finetune"], tmp_path / "run")
    with open(out / "metrics.jsonl", "a") as file:
        file.write(
            json.dumps(
                {
                    "epoch": 1,
                    "stage": 2,
                    "step": 14,
                    "loss": 9.9,
                }
            )
            + "\n"
        )
    (out / "last" / ".state.pt.part-killed").write_bytes(b"half")
    (out / ".hub.part-killed").mkdir()  # of an export, which may be at work
    inside_ok("finetune", out)
    assert metrics(out) == metrics(whole["finetune"])
    assert not temporary(out)
    assert (out / ".hub.part-killed").is_dir()


@pytest.mark.parametrize(
    "stage, own_process",
    [
        ("pretrain", False),
        ("finetune", "read-only"),
        ("pretrain", True),
    ],
)
def test_finished_run_does_nothing(stage, own_process, whole, monkeypatch, capsys):
    out = whole[stage]
    line = f"{whole[stage]}: finished already, nothing to do"
    before = snapshot(out)

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    if own_process == "read-only":
        monkeypatch.setattr(Lock, "acquire", refuse)
    if own_process is True:
        outside(stage, out)
        assert out.with_name(f"{out.name}.err").read_text().splitlines() == [line]
    else:
        inside_ok(stage, out)
        assert lines(capsys) == [line]
    assert snapshot(out) == before


def test_resume_never_and_must(whole, cut, tmp_path, capsys):
    for used in (whole["pretrain"], cut["pretrain"]):
        before = snapshot(used)
        assert inside("pretrain", used, resume="never") == 2
        assert lines(capsys) == [
            f"out: '{used}' holds a run already. --resume never expects a new folder"
        ]
        assert snapshot(used) == before
    new = tmp_path / "new"
    assert inside("pretrain", new, resume="must") == 2
    assert lines(capsys) == [f"out: '{new}' holds no run to resume. --resume must expects one"]
    assert not snapshot(new)


def test_another_config_lists_every_field(whole, cut, capsys):
    changes = {
        "seed": (0, 3),
        "data.val_fraction": ("null", 0.5),
        "model.kwargs": (
            "{'patch_size': 8, 'embed_dim': 32, 'depth': 2, 'num_heads': 2}",
            {"patch_size": 16},
        ),
        "train.lr": (0.003, 0.01),
        "method.label_smoothing": (0.1, 0.0),
        "views.flip": (0.5, 0.0),
    }
    for run in (whole["pretrain"], cut["pretrain"]):
        before = snapshot(run)
        assert (
            inside(
                "pretrain",
                run,
                **{key.replace(".", "__"): new for key, (_, new) in changes.items()},
            )
            == 2
        )
        *faults, last = lines(capsys)
        expected = [
            f"{k}: the run in '{run}' has {old}, this command has {new}"
            for k, (old, new) in changes.items()
        ]
        assert sorted(faults) == sorted(expected)
        assert last == f"out: '{run}' belongs to another config. Use a new --out"
        assert snapshot(run) == before
    assert (
        inside(
            "finetune",
            whole["finetune"],
            data__subset=None,
            stages=[{"size": 16}],
        )
        == 2
    )
    faults = "\n".join(lines(capsys))
    assert "data.subset" in faults
    assert "stages: the run in" in faults


def test_workers_device_and_cache_may_differ(cut, whole, tmp_path):
    out = shutil.copytree(cut["pretrain"], tmp_path / "run")
    free = dict(
        data__workers=1,
        data__cache="off",
        train__save_minutes=5,
        resume="must",
    )
    inside_ok(
        "pretrain",
        out,
        **free,
        train__device=None if not torch.cuda.is_available() else "cpu",
    )
    assert same(out, whole["pretrain"])
    assert metrics(out) == metrics(whole["pretrain"])


def test_paths_in_other_words_and_a_run_that_moved(tmp_path, monkeypatch, capsys):
    names = [f"train/{of}/{i}.png" for of in ("cat", "dog") for i in range(5)]
    root = tree(tmp_path / "here/images", train={"cat": 5, "dog": 5}, val={"cat": 1, "dog": 1})
    (root.parent / "labels.csv").write_text(
        "path,class\n" + "".join(f"{n},{n[6:9]}\n" for n in names)
    )
    (root.parent / "exclude.txt").write_text("train/cat/4.png\n")
    monkeypatch.chdir(root.parent)
    inside_ok(
        "pretrain",
        "pre",
        data__root="images",
        data__subset=None,
        train__batch_size=4,
        train__epochs=1,
    )

    def tune(out, root, labels, exclude, init):
        few = dict(
            data__subset=None,
            train__batch_size=4,
            train__epochs=2,
            data__val_fraction=0.5,
        )
        lists = dict(data__labels=labels, data__exclude=exclude, init=init)
        return inside("finetune", out, data__root=root, **lists, **few)

    assert tune("whole", "images", "labels.csv", "exclude.txt", "pre") == 0
    stop_at(monkeypatch, 2, 0, 1)
    assert tune("run", "images", "labels.csv", "exclude.txt", "pre") == 130
    monkeypatch.undo()
    monkeypatch.chdir(root.parent)
    shutil.copytree("run", "copied"), capsys.readouterr()
    assert (
        tune(
            "run/",
            f"./{root.name}/",
            str(root.parent / "labels.csv"),
            "../here/exclude.txt",
            "pre/.",
        )
        == 0
    )
    assert same("run", "whole")
    moved = (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    lists = [str(moved / name) for name in ("images", "labels.csv", "exclude.txt", "pre")]
    assert tune(moved / "copied", *lists) == 0
    assert same(moved / "copied", moved / "whole")
    assert tune(moved / "run", *lists) == 0
    assert "finished already" in capsys.readouterr().err


def finished_commands(tmp_path, root):
    """Command lines that resume, after they ran to their ends on a folder of classes."""
    common = ["--data.root", root, "--data.workers", "0", "--out"]
    kwargs = "{patch_size: 8, embed_dim: 16, depth: 1, num_heads: 2}"
    tiny = ["--model.name", "vit_tiny_patch16_224", "--model.kwargs", kwargs]
    once = [*tiny, "--train.epochs", "1", "--train.warmup_epochs", "0"]
    argvs = [
        ["pretrain", "--views.size", "16", *once, *common, tmp_path / "pretrain"],
        ["finetune", "--train.size", "16", *once, *common, tmp_path / "finetune"],
        ["finetune", "--train.size", "16", *once, "--data.folds", "2", *common, tmp_path / "folds"],
        ["probe", "--size", "16", "--init", tmp_path / "pretrain", *common, tmp_path / "probe"],
        ["train", root, "--size", "16", "--minutes", "0.02", "--out", tmp_path / "train"],
    ]
    for argv in argvs:
        assert call(argv) == 0, argv
    return argvs


def test_finished_runs_notice_changed_images(tmp_path, capsys):
    """Every command that resumes counts what changed, and prints its result if the images are
    gone."""
    root = tree(tmp_path / "d", train={"cat": 6, "dog": 6}, test={"cat": 2, "dog": 2})
    argvs = finished_commands(tmp_path, root)

    def repeated(argv):
        capsys.readouterr()
        code = call(argv)
        return code, "".join(capsys.readouterr()).strip().splitlines()

    for argv in argvs:
        os.utime(root / "train/cat/0.png")  # another time, the same content
        code, output = repeated(argv)
        assert code == 0
        assert "finished already" in "".join(output), argv
    (root / "train/cat/1.png").rename(root / "train/dog/from_cat.png")
    paint(root / "train/dog/more.png", seed=7)
    for argv in argvs:
        code, output = repeated(argv)
        changes = "1 with another label, 1 new, 0 gone, 0 with other content, 0 renamed"
        changes += " (train/dog/from_cat.png, train/dog/more.png)"
        assert code == 2, argv
        assert (
            output[-1]
            == f"data.root: the images changed since this run: {changes}. '{out_of(argv)}' {OF_OLD}"
        )
    (root / "train/dog/from_cat.png").rename(root / "train/cat/1.png")
    (root / "train/dog/more.png").unlink()
    paint(root / "train/dog/2.png", seed=8)
    for argv in argvs:
        code, output = repeated(argv)
        assert code == 2
        assert "0 with another label, 0 new, 0 gone, 1 with other content, " in output[-1], argv
    shutil.rmtree(root)
    for argv in argvs:
        code, output = repeated(argv)
        assert code == 0
        assert "finished already" in "".join(output), argv


def out_of(argv):
    out = argv[argv.index("--out") + 1]
    return out / "fold-1" if "--data.folds" in argv else out


@pytest.mark.parametrize(
    "function, name",
    [
        ("fsync", "state.pt"),
        ("fsync", "backbone.safetensors"),
        ("fsync", "result.json"),
        ("replace", "state.pt"),
    ],
)
def test_full_disk(function, name, whole, tmp_path, monkeypatch, capsys):
    """A file that cannot be written (the fifth checkpoint, an export): 1, a line naming it, and
    nothing is lost."""
    out = tmp_path / "run"
    checkpoints = []

    def fail(what, *rest):
        target = os.readlink(f"/proc/self/fd/{what}") if function == "fsync" else what
        if f"/.{name}." in str(target):
            checkpoints.append(state_file(out).read_bytes() if state_file(out).exists() else b"")
            if name != "state.pt" or len(checkpoints) == 5:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(what, *rest)

    original = getattr(os, function)
    monkeypatch.setattr(os, function, fail)
    assert inside("pretrain", out) == 1
    path = out / "last" / name if name == "state.pt" else out / name
    line = f"{path}: cannot be written (No space left on device). The old file stays"
    assert lines(capsys)[-1] == line
    assert not temporary(out)
    assert state_file(out).read_bytes() == checkpoints[-1]
    assert not (out / "result.json").exists()
    if function == "fsync":  # there is room again
        monkeypatch.undo()
        inside_ok("pretrain", out)
        assert same(out, whole["pretrain"])
        assert metrics(out) == metrics(whole["pretrain"])


def test_files_that_results_do_without_cost_a_line(whole, tmp_path, capsys):
    out = tmp_path / "run"
    names = ("curves.png", "confusion.png", "log.txt")
    for name in names:
        (out / name).mkdir(parents=True)  # no file can take its place
    inside_ok("finetune", out)
    assert (out / "result.json").exists()
    errors = capsys.readouterr().err
    assert all(f"{name} is not " in errors for name in names[:2])
    assert f"{out}/log.txt: cannot be written (is a" in errors
    assert same(out, whole["finetune"])
    assert metrics(out) == metrics(whole["finetune"])


def test_disk_full_inside_torch_save(tmp_path, monkeypatch, capsys):
    """torch's writer hides the system's error; the line still names the file, once."""
    out = tmp_path / "run"
    count = []

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            count.append(len(data))
            if sum(count) > 1_000_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    original = torch.save
    monkeypatch.setattr(torch, "save", lambda saved, file: original(saved, Full(file)))
    assert inside("pretrain", out) == 1
    errors = lines(capsys)
    assert errors[-1].startswith(f"{state_file(out)}: cannot be written (")
    assert sum("cannot be written" in line for line in errors) == 1
    assert where(out) == (1, 0, 2)
    assert not temporary(out)


def spoiled_forward(monkeypatch, stage, at, act):
    """Lets the method's forward pass number ``at`` (from 1) in the training loop be ``act(its
    result)``."""
    original = loop.Loop._step
    count = []
    kind = METHODS[stage]

    def step(loop, *args):
        count.append(1)
        if len(count) == at:
            forward = kind.forward
            monkeypatch.setattr(kind, "forward", lambda *a, **k: act(forward(*a, **k)))
        return original(loop, *args)

    monkeypatch.setattr(loop.Loop, "_step", step)


def finite(saved):
    """Whether the weights and the optimizer's state are."""
    tensors = list(saved["method"].values())
    for values in saved["optimizer"]["state"].values():
        tensors += values.values()
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@pytest.mark.parametrize(
    "minutes, position",
    [
        (0, (1, 1, 1)),
        (60, (1, 0, 1)),
    ],
)
def test_loss_not_finite(minutes, position, tmp_path, monkeypatch, capsys):
    """With a checkpoint a step it stops at once, else at the epoch's end; the step named is the
    first bad one."""
    out = tmp_path / "run"
    spoiled_forward(
        monkeypatch,
        "pretrain",
        7,
        lambda outputs: {**outputs, "loss": outputs["loss"] * float("nan")},
    )
    assert inside("pretrain", out, train__save_minutes=minutes) == 1
    errors = lines(capsys)
    line = (
        "the loss is not finite at step 7 (epoch 2, lr 0.00293). The last checkpoint is "
        "kept: lower --train.lr or"
    )
    assert errors[-1].startswith(line)
    assert errors.count(errors[-1]) == 1
    assert errors[-1] in (out / "log.txt").read_text()
    assert column(metrics(out), "epoch") == [1]
    assert where(out) == position
    assert finite(state(out))


@pytest.mark.parametrize(
    "error, when",
    [
        (RuntimeError(CPU_MEMORY), "choosing the precision"),
        (MemoryError(), "timing a step"),
        (torch.OutOfMemoryError("CUDA"), "in the loop"),
    ],
    ids=repr,
)
def test_out_of_memory(error, when, tmp_path, monkeypatch, capsys):
    def run_out(*_, **__):
        raise error

    if when == "in the loop":
        spoiled_forward(monkeypatch, "pretrain", 3, run_out)
    else:
        monkeypatch.setattr(IDMM, "forward", run_out)
    out = tmp_path / "run"
    assert inside("pretrain", out, train__precision="auto" if "precision" in when else "fp32") == 1
    advice = (
        "out of memory with a batch of 20 images: try --train.accumulate 4 (the same step in "
        "smaller passes), a smaller --train.batch_size or --train.precision bf16, in a new --out"
    )
    errors = lines(capsys)
    assert errors[-1] == advice
    assert errors.count(advice) == 1
    assert when != "in the loop" or where(out) == (1, 0, 2)
