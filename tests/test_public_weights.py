"""Public weights, timm:NAME and hf-hub:ORG/NAME, from a hub on loopback that answers as the real one does."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import timm
import torch
import yaml
from helpers import ENVIRONMENT, ROOT, flags
from safetensors.torch import load_file, save
from timm.models._hub import save_for_hf

NAME = "test_vit.r160_in1k"  # of 0.4 M parameters, trained at 160 px
ARCH, REPOSITORY = "test_vit", f"timm/{NAME}"


class Hub(ThreadingHTTPServer):
    """Repositories by name: their commits, the last one ``main``, each with its files.

    Attributes:
        asked: Method and path of every request so far.
        orders: What to do by the end of a path: {"status", "code"}, {"cut": n} bytes sent, {"flip": true} a wrong one,
            {"stall": true} no answer.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.asked, self.orders, self.over = {}, [], {}, threading.Event()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def push(self, repository, files):
        """Adds a commit; returns its name."""
        commits = self.repositories.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository}{len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def fetched(self, ending):
        return [path for method, path in self.asked if method == "GET" and path.endswith(ending)]

    def handle_error(self, request, client_address):
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body):
        self.server.asked.append((self.command, self.path))
        order = next((order for end, order in self.server.orders.items() if self.path.endswith(end)), {})
        if "stall" in order:
            self.server.over.wait()
            return None
        if "status" in order:
            return self.refuse(order["status"], order.get("code", ""))
        repository, _, place = self.path.removeprefix("/").partition("/resolve/")
        revision, _, file = place.partition("/")
        commits = self.server.repositories.get(repository)
        if commits is None:
            return self.refuse(401, "RepoNotFound")  # as the hub says to those who did not log in
        commit = list(commits)[-1] if revision == "main" else revision
        if commit not in commits:
            return self.refuse(404, "RevisionNotFound")
        content = commits[commit].get(file)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        return self.serve(content, commit, order, body, large=not file.endswith(".json"))

    def serve(self, content, commit, order, body, large):
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if start else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        if large:  # as files in git LFS
            self.send_header("X-Linked-Etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", str(order.get("cut", len(content)) - start))
        self.end_headers()
        if body:
            sent = content[start : order.get("cut", len(content))]
            self.wfile.write(sent[:-1] + bytes([sent[-1] ^ 1]) if "flip" in order else sent)


@contextlib.contextmanager
def serving():
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            hub.over.set()
            hub.shutdown()
            thread.join()


