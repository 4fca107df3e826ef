"""The one lock: beside owners that live, died, were stopped or are on another machine, and in a race for it."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT
from transfers import gone

from idmm import locks
from idmm.checkpoint import RunFolder
from idmm.config import PretrainConfig
from idmm.config.parsing import build
from idmm.errors import RunError, UserError
from idmm.locks import Lock, holders

OWNER = {**Lock("k").owner, "token": "another"}  # what a file of a lock says
UNREADABLE = ['{"id": "ab', "", "[]", "7", "null", "{}", '{"user": "else"}']  # killed in mid-write; another program's
UNREADABLE += [json.dumps({**OWNER, key: [9]}) for key in OWNER]
UNREADABLE += [json.dumps({k: v for k, v in OWNER.items() if k != key}) for key in OWNER]


def plant(folder, number=1, name="k", **owner):
    """Leaves the file of an owner of the lock 'k' and returns it."""
    path = folder / f"{name}.{number}.lock"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**OWNER, **owner}))
    return path


def age(path, seconds):
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def taken(folder):
    """Whether the lock is to be had; it is let go of at once."""
    lock = Lock(folder / "k")
    mine = lock.acquire()
    lock.release()
    return mine


def dead():
    """The number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


# ------------------------------------------------------------------ who has it
def test_held_by_one_and_let_go(tmp_path):
    folder = tmp_path / "jobs"
    one, other = Lock(folder / "k", "one"), Lock(folder / "other", "two")
    assert holders(folder) == {} and not one.held and not folder.exists(), "looking makes no folder"
    assert one.acquire() and one.held and not taken(folder) and other.acquire()
    assert {name: owner["id"] for name, owner in holders(folder).items()} == {"k": "one", "other": "two"}
    one.release(), one.release(), other.release()
    assert holders(folder) == {} and not one.held and taken(folder)
    assert list(folder.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize(
    ("owner", "silent", "free"),
    [
        ({"pid": dead()}, 0, True),
        ({"pid": dead(), "born": None}, 0, True),  # of a system without /proc
        ({"born": "1"}, 0, True),  # another process has the number now
        ({}, 10, False),  # it lives, however long it slept
        ({"place": "another", "pid": 1}, 0.8, False),  # a container on this very machine too
        ({"place": "another", "pid": 1}, 1.2, True),
        ({"born": None}, 0.8, False),
        ({"born": None}, 1.2, True),
        ({"pid": 1 << 80}, 0, True),
        *((text, silent, silent > 1) for text in UNREADABLE for silent in (0.8, 1.2)),
    ],
)
def test_who_is_dead(tmp_path, owner, silent, free):
    path = plant(tmp_path, 7, **(owner if isinstance(owner, dict) else {}))
    if isinstance(owner, str):
        path.write_text(owner)
    age(path, silent * locks.STALE)
    assert list(holders(tmp_path)) == ([] if free else ["k"]) and taken(tmp_path) == free
    assert list(tmp_path.iterdir()) == ([] if free else [path]), "a dead one's file is removed"
    if owner == {}:
        assert not Lock(tmp_path / "k").acquire("silent"), "nor is it waited for"


def test_a_zombie_is_dead(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        while not gone(process.pid):
            time.sleep(0.01)
        stat = Path(f"/proc/{process.pid}/stat").read_text()  # nobody waited for it: it is still in the table
        plant(tmp_path, pid=process.pid, born=stat.rpartition(")")[2].split()[19])
        assert taken(tmp_path)
    finally:
        process.wait()


def test_the_folders_clock_counts_not_this_machines(tmp_path, monkeypatch):
    age(plant(tmp_path, place="another"), 0)
    monkeypatch.setattr(locks.time, "time", lambda: 2e9 + 1e9)
    assert not taken(tmp_path)


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT", 0.02)
    lock, path = Lock(tmp_path / "k"), tmp_path / "k.1.lock"
    assert lock.acquire()
    age(path, 1000)
    deadline = time.monotonic() + 30
    while time.time() - path.stat().st_mtime > 900:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()
    age(plant(tmp_path), 1000)
    time.sleep(0.1)
    assert time.time() - path.stat().st_mtime > 900, "not after it let go"


def test_an_owner_who_was_taken_over_leaves_the_new_one_alone(tmp_path):
    late, new = Lock(tmp_path / "k"), Lock(tmp_path / "k")
    late.owner |= {"place": "another"}
    assert late.acquire() and late.held
    age(tmp_path / "k.1.lock", 2 * locks.STALE)
    assert new.acquire() and not late.held
    late.release()
    assert new.held and list(holders(tmp_path)) == ["k"]
    new.release()
    assert taken(tmp_path)


def test_a_number_that_was_free_again_is_not_enough(tmp_path, monkeypatch):
    """Who decided by an old look at the folder finds the owner who came since, and withdraws."""
    owner, late, look = Lock(tmp_path / "k"), Lock(tmp_path / "k"), locks._held

    def old(path):
        monkeypatch.setattr(locks, "_held", look)
        found = look(path)
        plant(tmp_path, 1, born="1")
        assert owner.acquire() and (tmp_path / "k.2.lock").exists() and not (tmp_path / "k.1.lock").exists()
        return found

    monkeypatch.setattr(locks, "_held", old)
    assert not late.acquire() and owner.held and [path.name for path in tmp_path.iterdir()] == ["k.2.lock"]
    owner.release()


# ------------------------------------------------------------------ waiting
def test_who_waits_gets_it_when_it_is_free(tmp_path):
    lock, other, told = Lock(tmp_path / "k"), Lock(tmp_path / "k"), []
    assert lock.acquire()
    timer = threading.Timer(0.3, lock.release)
    timer.start()
    assert other.acquire("always", told.append) and other.held
    timer.join()
    assert [owner["token"] for owner in told] == [lock.owner["token"]], "told once of whom"
    other.release()


def test_of_an_owner_elsewhere_a_sign_of_life_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "STALE", 1.0)
    path, told = plant(tmp_path, place="another"), []
    timer = threading.Timer(0.3, os.utime, [path])
    timer.start()
    assert not Lock(tmp_path / "k").acquire("silent", told.append) and len(told) == 1, "it lives"
    timer.join()
    lock, before = Lock(tmp_path / "k"), time.monotonic()
    assert lock.acquire("silent") and 0.5 < time.monotonic() - before < 30, "it gave none: it was killed"
    lock.release()


# ------------------------------------------------------------------ a run's folder
def test_a_run_killed_on_another_machine_is_gone_on_with(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "STALE", 0.5)
    plant(tmp_path / "run" / "last", name="run", place="another", host="node7")
    run = RunFolder(str(tmp_path / "run"), {"seed": 1}, "auto")
    assert "is held by a run on node7; waiting up to" in caplog.text
    run.close()


def test_a_run_that_lost_its_folder_writes_no_more(tmp_path):
    run = RunFolder(str(tmp_path / "run"), {"seed": 1}, "auto")
    run.add_metrics({"stage": 1, "epoch": 1})
    file = tmp_path / "run/last/run.1.lock"
    file.rename(file.with_name("run.2.lock"))  # as if it had been taken for dead
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for write in (run.add_metrics, run.save_state, run.finish):
        with pytest.raises(RunError, match="another run took the folder over"):
            write({"stage": 1, "epoch": 2})
    run.close()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_folder_is_free_after_whatever_went_wrong(tmp_path, monkeypatch):
    def full(*_):
        raise RunError("config.yaml: cannot be written")

    with monkeypatch.context() as patch, pytest.raises(RunError):
        patch.setattr("idmm.checkpoint.write_text", full)
        RunFolder(str(tmp_path / "run"), {}, "auto")
    one = RunFolder(str(tmp_path / "run"), {}, "auto")
    with pytest.raises(UserError, match="is in use by another run"):  # of this process too
        RunFolder(str(tmp_path / "run"), {}, "auto")
    one.close()
    RunFolder(str(tmp_path / "run"), {}, "auto").close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    lock = Lock(tmp_path / "k")
    with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(code)):
        patch.setattr(locks.json, "dumps", fail)
        lock.acquire()
    assert not lock.held and list(tmp_path.iterdir()) == [] and lock.acquire()
    lock.release()


