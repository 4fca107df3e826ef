"""The grid on a real Ray cluster of two nodes: killed workers, failing jobs, other runners, and no Ray at all."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import yaml
from folders import faults, tree
from helpers import PATIENCE, same
from transfers import GRID, begun, cells, locked, runs, start

from idmm.config import parsing
from idmm.errors import Interrupted, RunError, install
from idmm.locks import holders
from idmm.transfer import cluster
from idmm.transfer.config import GridConfig, Ray
from idmm.transfer.preflight import check
from idmm.transfer.run import Grid

STARTING = 90  # seconds until Ray counts as unable to start here
CHANGES = {"targets": ["digits"], "engine": "ray"}  # 2 pretrainings, 3 fine-tunings: a part of ``whole_grid``
BY_VALUE = pytest.mark.parametrize("shared", [True, False], ids=["shared", "by value"])


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
def address():
    """A cluster of two nodes, each with one core."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # short: sockets lie in it, and their paths may not be long
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RAY_TMPDIR": folder, "TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_AUTH_MODE", raising=False)
        patch.setattr(tempfile, "tempdir", folder)
        started = Cluster()
        try:
            with limit(STARTING):
                for _ in range(2):
                    started.add_node(num_cpus=1, object_store_memory=80_000_000, include_dashboard=False)
                started.wait_for_nodes()
        except Exception as error:  # a sandbox without sockets or shared memory
            started.shutdown()
            pytest.skip(f"Ray cannot start here: {type(error).__name__}: {error}")
        yield started.address
        started.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def joined(address):
    """The cluster, joined by this process; its workers are kept from test to test."""
    import ray

    with limit(STARTING):
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    yield address
    ray.shutdown()


def nothing():
    """Stands where the grid shows how far it is."""


def make(out, **changes):
    grid = Grid(parsing.build(GridConfig, {**GRID, **CHANGES, **changes, "out": str(out)}))
    grid.write_config()
    return grid


def whole(out, whole_grid):
    """Whether a grid is the sequential run's, in its cells and weights, to the last bit."""
    assert len(runs(out)) == 5 and runs(out).keys() < runs(whole_grid).keys()
    return all(same(folder, runs(whole_grid)[key]) for key, folder in runs(out).items())


def at_work(out):
    """The first lock on a job that has a checkpoint but no result: its folder, and the worker's number."""
    for key, owner in holders(out / "jobs").items():
        folder = runs(out).get(key)
        if folder and (folder / "last" / "state.pt").exists() and not (folder / "result.json").exists():
            return folder, owner["pid"]
    return None


# ------------------------------------------------------------------ whole grids
def test_a_worker_is_killed_in_mid_job(address, whole_grid, tmp_path):
    """By the command line; each step writes a checkpoint, from which the job's next worker goes on."""
    out, killed = tmp_path / "out", []
    with start(out, "--ray.address", address, **CHANGES) as process:

        def kill():
            time.sleep(0.01)
            found = at_work(out)
            if found:
                os.kill(found[1], signal.SIGKILL)
                if not (found[0] / "result.json").exists():
                    killed.append(found[0])
            return bool(killed)

        assert process.until(kill), process.said()
        assert process.wait() == 0, process.said()
    wanted = cells(whole_grid)
    assert cells(out) == {key: cell for key, cell in wanted.items() if key[1] == "digits"} and len(cells(out)) == 3
    assert whole(out, whole_grid)
    (folder,) = killed
    assert (folder / "log.txt").read_text().count("training on cpu") == 2 and begun(out) == 5 + 1
    assert "ray: 2 nodes, 2 cores, 0 GPUs" in process.said()
    noise = ("(raylet)", "(pid=", "Usage stats", "Connecting", "troubleshoot")
    assert not [word for word in noise if word in process.said()], process.said()
    assert process.said().count("ray: the worker of") == 1, process.said()
    assert f"ray: the worker of {folder.name.rpartition('-')[0]} died; tries left: 1 (" in process.said()