def published(folder, seed=0, **kwargs):
    """A model with weights of a seed as timm saves it for the hub, with a classifier of 1000 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(ARCH, **kwargs)
    save_for_hf(model, str(folder), safe_serialization="both")
    return model, {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return published(tmp_path_factory.mktemp("published"))[1]


@pytest.fixture
def hub(files):
    with serving() as one:
        one.push(REPOSITORY, files)
        yield one


class Machine:
    """Real command lines with a cache of their own and a hub on loopback."""

    def __init__(self, hub, folder):
        self.hub, self.folder = hub, folder
        self.cache = folder / "hf" / "hub"

    def environment(self, **more):
        own = {"HF_ENDPOINT": self.hub.endpoint, "HF_HOME": str(self.folder / "hf"), "PYTHONPATH": str(ROOT)}
        clean = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("HF_", "HUGGING"))}
        return {**clean, **own, "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **more}

    def start(self, *argv, **more):
        command = [sys.executable, "-c", "from idmm.cli import main; raise SystemExit(main())", *map(str, argv)]
        given = dict(cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return subprocess.Popen(command, env=self.environment(**more), text=True, **given)

    def run(self, *argv, **more):
        """Returns the exit code and what it said on standard error."""
        process = self.start(*argv, **more)
        _, said = process.communicate(timeout=120)
        return process.returncode, said

    def refused(self, init, **more):
        """The one line of a fine-tuning that is refused, and that leaves nothing behind."""
        code, said = self.run("finetune", *tiny("finetune", self.folder / "refused", init), **more)
        assert code == 2 and "Traceback" not in said and not (self.folder / "refused").exists(), said
        fetching, *lines = said.splitlines() if "comes from" in said else ["", *said.splitlines()]
        assert len(lines) == 1, said
        return lines[0].replace(self.hub.endpoint, "HUB").replace(str(self.cache), "CACHE")


@pytest.fixture
def machine(hub, tmp_path):
    return Machine(hub, tmp_path)


def tiny(stage, out, init, **changes):
    """Flags of a run that starts from weights, which say what the model is."""
    short = {"train__epochs": 1, "data__subset": {"total": 40}} if stage == "pretrain" else {"train__epochs": 1}
    if stage == "finetune":
        short |= {"stages": [{"size": 32}], "data__subset": {"per_class": 3}}
    return flags(stage, out, **{"init": init, "model__name": None, "model__kwargs": None, **short, **changes})


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def config(run):
    return yaml.safe_load((run / "config.yaml").read_text())


# ------------------------------------------------------------------ from the hub to a run
@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    """A run fine-tuned from timm:NAME, with its machine and what it said; the hub is gone."""
    with serving() as hub:
        commit = hub.push(REPOSITORY, files)
        machine = Machine(hub, tmp_path_factory.mktemp("tuned"))
        code, said = machine.run("finetune", *tiny("finetune", machine.folder / "b", f"timm:{NAME}"))
        assert code == 0, said
    return machine, commit, said


def test_finetune_from_timm(tuned, files, tmp_path):
    """The model, its channels' statistics and its commit come from timm and the hub; the classifier is a new one."""
    machine, commit, said = tuned
    run = machine.folder / "b"
    assert config(run)["init"] == f"timm:{NAME}@{commit}"
    assert config(run)["model"]["name"] == ARCH and config(run)["data"]["mean"] == [0.5] * 3
    assert "77 weights kept, 1 resized, 2 dropped" in said and "licence" in said
    assert len(machine.hub.fetched("model.safetensors")) == 1 and not machine.hub.fetched("config.json")
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    weights = load_file(tmp_path / "model.safetensors")
    tuned_ones = load_file(run / "backbone.safetensors")
    assert tuned_ones.keys() == weights.keys() - {"head.weight", "head.bias"}
    change = (tuned_ones["blocks.0.mlp.fc1.weight"] - weights["blocks.0.mlp.fc1.weight"]).abs().max()
    assert 0 < change < 0.05, "two steps from them"


def test_again_without_the_hub(tuned):
    """What is in the cache serves a new run, a resumed and a finished one where no hub answers."""
    machine, commit, _ = tuned
    code, said = machine.run("finetune", *tiny("finetune", machine.folder / "c", f"timm:{NAME}"))
    assert code == 0 and "is taken from the cache" in said, said
    assert config(machine.folder / "c")["init"] == f"timm:{NAME}@{commit}"
    code, said = machine.run("finetune", *tiny("finetune", machine.folder / "c", f"timm:{NAME}"), **OFFLINE)
    assert code == 0 and "finished already" in said and "cache" not in said
    code, said = machine.run(
        "probe", "--init", f"timm:{NAME}", "--size", 32, "--data.subset", "{per_class: 5}", **OFFLINE
    )
    assert code == 0 and "linear probe" in said, said


