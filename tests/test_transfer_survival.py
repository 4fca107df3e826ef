"""A transfer grid killed at any moment, run twice at once, its workers killed: nothing is lost or run twice."""

import os
import random
import signal
import time
from functools import partial

from helpers import same
from transfers import GRID, JOBS, begun, cells, forked, gone, inside, runs, stamps

import idmm
from idmm.locks import holders


def assert_equal(out, whole):
    """Every cell and every exported tensor are those of the run that was left alone."""
    assert cells(out) == cells(whole) and {status for status, *_ in cells(out).values()} == {"ok"}
    mine, others = runs(out), runs(whole)
    assert mine.keys() >= others.keys() and len(others) == JOBS
    assert all(same(mine[key], others[key]) for key in others)


# ------------------------------------------------------------------ killed
def test_killed_five_times_at_random(whole_grid, tmp_path):
    rng, out, kept = random.Random(11), tmp_path / "out", {}
    with forked(out) as process:  # and once stopped kindly
        assert process.until(lambda: begun(out) > 0), process.said()
        assert process.kill(signal.SIGTERM) == 130 and set(cells(out).values()) == {("missing", None, None)}
    for turn, jobs in enumerate([0, 1, 0, 1, 1]):  # that are to be finished before the kill
        begun_before, files = begun(out), len(kept) + 2 * jobs
        with forked(out) as process:
            assert process.until(partial(more, out, begun_before, files)), process.said()
            time.sleep(rng.uniform(0, 0.2))
            assert process.kill() == -signal.SIGKILL, "it was over before it was killed"
        now = stamps(out)
        assert {path: now[path] for path in kept} == kept, f"turn {turn}: what was finished was opened again"
        kept = now
    assert kept, "the kills came before any job was finished: they prove nothing"
    with forked(out) as process:
        assert process.wait() == 0, process.said()
    assert {path: stamps(out)[path] for path in kept} == kept
    assert_equal(out, whole_grid)


def more(out, count, files):
    """Whether training was begun more often than so, and so many files of finished jobs are there."""
    return begun(out) > count and len(stamps(out)) >= files


def test_two_at_once_share_the_work(whole_grid, tmp_path):
    out = tmp_path / "out"
    with forked(out) as one, forked(out) as other:
        pids, seen = {one.popen.pid, other.popen.pid}, set()

        def both():
            seen.update(owner.get("pid") for owner in holders(out / "jobs").values())  # none yet: it is being written
            return seen >= pids

        assert one.until(both), "both had some"
        assert one.wait() == other.wait() == 0, one.said() + other.said()
    assert begun(out) == JOBS, "no job was begun twice"
    assert_equal(out, whole_grid)


def test_workers_end_with_their_parent_and_the_next_ones_go_on(whole_grid, tmp_path, capfd, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the whole grid had it
    with forked(out, "--workers", 2, "--pretrain.train.epochs", 100_000) as process:
        assert process.until(lambda: begun(out) == 2), process.said()
        workers = {owner["pid"] for owner in holders(out / "jobs").values()}
        assert len(workers) == 2 and process.popen.pid not in workers
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

    def say(status):
        if (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("idmm.transfer.status.GridStatus.say", say)
    began = time.monotonic()
    assert inside(tmp_path / "out", "--workers", 2) == 130 and time.monotonic() - began < 90
    assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert not list((tmp_path / "out" / "jobs").glob("*.yaml"))
