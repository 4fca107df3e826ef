"""Public weights, timm:NAME and hf-hub:ORG/NAME, from a hub on loopback that answers as the real one does."""

import hashlib
import subprocess
import sys
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest
import timm
import torch
import yaml
from helpers import ENVIRONMENT, ROOT, call, flags, refused
from huggingface_hub import constants
from loopback import Server
from PIL import Image
from safetensors.torch import load_file
from timm.models._hub import save_for_hf

from idmm.models import read_checkpoint
from idmm.models.build import pair
from idmm.models.hub import public_weights

NAME = "test_vit.r160_in1k"  # of 0.4 M parameters, trained at 160 px
ARCH, REPOSITORY = "test_vit", f"timm/{NAME}"


class Hub(Server):
    """Repositories by name: their commits, the last one ``main``, each with its files.

    Attributes:
        asked: Method and path of every request so far.
        gated: Whether files of weights are refused.
    """

    def __init__(self):
        super().__init__(_Handler)
        self.repositories, self.gated = {}, False
        self.endpoint = self.url("")

    def push(self, repository, files):
        """Adds a commit; returns its name."""
        commits = self.repositories.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository}{len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def fetched(self, ending):
        return [path for method, path in self.asked if method == "GET" and path.endswith(ending)]


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
        if self.server.gated:
            return self.refuse(403, "GatedRepo")
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
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
        return None


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
    with Hub.running() as one:
        one.push(REPOSITORY, files)
        yield one


def elsewhere(hub, folder, *argv, **more):
    """A real command line with a cache of its own in a folder; returns the exit code and its standard error."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    clean = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("HF_", "HUGGING"))}
    command = [sys.executable, "-c", "from idmm.cli import main; raise SystemExit(main())", *map(str, argv)]
    environment = {**clean, **own, "HF_HUB_DISABLE_TELEMETRY": "1", **more}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stderr


@pytest.fixture
def here(hub, tmp_path, monkeypatch):
    """This process with the hub and a cache of its own, which it otherwise learns when it is started."""
    template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    own = {"ENDPOINT": hub.endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path / "cache")}
    for name, value in {**own, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(constants, name, value)
    for name in ("ENDPOINT", "HUB_CACHE"):  # of processes that are started
        monkeypatch.setenv(f"HF_{name}", own.get(name, own["HF_HUB_CACHE"]))
    public_weights.cache_clear()
    yield tmp_path
    public_weights.cache_clear()


@pytest.fixture
def said(here, hub, capsys):
    """Returns the one line with which a fine-tuning is refused that leaves nothing behind."""

    def refused_line(init, *more):
        public_weights.cache_clear()
        out = here / "refused"
        (line,) = refused(capsys, ["finetune", *tiny("finetune", out, init), *more])
        assert not out.exists()
        return line.replace(hub.endpoint, "HUB").replace(str(here / "cache"), "CACHE")

    return refused_line


def tiny(stage, out, init, **changes):
    """Flags of a run that starts from weights, which say what the model is."""
    short = {"train__epochs": 1, "data__subset": {"total": 40}} if stage == "pretrain" else {"train__epochs": 1}
    if stage == "finetune":
        short |= {"stages": [{"size": 32}], "data__subset": {"per_class": 3}}
    return flags(stage, out, **{"init": init, "model__name": None, "model__kwargs": None, **short, **changes})


def config(run):
    return yaml.safe_load((run / "config.yaml").read_text())


# ------------------------------------------------------------------ from the hub to a run
@pytest.fixture(scope="module")
def tuned(files, tmp_path_factory):
    """A run fine-tuned from timm:NAME, its hub, which is gone, and what it said."""
    folder = tmp_path_factory.mktemp("tuned")
    with Hub.running() as hub:
        commit = hub.push(REPOSITORY, files)
        code, said = elsewhere(hub, folder, "finetune", *tiny("finetune", folder / "b", f"timm:{NAME}"))
        assert code == 0, said
    return folder / "b", hub, commit, said


def test_finetune_from_timm(tuned, files, tmp_path):
    """The model, its channels' statistics and its commit come from timm and the hub; the classifier is a new one."""
    run, hub, commit, said = tuned
    assert config(run)["init"] == f"timm:{NAME}@{commit}"
    assert config(run)["model"]["name"] == ARCH and config(run)["data"]["mean"] == [0.5] * 3
    assert "77 weights kept, 1 resized, 2 dropped" in said
    assert len(hub.fetched("model.safetensors")) == 1 and not hub.fetched("config.json")
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    weights = load_file(tmp_path / "model.safetensors")
    tuned_ones = load_file(run / "backbone.safetensors")
    assert tuned_ones.keys() == weights.keys() - {"head.weight", "head.bias"}
    change = (tuned_ones["blocks.0.mlp.fc1.weight"] - weights["blocks.0.mlp.fc1.weight"]).abs().max()
    assert 0 < change < 0.05, "two steps from them"


def test_again_without_the_hub(tuned):
    """What is in the cache serves another command that is told to ask no hub."""
    run, hub, commit, _ = tuned
    argv = ["--init", f"timm:{NAME}", "--size", 32, "--data.subset", "{per_class: 5}"]
    code, said = elsewhere(hub, run.parent, "probe", *argv, HF_HUB_OFFLINE="1")
    assert code == 0 and f"{commit}: 77 weights kept, 1 resized, 2 dropped, 0 fresh" in said, said


def test_pretrain_goes_on_with_the_commit_that_it_began_with(here, hub, files):
    """From a repository of one's own; when that changes, a run that stopped does not, and a new run starts from it."""

    def pretrained(name, init="hf-hub:me/net"):
        public_weights.cache_clear()
        hub.asked.clear()
        assert call(["pretrain", *tiny("pretrain", here / name, init)]) == 0
        return config(here / name)["init"].rpartition("@")[2]

    assert pretrained("d", f"timm:{ARCH}") == list(hub.repositories[REPOSITORY])[0]
    assert config(here / "d")["init"].startswith(f"timm:{NAME}@"), "timm's default tag may be another one tomorrow"
    (here / "d" / "result.json").unlink()
    assert pretrained("d", f"timm:{ARCH}") and not hub.asked
    first = hub.push("me/net", files)
    assert pretrained("a") == first and hub.asked
    (here / "other").mkdir()
    second = hub.push("me/net", published(here / "other", seed=1)[1])
    (here / "a" / "result.json").unlink()
    assert pretrained("a") == first and not hub.asked
    assert pretrained("b") == second
    assert pretrained("c", f"hf-hub:me/net@{first}") == first and not hub.asked


def test_what_idmm_exports_is_started_from(tuned, here, hub, tmp_path):
    """A run's own folder for the hub, its weights not as safetensors; with the commands that want a backbone."""
    run = tuned[0]
    assert call(["export", "--init", run, "--format", "hf", "--out", tmp_path / "export"]) == 0
    exported = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
    state = load_file(tmp_path / "export" / "model.safetensors")
    torch.save(state, tmp_path / "pytorch_model.bin")
    exported["pytorch_model.bin"] = (tmp_path / "pytorch_model.bin").read_bytes()
    del exported["model.safetensors"]
    hub.push("me/tuned", exported)
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for value in range(3):
        Image.new("RGB", (40, 40), (80 * value, 10, 10)).save(pictures / f"{value}.png")
    found = []
    for init in (run, "hf-hub:me/tuned"):
        assert call(["embed", "--init", init, pictures, "--out", tmp_path / "f.npz"]) == 0
        found.append(np.load(tmp_path / "f.npz")["features"])
        (tmp_path / "f.npz").unlink()
    np.testing.assert_array_equal(*found)
    saved, ours = read_checkpoint("hf-hub:me/tuned"), read_checkpoint(run)
    for name in ("mean", "std", "crop_pct", "interpolation"):
        assert getattr(saved, name) == getattr(ours, name)
    assert pair(saved.img_size) == pair(ours.img_size) == (32, 32)


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


def test_grid_with_public_weights(here, hub, files, monkeypatch):
    """Fetched once; the cells stay when only the repository's texts change, not when its weights do."""
    first, out = list(hub.repositories[REPOSITORY])[0], here / "grid"

    def filled(*more):
        public_weights.cache_clear()
        hub.asked.clear()
        assert call(["transfer", "--config", grid(here / "grid.yaml"), "--out", out, *more]) == 0
        return {path.parent.name for path in out.glob("runs/*/*/result.json")}

    before = filled()
    assert len(before) == 2 and len(hub.fetched("model.safetensors")) == 1
    starts = {yaml.safe_load(path.read_text())["init"] for path in out.glob("runs/*/*/config.yaml")}
    assert starts == {f"timm:{NAME}@{first}"}
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert filled() == before and not hub.asked
    public_weights.cache_clear()
    assert call(["transfer", "status", out]) == 0 and not hub.asked
    hub.push(REPOSITORY, {**files, "README.md": b"other words"})
    assert filled() == before
    (here / "other").mkdir()
    hub.push(REPOSITORY, published(here / "other", seed=1)[1])
    assert filled() > before and len(filled()) == 4


def test_faults_of_a_grids_weights(here, capsys):
    """With the entry's label, beside the grid's other faults."""
    paths = {"a": "timm:test_vitt", "b": "hf_hub:me/net", "c": "hf-hub:net"}
    entries = [{"label": label, "path": path} for label, path in paths.items()]
    argv = ["transfer", "--config", grid(here / "grid.yaml", weights=entries), "--out", here / "grid"]
    assert refused(capsys, argv) == [
        "weights 'a': path: 'timm:test_vitt' is not among timm's weights on the hub; did you mean 'test_vit'?",
        "weights 'b': path is 'hf_hub:me/net', wanted a run folder or a file of weights that is there",
        "weights 'c': path: 'hf-hub:net' is no name of public weights; wanted timm:NAME or hf-hub:ORG/NAME, "
        "with a revision after @ if need be",
    ]
    assert not (here / "grid").exists()


# ------------------------------------------------------------------ what is refused
NAMES = {
    "timm:test_vitt.r160_in1k": "is not among timm's weights on the hub; did you mean 'test_vit.r160_in1k'?",
    "timm:cvt_13": "is not among timm's weights on the hub",
    "timm:": "is no name of public weights; wanted timm:NAME or hf-hub:ORG/NAME",
    "timm/test_vit": "does not exist; give a run folder",
    "hf-hub:me/nothing": "cannot be fetched from 'me/nothing' on HUB: no such repository, or a private one",
    "hf-hub:me/net@v2": "cannot be fetched from 'me/net' on HUB: no such branch, tag or commit",
    "hf-hub:me/empty": "it has no model.safetensors and no pytorch_model.bin with a config.json",
    "hf-hub:me/bare": "it has no model.safetensors and no pytorch_model.bin with a config.json",
    "hf-hub:me/bert": "is not in timm's format: config.json of 'me/bert' names no model of timm",
    "hf-hub:me/torn": "is not in timm's format: config.json of 'me/torn' names no model of timm",
    "hf-hub:me/other": "does not fit the model that it is said to be of: AssertionError",
}


def test_names_that_are_refused(said, hub, files):
    """Each with a line that says what is wanted."""
    weights = {"model.safetensors": files["model.safetensors"]}
    hub.push("me/net", files)
    hub.push("me/empty", {"README.md": b""})
    hub.push("me/bare", weights)
    hub.push("me/bert", {**weights, "config.json": b'{"architectures": ["BertModel"], "model_type": "bert"}'})
    hub.push("me/torn", {**weights, "config.json": b'{"architecture": '})
    hub.push("me/other", {**weights, "config.json": files["config.json"].replace(b"test_vit", b"test_vit2")})
    for init, wanted in NAMES.items():
        line = said(init)
        assert line.startswith(f"init: '{init.replace('//', '/')}' ") and wanted in line, line


def test_gated_and_offline(said, hub, monkeypatch):
    hub.gated = True
    assert f"cannot be fetched from '{REPOSITORY}' on HUB: accept its terms there" in said(f"timm:{NAME}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert "it is not in the cache, and the hub is out of reach" in said(f"timm:{NAME}") and len(hub.asked) == asked


def test_contradictions_and_classifiers(said, here, capsys):
    """As with files: the weights say what the model is, and have no classifier of the user's classes."""
    line = said(f"timm:{NAME}", "--model.name", "vit_tiny_patch16_224")
    assert line.startswith("model.name: 'vit_tiny_patch16_224', but 'timm:test_vit.r160_in1k@")
    Image.new("RGB", (40, 40)).save(here / "a.png")
    (line,) = refused(capsys, ["predict", "--init", f"timm:{NAME}", here / "a.png"])
    assert "has no classifier of your classes; fine-tune it on labelled images first: idmm finetune" in line
    (line,) = refused(capsys, ["export", "--init", f"timm:{NAME}", "--format", "hf", "--out", here / "e"])
    assert "is no finished run" in line