def test_by_value(joined, whole_grid, tmp_path):
    """Nothing is shared: what a run needs and makes travels; what only a resume needs does not."""
    out = tmp_path / "out"
    grid, said = make(out, ray={"shared": False}), []
    cluster.run(grid, lambda: said.append(1))
    assert not grid.remaining() and not grid.failed() and said and whole(out, whole_grid)
    for cell in grid.results()["cells"]:
        wanted = cells(whole_grid)[cell["source"], cell["target"], cell["seed"]]
        assert (cell["status"], cell["top1"], cell["top5"]) == wanted
    for folder in runs(out).values():
        assert [path.name for path in folder.glob("last/*")] == ["images.json"] and (folder / "log.txt").exists()
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["out"] == str(folder)
        assert config.get("init") is None or config["init"] in map(str, runs(out).values())
    assert not list((out / "jobs").glob("*.failed.json")) and not holders(out / "jobs")
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("idmm-ray-")]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    cluster.run(make(out, ray={"shared": False}), nothing)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != "grid.yaml"}
    assert {path for path, time_ in after.items() if before.get(path) != time_} <= {out}, "what is done is not sent"


# ------------------------------------------------------------------ failures
@BY_VALUE
def test_a_failing_job_is_marked_and_the_rest_goes_on(joined, whole_grid, tmp_path, shared):
    broken = tree(tmp_path / "broken", train={"a": 3})
    (broken / "train" / "a" / "1.png").write_bytes(b"no image")  # seen when it is decoded, not before
    sources = [{"name": "folder", "label": "broken", "root": str(broken), "pretrain": {"data": {"subset": None}}}]
    grid = make(tmp_path / "out", sources=sources, retries=0, ray={"shared": shared})
    cluster.run(grid, nothing)
    found = {cell["source"]: cell for cell in grid.results()["cells"]}
    scratch, failed = found["scratch"], found["broken"]
    assert (scratch["status"], scratch["top1"], scratch["top5"]) == cells(whole_grid)["scratch", "digits", 3]
    assert failed["status"] == "failed" and "1.png" in failed["error"]
    assert "1.png" in (grid.out / failed["log"]).read_text() and str(failed["log"]).startswith("runs/pretrain/")
    assert not (grid.out / failed["folder"]).exists(), "what waits for it is not run"
    assert len(grid.failed()) == 1 and not grid.remaining()


