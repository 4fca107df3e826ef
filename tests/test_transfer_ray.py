"""The grid on a real Ray cluster: killed workers, failing jobs, interrupts, and no Ray at all."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from folders import faults, tree
from helpers import PATIENCE, same
from transfers import GRID, begun, cells, inside, runs, stamps

from idmm.config import parsing
from idmm.errors import Interrupted
from idmm.grid import cluster
from idmm.grid.config import GridConfig
from idmm.grid.plan import GridPlan
from idmm.grid.preflight import check
from idmm.grid.run import Grid

STARTING = 90  # seconds until Ray counts as unable to start here
# 2 pretrainings, 3 fine-tunings: a part of ``whole_grid``
CHANGES = {"targets": ["digits"], "engine": "ray"}


@contextlib.contextmanager
def limit(seconds):
    """Raises TimeoutError in the block when it takes longer."""

    def late(*_):
        raise TimeoutError(f"not done in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def patience():
    with limit(int(2 * PATIENCE)):
        yield


@pytest.fixture(scope="module")
def joined():
    """The address of a cluster of one node with two cores, joined by this process; its workers are
    kept."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # short: sockets lie in it, and their paths may not be long
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_TMPDIR", "TMPDIR"):
            patch.setenv(name, folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.setattr(tempfile, "tempdir", folder)
        started = Cluster()
        try:
            with limit(STARTING):
                started.add_node(
                    num_cpus=2, object_store_memory=80_000_000, include_dashboard=False
                )
                started.wait_for_nodes()
                ray.init(address=started.address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # a sandbox without sockets or shared memory
            started.shutdown()
            pytest.skip(f"Ray cannot start here: {type(error).__name__}: {error}")
        yield started.address
        ray.shutdown()
        started.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def make(out, **changes):
    config = parsing.build(
        GridConfig,
        {
            **GRID,
            **CHANGES,
            **changes,
            "out": str(out),
        },
    )
    grid = Grid(config, GridPlan(config))
    grid.start()
    return grid


def whole(out, whole_grid):
    """Whether a grid is the sequential run's, in its cells and weights, to the last bit."""
    assert len(runs(out)) == 5
    assert runs(out).keys() < runs(whole_grid).keys()
    return all(same(folder, runs(whole_grid)[key]) for key, folder in runs(out).items())


def kill_worker(folder):
    """Kills the process that has a run folder's lock open; returns whether there was one."""
    lock = str(folder / "last" / "run.lock")
    for fds in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(fd) == lock for fd in fds.iterdir()):
                os.kill(int(fds.parent.name), signal.SIGKILL)
                return True
    return False


def test_a_worker_is_killed_in_mid_job(joined, whole_grid, tmp_path, capsys):
    """By the command line. Each step writes a checkpoint, from which the job's next worker goes
    on."""
    out = tmp_path / "out"
    killed = []

    def kill():
        while not killed:
            for folder in runs(out).values():
                if not killed and (folder / "last" / "state.pt").exists() and kill_worker(folder):
                    killed.extend([] if (folder / "result.json").exists() else [folder])
            time.sleep(0.01)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert inside(out, "--ray.address", joined, **CHANGES) == 0
    killer.join()
    expected = cells(whole_grid)
    assert cells(out) == {key: cell for key, cell in expected.items() if key[1] == "digits"}
    assert len(cells(out)) == 3
    assert whole(out, whole_grid)
    assert not list((out / "jobs").iterdir())
    (folder,) = killed
    assert (folder / "log.txt").read_text().count("training on cpu") == 2
    assert begun(out) == 5 + 1
    assert "ray: 1 nodes, 2 cores, 0 GPUs" in capsys.readouterr().err
    before = stamps(out)
    assert inside(out, "--ray.address", joined, **CHANGES) == 0
    assert stamps(out) == before, "what is done is not sent"


def test_failing_jobs_are_recorded_and_the_rest_goes_on(joined, tmp_path, monkeypatch):
    """One whose images are broken, and one at which each worker dies."""
    broken = tree(tmp_path / "broken", train={"a": 3})
    # seen when it is decoded, not before
    (broken / "train" / "a" / "1.png").write_bytes(b"no image")
    faulty = {
        "name": "folder",
        "label": "broken",
        "root": str(broken),
        "pretrain": {"data": {"subset": None}},
    }
    long = {
        "name": "digits",
        "label": "long",
        "pretrain": {"train": {"epochs": 5000}},
    }
    grid = make(tmp_path / "out", sources=[faulty, long])

    def kill(grid):
        for folder in grid.out.glob("runs/pretrain/long-*"):
            if (folder / "last" / "state.pt").exists():
                kill_worker(folder)

    monkeypatch.setattr(Grid, "log_progress", kill)
    cluster.run(grid)
    by_source = {cell["source"]: cell for cell in grid.results()["cells"]}
    failed = by_source["broken"]
    assert by_source["scratch"]["status"] == "ok"
    assert failed["status"] == "failed"
    assert "1.png" in failed["error"]
    assert "1.png" in (grid.out / failed["log"]).read_text()
    assert str(failed["log"]).startswith("runs/pretrain/")
    assert not (grid.out / failed["folder"]).exists(), "what waits for it is not run"
    assert by_source["long"]["status"] == "failed"
    assert by_source["long"]["error"].startswith("its worker died: ")
    assert len(grid.failures()) == 2
    assert not grid.remaining()
    assert not list(grid.out.glob("jobs/*.started"))


def test_an_interrupt_leaves_what_can_be_gone_on_with(joined, tmp_path, monkeypatch):
    """Checkpoints are rare here: the one that is there was written because of the interrupt."""
    train = {
        **GRID["pretrain"]["train"],
        "epochs": 5000,
        "save_minutes": 60,
    }
    pretrain = {**GRID["pretrain"], "train": train}
    grid = make(
        tmp_path / "out",
        sources=GRID["sources"][1:],
        scratch=False,
        pretrain=pretrain,
    )
    (pretraining,) = (job for job in grid.remaining() if job.command == "pretrain")
    folder = grid.out / pretraining.folder

    def stop(grid):
        if (folder / "metrics.jsonl").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(Grid, "log_progress", stop)
    with pytest.raises(Interrupted, match="Repeat the command to resume"):
        cluster.run(grid)
    assert not list(grid.out.glob("jobs/*.started"))
    assert not grid.failures()
    assert len(grid.remaining()) == 2
    assert (folder / "last" / "state.pt").exists()


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    grid = make(tmp_path / "out")
    assert faults(check, grid.config, grid.plan) == [
        "engine: ray: needs ray. Install it with: pip install -e '.[ray]'"
    ]
