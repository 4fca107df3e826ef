"""A transfer grid killed at any moment, run twice at once, beside claims of the dead: nothing is lost or run twice."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from helpers import ENVIRONMENT, ROOT, same
from transfers import GRID, JOBS, Forked, begun, cells, gone, inside, runs, stamps

import idmm
from idmm.transfer import claims
from idmm.transfer.claims import Claims


def assert_equal(out, whole):
    """Every cell and every exported tensor are those of the run that was left alone."""
    assert cells(out) == cells(whole) and {status for status, *_ in cells(out).values()} == {"ok"}
    mine, others = runs(out), runs(whole)
    assert mine.keys() >= others.keys() and len(others) == JOBS
    assert all(same(mine[key], others[key]) for key in others)


# ------------------------------------------------------------------ killed
def test_killed_five_times_at_random(whole_grid, tmp_path):
    rng, out, kept = random.Random(11), tmp_path / "out", {}
    with Forked(out) as process:  # and once stopped kindly
        assert process.until(lambda: begun(out) > 0), process.said()
        assert process.kill(signal.SIGTERM) == 130 and set(cells(out).values()) == {("missing", None, None)}
    for turn, jobs in enumerate([0, 1, 0, 1, 1]):  # that are to be finished before the kill
        begun_before, files = begun(out), len(kept) + 2 * jobs
        with Forked(out) as process:
            assert process.until(partial(more, out, begun_before, files)), process.said()
            time.sleep(rng.uniform(0, 0.2))
            assert process.kill() == -signal.SIGKILL, "it was over before it was killed"
        now = stamps(out)
        assert {path: now[path] for path in kept} == kept, f"turn {turn}: what was finished was opened again"
        kept = now
    assert kept, "the kills came before any job was finished: they prove nothing"
    with Forked(out) as process:
        assert process.wait() == 0, process.said()
    assert {path: stamps(out)[path] for path in kept} == kept
    assert_equal(out, whole_grid)


def more(out, count, files):
    """Whether training was begun more often than so, and so many files of finished jobs are there."""
    return begun(out) > count and len(stamps(out)) >= files


def test_two_at_once_share_the_work(whole_grid, tmp_path):
    out = tmp_path / "out"
    with Forked(out) as one, Forked(out) as other:
        pids = {one.process.pid, other.process.pid}
        assert one.wait() == other.wait() == 0, one.said() + other.said()
    assert begun(out) == JOBS, "no job was begun twice"
    owners = [json.loads(path.read_text()) for path in (out / "jobs").glob("*.claim")]
    assert {owner["pid"] for owner in owners if "pid" in owner} == pids, "both had some"
    assert_equal(out, whole_grid)


def test_workers_end_with_their_parent_and_the_next_ones_go_on(whole_grid, tmp_path, capfd, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the whole grid had it
    with Forked(out, "--workers", 2, "--pretrain.train.epochs", 100_000) as process:
        assert process.until(lambda: begun(out) == 2), process.said()
        owners = [json.loads(path.read_text() or "{}") for path in (out / "jobs").glob("*.claim")]
        workers = {owner["pid"] for owner in owners if "pid" in owner}
        assert len(workers) == 2 and process.process.pid not in workers
        assert process.kill() == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    outlived = [pid for pid in workers if not gone(pid)]
    for pid in outlived:
        os.kill(pid, signal.SIGKILL)
    assert not outlived, "workers outlive their parent"
    found = idmm.transfer({**GRID, "out": str(out), "workers": 2})
    assert {cell["status"] for cell in found["cells"]} == {"ok"} and "6 of 6 cells done" in capfd.readouterr().out
    assert_equal(out, whole_grid)


def test_an_interrupt_ends_the_workers(tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(slow))

    def say(standing, grid):
        if (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("idmm.transfer.status.Standing.say", say)
    began = time.monotonic()
    assert inside(tmp_path / "out", "--workers", 2) == 130 and time.monotonic() - began < 90
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert not list((tmp_path / "out" / "jobs").glob("*.yaml"))


# ------------------------------------------------------------------ claims
def plant(folder, number=1, **owner):
    """Leaves a claim on the job 'k' and returns its file."""
    path = folder / f"k.{number}.claim"
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({**Claims(folder).owner, "id": "another", **owner}))
    return path


def age(path, seconds):
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def taken(folder):
    with Claims(folder).held("k") as mine:
        return mine


def a_dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_held_by_one_and_let_go(tmp_path):
    one, other = Claims(tmp_path / "jobs"), Claims(tmp_path / "jobs")
    assert not (tmp_path / "jobs").exists(), "looking makes no folder"
    with one.held("k") as mine:
        assert mine and not taken(tmp_path / "jobs")
        with other.held("other") as also:
            assert also
        assert other.held_by_others() == {"k": one.owner} and one.held_by_others() == {}
    assert other.held_by_others() == {} and taken(tmp_path / "jobs")
    with pytest.raises(ZeroDivisionError), one.held("k"):
        1 / 0  # noqa: B018
    assert taken(tmp_path / "jobs"), "let go of however the block ended"


def test_an_owner_whose_process_is_gone_is_dead_at_once(tmp_path):
    plant(tmp_path, pid=a_dead_pid())
    assert Claims(tmp_path).held_by_others() == {} and taken(tmp_path)


def test_an_owner_whose_number_another_process_has_now_is_dead_at_once(tmp_path):
    plant(tmp_path, born="1")
    assert taken(tmp_path)


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


def test_an_owner_of_this_machine_that_lives_is_not_dead_however_long_it_slept(tmp_path):
    age(plant(tmp_path), 10 * claims.STALE)
    assert not taken(tmp_path) and list(Claims(tmp_path).held_by_others()) == ["k"]


@pytest.mark.parametrize(
    "elsewhere", [{"place": "another", "pid": 1}, {"born": None, "host": "a system without /proc"}]
)
def test_an_owner_elsewhere_is_dead_when_its_sign_of_life_is_old(tmp_path, elsewhere):
    """A container on this very machine too, whose process numbers mean nothing here."""
    path = plant(tmp_path, **elsewhere)
    age(path, 0.8 * claims.STALE)
    assert not taken(tmp_path)
    age(path, 1.2 * claims.STALE)
    assert Claims(tmp_path).held_by_others() == {} and taken(tmp_path)


def test_a_claim_that_was_not_written_to_its_end(tmp_path):
    path = plant(tmp_path)
    path.write_text('{"id": "ab')
    assert not taken(tmp_path)
    age(path, 1.2 * claims.STALE)
    assert taken(tmp_path)


def test_the_folders_clock_counts_not_this_machines(tmp_path, monkeypatch):
    age(plant(tmp_path, place="another"), 0)
    monkeypatch.setattr(claims.time, "time", lambda: 2e9 + 1e9)
    assert not taken(tmp_path)


def test_an_owner_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT", 0.02)
    with Claims(tmp_path).held("k"):
        path = tmp_path / "k.1.claim"
        age(path, 1000)
        deadline = time.monotonic() + 30
        while time.time() - path.stat().st_mtime > 900:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    stamp = (tmp_path / "k.1.claim").stat().st_mtime_ns
    time.sleep(0.1)
    assert (tmp_path / "k.1.claim").stat().st_mtime_ns == stamp, "not after it let go"


def test_an_owner_who_was_taken_over_leaves_the_new_one_alone(tmp_path, monkeypatch):
    late = Claims(tmp_path)
    late.owner |= {"place": "another"}
    with late.held("k") as mine:
        assert mine
        age(tmp_path / "k.1.claim", 2 * claims.STALE)
        new = Claims(tmp_path).held("k")
        assert new.__enter__()
    assert Claims(tmp_path).held_by_others().keys() == {"k"}
    new.__exit__(None, None, None)
    assert taken(tmp_path)


HAMMER = """
import json, os, random, sys, time
from pathlib import Path
from idmm.transfer.claims import Claims
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
rng, had, end = random.Random(seed), 0, time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    claims = Claims(folder / "jobs")
    with claims.held("k") as mine:
        if mine:
            had += 1
            number = claims._last("k")[0]
            with open(folder / "inside", "x"):  # fails where another process is in here
                time.sleep(rng.uniform(0, 0.002))
            os.unlink(folder / "inside")
    if mine and rng.random() < 0.5:  # and one who took it and died
        dead = {**claims.owner, "id": "dead", "born": "1"}
        claims._put("k", number + 2, dead)  # unless another was quicker
print(had)
"""


def test_never_two_owners_at_once(tmp_path):
    """Processes that take, let go and take over from the dead as fast as they can, on one job."""
    command = [sys.executable, "-c", HAMMER, str(tmp_path)]
    kept = {"cwd": ROOT, "env": ENVIRONMENT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    racing = [subprocess.Popen([*command, str(seed), "2.5"], **kept) for seed in range(4)]
    said = [process.communicate(timeout=120) for process in racing]
    assert all(process.returncode == 0 for process in racing), "".join(error for _, error in said)
    assert sum(int(out) for out, _ in said) > 30, "they hardly met"


def test_never_two_owners_among_threads(tmp_path, monkeypatch):
    """Takers who all saw the same dead owner: one of them gets it."""
    for turn in range(20):
        folder = tmp_path / str(turn)
        plant(folder, born="1")
        gate, got, over = threading.Barrier(8), [], threading.Barrier(8)

        def take(folder=folder, gate=gate, got=got, over=over):
            gate.wait()
            with Claims(folder).held("k") as mine:
                got.append(mine)
                over.wait()

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [False] * 7 + [True]