def test_a_worker_that_dies_every_time(joined, tmp_path):
    """No retry is left: the job is marked, its cells are failed, and the rest goes on."""
    out = tmp_path / "out"
    train = {**GRID["pretrain"]["train"], "epochs": 500}
    sources, pretrain = GRID["sources"][1:], {**GRID["pretrain"], "train": train}
    grid = make(out, sources=sources, pretrain=pretrain, retries=0)
    over = threading.Event()

    def kill():
        while not over.wait(0.01):
            found = at_work(out)
            if found and found[0].parent.name == "pretrain":
                os.kill(found[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        cluster.run(grid, nothing)
    finally:
        over.set()
        killer.join()
    status = {cell["source"]: (cell["status"], cell["error"]) for cell in grid.results()["cells"]}
    assert status["scratch"] == ("ok", None) and status["few"][0] == "failed" and "worker" in status["few"][1]


# ------------------------------------------------------------------ other runners, interrupts
@BY_VALUE
def test_what_another_runner_has_is_left_to_it(joined, tmp_path, shared):
    grid = make(tmp_path / "out", sources=[], ray={"shared": shared})
    (job,) = grid.remaining()
    with contextlib.ExitStack() as other:
        other.enter_context(locked(grid.out, job.key))

        looks = itertools.count(1)

        def look():
            times = next(looks)
            assert times > 2 or not (grid.out / job.folder).exists()
            if times == 2:
                other.close()

        cluster.run(grid, look)
    assert not grid.remaining() and grid.results()["cells"][0]["status"] == "ok"


@BY_VALUE
def test_an_interrupt_leaves_what_can_be_gone_on_with(joined, tmp_path, shared):
    """Checkpoints are rare here: the one that is there was written because of the interrupt."""
    train = {**GRID["pretrain"]["train"], "epochs": 5000, "save_minutes": 60}
    pretrain = {**GRID["pretrain"], "train": train}
    grid = make(tmp_path / "out", sources=GRID["sources"][1:], scratch=False, pretrain=pretrain, ray={"shared": shared})
    (made,) = (job for job in grid.remaining() if job.stage == "pretrain")
    epochs = grid.out / made.folder / "metrics.jsonl"
    base = tempfile.gettempdir()

    def stop():
        there = [name for name in os.listdir(base) if name.startswith("idmm-ray-") and name.endswith(made.key)]
        if epochs.exists() or any(os.path.exists(f"{base}/{name}/{made.folder}/metrics.jsonl") for name in there):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="the same command goes on"):
        cluster.run(grid, stop)
    assert not holders(grid.out / "jobs") and not grid.failed() and len(grid.remaining()) == 2
    assert (grid.out / made.folder / "last" / "state.pt").exists() == shared
    assert not [name for name in os.listdir(base) if name.startswith("idmm-ray-")]


# ------------------------------------------------------------------ on a node, without a cluster
def test_a_task_that_has_nothing_to_do(tmp_path):
    grid = make(tmp_path / "out")
    pretrain = next(job for job in grid.remaining() if job.stage == "pretrain")
    tune = next(job for job in grid.remaining() if job.needs == pretrain.key)
    place = os.getcwd(), "0"
    undone = cluster.Outcome(False)
    assert cluster._do(grid, tune, undone, *place) == undone, "what it waits for was not done"
    with locked(grid.out, pretrain.key):
        assert cluster._do(grid, pretrain, None, *place) == undone, "another runner has it"
    assert not runs(grid.out)


def test_a_task_that_did_not_end_by_itself(tmp_path, caplog):
    """Its worker's death counts; that of the job which it waits for does not, though that one was made meanwhile."""

    class Lost(Exception):
        """Of Ray, bare where the task's own worker died, else around its cause."""

        def __init__(self, cause=None):
            super().__init__("the worker died")
            if cause is not None:
                self.cause = cause

    grid = make(tmp_path / "out", sources=[], retries=1)
    (job,) = grid.remaining()
    fake = SimpleNamespace(grid=grid, died=Counter(), ray=SimpleNamespace(exceptions=SimpleNamespace(RayError=Lost)))
    lost = partial(cluster._RayScheduler._lost, fake, job)
    again = cluster.Outcome(False)
    assert [lost(Lost(Lost())) for _ in range(3)] == [again] * 3 and not fake.died and not caplog.messages
    assert lost(Lost(KeyError("odd"))) == cluster.Outcome(False, "'odd'")
    assert lost(Lost()) == again
    assert caplog.messages == [f"ray: the worker of {job.title} died; tries left: 1 (the worker died)"]
    assert lost(Lost()) == cluster.Outcome(False, "its worker died, 2 times: the worker died")


def test_an_error_lets_running_tasks_save(tmp_path, monkeypatch):
    asked = []

    class Full:
        """A scheduler that cannot write what came back."""

        sent: ClassVar[dict] = {}
        cancel = staticmethod(lambda: asked.append("cancel"))

        def __init__(self, grid):
            pass

        def send(self):
            return True

        def receive(self):
            raise RunError("the disk is full")

    monkeypatch.setattr(cluster, "require", lambda: None)
    monkeypatch.setattr(cluster, "connected", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(cluster, "_RayScheduler", Full)
    with pytest.raises(RunError, match="the disk is full"):
        cluster.run(make(tmp_path / "out"), lambda: None)
    assert asked == ["cancel"]


def test_images_that_changed_since_a_node_read_them(tmp_path):
    """By value too; a file that was written between a run's end and its return as well."""
    root = tree(tmp_path / "d", train={"a": 4, "b": 4}, test={"a": 2, "b": 2})
    mine = {"name": "folder", "root": str(root), "label": "mine"}
    tuning = {**GRID["finetune"], "data": {"workers": 0}}
    grid = make(tmp_path / "out", sources=[], targets=[mine], finetune=tuning, ray={"shared": False})
    (job,) = grid.remaining()
    outcome = cluster._do(grid, job, None, os.getcwd(), "0")
    assert outcome.done and not runs(grid.out)
    (image,) = root.glob("train/a/*0.png")
    kept = image.read_bytes()
    image.write_bytes(next(root.glob("train/b/*1.png")).read_bytes())
    cluster._RayScheduler._keep(SimpleNamespace(grid=grid), job, outcome)
    assert faults(check, grid.config, grid.plan) == [
        f"targets 'mine': its images changed since 1 run in '{grid.out}' began; name another out"
    ]
    image.write_bytes(kept)
    assert {key: counts[:3] for key, counts in check(grid.config, grid.plan).items()} == {job.key: (8, 4, 1)}


def test_states_stay_on_the_node(tmp_path):
    wanted = {"result.json", "last/images.json", "fold-1/model.json", "fold-1/last/images.json"}
    for name in (*wanted, "last/state.pt", "fold-1/last/state.pt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert cluster._files(tmp_path, "**/*") == {name: name.encode() for name in wanted}


def test_a_node_that_does_not_see_the_folder_ends_the_run(joined, tmp_path):
    grid = make(tmp_path / "out")
    (grid.out / "grid.yaml").unlink()
    (line,) = faults(cluster.run, grid, nothing)
    assert line.startswith("ray.shared: node") and str(grid.out) in line and "--ray.shared false" in line
    assert not holders(grid.out / "jobs")


# ------------------------------------------------------------------ mistakes
def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert faults(cluster.require) == [f"engine: ray needs ray; install it with: {install('ray')}"]
    assert faults(cluster.run, None, None) == faults(cluster.require)


def test_no_cluster_to_be_had():
    def init(**_):
        raise ConnectionError("Could not find\nany running Ray instance.")

    fake = SimpleNamespace(init=init)
    assert faults(cluster._join, fake, Ray(address="auto")) == [
        "ray.address: 'auto' is no cluster that can be joined (Could not find any running Ray instance.); start one "
        "with 'ray start --head', set RAY_AUTH_MODE=token where it wants one, or leave ray.address out"
    ]
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        (line,) = faults(cluster._join, None, Ray(address=address))
    assert line.startswith(f"ray.address: nobody answers at '{address}' (") and "ray start --head" in line
    assert faults(cluster._join, fake, Ray()) == [
        "engine: Ray does not start on this machine (Could not find any running Ray instance.); join a running "
        "cluster with --ray.address"
    ]


def test_jobs_that_no_node_can_take(caplog):
    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}}, {"Alive": False, "Resources": {"CPU": 64.0}}]
    fake = SimpleNamespace(nodes=lambda: nodes)

    def said():  # Ray's own may come at any time
        return [record.getMessage() for record in caplog.records if record.name == "idmm"]

    with caplog.at_level("INFO", logger="idmm"):
        cluster._check_room(fake, Ray(num_cpus=4, num_gpus=0.5))
        assert said() == ["ray: 1 nodes, 4 cores, 1 GPUs"]
        cluster._check_room(fake, Ray(num_cpus=5, address="auto", num_gpus=1))
        assert said()[-1].endswith("no node has them yet; waiting for one to join")
        cluster._check_room(fake, Ray())
        assert said()[-1].startswith("ray.num_gpus: 0, so nothing shares out the GPUs")
    (line,) = faults(cluster._check_room, fake, Ray(num_gpus=2))
    assert line == ("ray: a job takes 1 cores and 2 GPUs, and no node has them; lower --ray.num_cpus or --ray.num_gpus")
