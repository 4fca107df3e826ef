"""The lock between processes; environment variables that other programs left, and users without a
home folder."""

import os
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT, Forked, flags

from idmm.errors import RunError, UserError
from idmm.files import Lock
from idmm.training.run_folder import RunFolder

HELD = """
import os, random, sys, time
from pathlib import Path
from idmm.files import Lock
folder, seed, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rng, count, end = random.Random(seed), 0, time.monotonic() + seconds
while time.monotonic() < end:
    lock = Lock(folder / "jobs" / "k.lock")
    if lock.acquire():
        count += 1
        with open(folder / "inside", "x"):  # fails if another process is in here
            time.sleep(rng.uniform(0, 0.002))
        os.unlink(folder / "inside")
        lock.release()
print(count)
"""


def test_never_two_owners_at_once(tmp_path):
    """Processes that take and let go as fast as they can."""
    command = [sys.executable, "-c", HELD, str(tmp_path)]
    streams = {
        "cwd": ROOT,
        "env": ENVIRONMENT,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    racing = [subprocess.Popen([*command, str(seed), "2"], **streams) for seed in range(3)]
    outputs = [process.communicate(timeout=120) for process in racing]
    for process in racing:
        assert process.returncode == 0, "".join(error for _, error in outputs)
    assert sum(int(out) for out, _ in outputs) > 30, "they hardly met"


def test_freed_by_a_kill_though_a_worker_lives(tmp_path):
    """A loader's worker is forked from the process that holds the lock, and outlives it for some
    seconds."""
    code = (
        "import os, sys, time; from pathlib import Path; from idmm.files import Lock; lock "
        "= Lock(Path(sys.argv[1]));"
    )
    code += "assert lock.acquire(); os.fork() or print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, tmp_path / "k.lock"]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        lock = Lock(tmp_path / "k.lock")
        assert not lock.acquire()
        process.kill()
        process.wait()
        assert lock.acquire()
        lock.release()
        os.kill(child, 9)


def test_a_folder_is_free_after_whatever_went_wrong(tmp_path, monkeypatch):
    def full(*_):
        raise RunError("config.yaml: cannot be written")

    with monkeypatch.context() as patch, pytest.raises(RunError):
        patch.setattr("idmm.training.run_folder.write_text", full)
        RunFolder(str(tmp_path / "run"), {}, "auto")
    one = RunFolder(str(tmp_path / "run"), {}, "auto")
    with pytest.raises(UserError, match="is in use by another run"):  # of this process too
        RunFolder(str(tmp_path / "run"), {}, "auto")
    one.close()
    RunFolder(str(tmp_path / "run"), {}, "auto").close()


QUICK = dict(
    train__epochs=1, train__ema=None, stages=None, train__size=16, data__subset={"total": 20}
)
SHELLS = {
    "a scheduler's": {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
    "no number": {"WORLD_SIZE": "two"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_processes_that_do_not_exist(tmp_path, shell):
    with Forked(
        ["finetune", *flags("finetune", tmp_path / "a", **QUICK)], tmp_path / "err", **SHELLS[shell]
    ) as process:
        assert process.wait() == 2
        (line,) = process.said().splitlines()[-1:]
        assert line.startswith("environment: accelerate cannot start (")
        assert "Unset WORLD_SIZE, RANK" in line