# ------------------------------------------------------------------ races
HAMMER = """
import contextlib, json, os, random, sys, time
from pathlib import Path
from idmm.locks import Lock
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
rng, had, end = random.Random(seed), 0, time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    lock = Lock(folder / "jobs" / "k")
    if not lock.acquire():
        continue
    had += 1
    with open(folder / "inside", "x"):  # fails where another process is in here
        time.sleep(rng.uniform(0, 0.002))
    os.unlink(folder / "inside")
    if rng.random() < 0.5:  # and one who took it and died, unless another was quicker
        number = int(lock._file.name.split(".")[1])
        with contextlib.suppress(FileExistsError), open(lock._file.with_name(f"k.{number + 1}.lock"), "x") as file:
            file.write(json.dumps({**lock.owner, "token": "dead", "born": "1"}))
    lock.release()
print(had)
"""


def test_never_two_owners_at_once(tmp_path):
    """Processes that take, let go and take over from the dead as fast as they can."""
    command = [sys.executable, "-c", HAMMER, str(tmp_path)]
    kept = {"cwd": ROOT, "env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racing = [subprocess.Popen([*command, str(seed), "2.5"], **kept) for seed in range(4)]
    said = [process.communicate(timeout=120) for process in racing]
    assert all(process.returncode == 0 for process in racing), "".join(error for _, error in said)
    assert sum(int(out) for out, _ in said) > 30, "they hardly met"


def test_never_two_owners_among_threads(tmp_path):
    """Takers who all saw the same dead owner: one of them gets it."""
    for turn in range(20):
        folder = tmp_path / str(turn)
        plant(folder, born="1")
        gate = threading.Barrier(8)

        def take(_, folder=folder, gate=gate):
            lock = Lock(folder / "k")
            gate.wait()
            got = lock.acquire()
            gate.wait()
            lock.release()
            return got

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(take, range(8))) == [False] * 7 + [True]


def test_what_killed_starts_did_after_the_checkpoint_counts_as_time(whole, tmp_path):
    """By their last signs of life; the time between two starts does not count."""
    out = shutil.copytree(whole["pretrain"], tmp_path / "run")
    (out / "result.json").unlink()
    settings = build(PretrainConfig, str(out / "config.yaml"))
    age(out / "last/state.pt", 1000)

    def lost(ago):
        """Opens a run whose last start was killed so many seconds ago; None: it was not killed."""
        if ago is not None:
            age(plant(out / "last", name="run", pid=dead()), ago)
        folder = RunFolder(str(out), settings, "auto")
        folder.remember("lost", folder.lost)  # as where it starts
        folder.close()
        return folder.lost

    assert lost(None) == 0
    age(out / "last/lost.json", 1000)  # that start began then
    assert lost(940) == pytest.approx(60, abs=2)
    age(out / "last/lost.json", 500)  # began again after a pause
    assert lost(470) == pytest.approx(90, abs=2)
    age(out / "last/lost.json", 400)
    age(out / "last/state.pt", 300)  # saved, and all that time with it
    assert lost(290) == pytest.approx(10, abs=2)
    assert lost(None) == pytest.approx(10, abs=2), "it was killed before its first sign of life"