def test_pretrain_goes_on_with_the_commit_that_it_began_with(hub, machine, tmp_path, files):
    """From a repository of one's own; when that changes, a stopped run does not, and a new run starts from the new."""
    first = hub.push("me/net", files)
    out, argv = machine.folder / "a", tiny("pretrain", machine.folder / "a", "hf-hub:me/net", train__epochs=4)
    process = machine.start("pretrain", *argv)
    for line in process.stderr:
        if "epoch 1/4" in line:
            process.terminate()
    assert process.wait(60) == 130
    assert config(out)["init"] == f"hf-hub:me/net@{first}"
    (tmp_path / "other").mkdir()
    second = hub.push("me/net", published(tmp_path / "other", seed=1)[1])
    hub.asked.clear()
    code, said = machine.run("pretrain", *argv)
    assert code == 0 and "epoch 4/4" in said and not hub.asked, said
    new = tiny("pretrain", machine.folder / "new", "hf-hub:me/net")
    code, said = machine.run("pretrain", *new)
    assert code == 0 and config(machine.folder / "new")["init"] == f"hf-hub:me/net@{second}", said
    old = tiny("pretrain", machine.folder / "old", f"hf-hub:me/net@{first}")
    hub.asked.clear()
    assert machine.run("pretrain", *old)[0] == 0 and not hub.asked


def test_what_idmm_exports_is_started_from(tuned, machine, hub, tmp_path):
    """A run's own folder for the hub, of another size and of weights without safetensors."""
    run = tuned[0].folder / "b"
    code, said = machine.run("export", "--init", run, "--format", "hf", "--out", tmp_path / "export")
    assert code == 0, said
    exported = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    state = load_file(tmp_path / "export" / "model.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    exported["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    del exported["model.safetensors"]
    hub.push("me/tuned", exported)
    code, said = machine.run(
        "embed", "--init", "hf-hub:me/tuned", ROOT / "docs" / "images", "--out", tmp_path / "f.npz"
    )
    assert code == 0, said


def test_two_processes_fetch_once(hub, machine):
    """As those of one run, and the workers of a grid: the second waits for the first."""
    read = "from idmm.models import read_checkpoint; read_checkpoint('timm:%s')" % NAME
    own = [{**machine.environment(), "RANK": str(rank)} for rank in range(2)]
    both = [subprocess.Popen([sys.executable, "-c", read], env=one, cwd=machine.folder) for one in own]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(hub.fetched("model.safetensors")) == 1


# ------------------------------------------------------------------ the grid
def grid(path, **changes):
    data = {"data": {"subset": {"per_class": 3}, "workers": 0}}
    train = {"train": {"epochs": 1, "size": 32, "batch_size": 20, "lr": 1e-3, "precision": "fp32", "device": "cpu"}}
    keys = {
        "targets": ["digits"], "backbones": [{"name": ARCH, "label": "tiny"}], "scratch": False, "seeds": [0, 1],
        "weights": [{"label": "public", "path": f"timm:{NAME}"}], "finetune": {**data, **train}, **changes,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(keys))
    return path


def test_grid_with_public_weights(hub, machine, files, tmp_path):
    """Fetched once for two workers; the cells stay when only the repository's texts change, not when its weights do."""
    first = list(hub.repositories[REPOSITORY])[0]
    argv = ["transfer", "--config", grid(tmp_path / "grid.yaml"), "--out", tmp_path / "grid"]
    code, said = machine.run(*argv, "--workers", 2)
    assert code == 0, said
    assert len(hub.fetched("model.safetensors")) == 1
    (entry,) = yaml.safe_load((tmp_path / "grid" / "grid.yaml").read_text())["weights"]
    assert entry["given"] == f"timm:{NAME}" and entry["path"] == f"timm:{NAME}@{first}"

    def runs():
        return {path.parent.name for path in (tmp_path / "grid" / "runs").glob("*/*/result.json")}

    before = runs()
    assert len(before) == 2
    hub.asked.clear()
    assert machine.run("transfer", "status", tmp_path / "grid", **OFFLINE)[0] == 0
    assert machine.run(*argv, **OFFLINE)[0] == 0 and not hub.asked and runs() == before
    hub.push(REPOSITORY, {**files, "README.md": b"other words"})
    assert machine.run(*argv)[0] == 0 and runs() == before, "the weights are the same"
    (tmp_path / "other").mkdir()
    hub.push(REPOSITORY, published(tmp_path / "other", seed=1)[1])
    assert machine.run(*argv)[0] == 0 and runs() > before and len(runs()) == 4
