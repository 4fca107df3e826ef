"""A transfer grid killed at any moment, and a job that kills its process: nothing is lost or run
twice."""

import random
import signal
import time
from functools import partial

from helpers import call_ok, same
from transfers import JOBS, Made, begun, cells, forked, inside, results, runs, stamps


def assert_equal(out, whole):
    """Every cell and every exported tensor are those of the run that was left alone."""
    assert cells(out) == cells(whole)
    assert {status for status, *_ in cells(out).values()} == {"ok"}
    mine = runs(out)
    others = runs(whole)
    assert mine.keys() >= others.keys()
    assert len(others) == JOBS
    for key in others:
        assert same(mine[key], others[key])


def test_killed_five_times_at_random(whole_grid, tmp_path):
    rng = random.Random(11)
    out = tmp_path / "out"
    finished = {}
    with forked(out) as process:  # and once stopped kindly
        assert process.until(lambda: begun(out) > 0), process.said()
        assert process.kill(signal.SIGTERM) == 130
        assert set(cells(out).values()) == {("missing", None, None)}
    # jobs that are to be finished before the kill: so no job is under way at two kills
    for turn, jobs in enumerate([0, 1, 1, 1, 1]):
        begun_before = begun(out)
        files = len(finished) + 2 * jobs
        with forked(out) as process:
            assert process.until(partial(more, out, begun_before, files)), process.said()
            time.sleep(rng.uniform(0, 0.2))
            assert process.kill() == -signal.SIGKILL, "it was over before it was killed"
        now = stamps(out)
        assert {path: now[path] for path in finished} == finished, (
            f"turn {turn}: what was finished was opened again"
        )
        finished = now
    assert finished, "the kills came before any job was finished: they prove nothing"
    with forked(out) as process:
        assert process.wait() == 0, process.said()
    assert {path: stamps(out)[path] for path in finished} == finished
    assert_equal(out, whole_grid)


def more(out, count, files):
    """Whether training was begun more often than so, and so many files of finished jobs are
    there."""
    return begun(out) > count and len(stamps(out)) >= files


def test_a_job_at_which_the_process_dies_twice_fails(tmp_path, monkeypatch, capsys):
    """As of one that is too large for the memory: the third start records it and runs the
    others."""
    out = tmp_path / "out"
    long = ("--pretrain.train.epochs", 100_000)
    for died in (1, 2):
        with forked(out, *long) as process:
            assert process.until(lambda count=died: begun(out) == count), process.said()
            assert process.kill() == -signal.SIGKILL
        assert [path.read_text() for path in (out / "jobs").glob("*.started")] == [str(died)]
    call_ok(f"transfer status {out}")
    output = capsys.readouterr().out
    assert "  running, or killed: digits-idmm-tiny-s3-" in output
    assert output.rstrip().endswith(", start 2")
    jobs = Made(monkeypatch)
    assert inside(out, *long) == 1
    assert "digits-idmm-tiny-s3" not in jobs.asked
    statuses = {(cell["source"], cell["status"]) for cell in results(out)["cells"]}
    assert statuses == {("scratch", "ok"), ("digits", "failed"), ("few", "ok")}
    assert "digits-idmm-tiny-s3 failed: its process died, 2 times" in capsys.readouterr().err
    assert inside(out, *long) == 0
    assert "digits-idmm-tiny-s3" in jobs.asked, "as other failed jobs it is tried again"
