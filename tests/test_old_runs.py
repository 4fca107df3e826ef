"""Runs that 0.1.0 wrote still load, go on and are fine-tuned, and jobs of its grids keep their keys."""

import json
import shutil
import tarfile

import pytest
import torch
import yaml
from helpers import ROOT, TINY, inside, metrics

import idmm
from idmm.config import NEW_KEYS
from idmm.config.parsing import build, flatten
from idmm.seeding import seeded
from idmm.transfer.config import GridConfig
from idmm.transfer.plan import GridPlan

ARCHIVE = ROOT / "tests/data/runs_0_1_0.tar.gz"  # what make() left when it ran under 0.1.0
VIT = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
COMMON = {key.replace(".", "__"): value for key, value in {**TINY, "model.kwargs": VIT}.items()}
PRETRAIN = {
    **COMMON, "train__accumulate": 2, "train__monitor_every": 1, "views__size": 16,
    "views__crops": [{"count": 2, "scale": [0.14, 1.0]}, {"count": 1, "scale": [0.05, 0.4]}],
    "method__classifier": "cosine", "method__classifier_init": "features", "method__classifier_lr_scale": 10,
}  # fmt: skip
FINETUNE = {
    **COMMON, "train__epochs": 2, "train__ema": 0.9, "train__eval_every": 1,
    "drloc__weight": 0.1, "drloc__hidden_dim": 8,
    "stages": [{"size": 16}, {"size": 20, "lr": 0.001, "batch_size": 24}],
}  # fmt: skip
FROM_WEIGHTS = {**FINETUNE, "model__name": None, "model__kwargs": None, "train__epochs": 1, "drloc__weight": 0}
FRESH = {"train__classifier_init": "random"}  # 0.1.0 knew no other, and no such key
STEPS = {"pretrain": (1, 1, 2), "finetune": (2, 0, 2)}  # stage, epoch and step at which the archive's runs stopped
# Of the same commands under 0.1.0, never stopped: the loss of every epoch, then what the images came to. Fine-tuning
# draws its crops as pretraining does since: what comes after the archive's two epochs is of the first such version.
LOSSES = {
    "pretrain": [11.303270975748697, 11.656316121419271, 10.503156661987305],
    "finetune": [2.3313633600870767, 2.3146352767944336, 2.314790725708008, 2.3132406870524087],
    "from weights": [2.2997970581054688, 2.286409378051758],
}
FEATURES = 48.62455368041992  # sum of absolute values over make_images()
GRID = {
    "sources": ["digits"], "targets": ["digits"], "backbones": [{"name": "vit_tiny_patch16_224", "kwargs": VIT}],
    "scratch": True, "out": "grid", "pretrain": {"views": {"size": 16}},
    "finetune": {"train": {"epochs": 1, "size": 16}},
}  # fmt: skip
KEYS = {"finetune": ["f980182c096c"], "probe": ["b5dd65bf533e"]}


def make(folder, monkeypatch):
    """Writes the archive and prints the figures above; call it from a test, under the version in question."""
    from test_resume import stop_at

    inside("pretrain", folder / "finished", **PRETRAIN)
    inside("finetune", folder / "whole", **FINETUNE)
    inside("finetune", folder / "tuned", **FROM_WEIGHTS, init=str(folder / "finished"))
    for stage, changes in (("pretrain", PRETRAIN), ("finetune", FINETUNE)):
        stop_at(monkeypatch, *STEPS[stage])
        assert inside(stage, folder / stage, **changes) == 130
        monkeypatch.undo()
    (folder / "finished/last/state.pt").unlink()
    with tarfile.open(ARCHIVE, "w:gz", compresslevel=9) as archive:
        for name in ("finished", "pretrain", "finetune"):
            (folder / name / "last/lock").unlink()
            archive.add(folder / name, name)
    for name in ("finished", "whole", "tuned"):
        print([record["loss"] for record in metrics(folder / name)])
    print(features(folder / "finished"), keys())


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The archive's runs; not to be written to."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def features(run):
    model = idmm.load_backbone(run)
    with seeded(0), torch.no_grad():
        return float(model.eval()(torch.rand(4, 3, 16, 16)).abs().sum())


def keys():
    found = {}
    for protocol in ("finetune", "probe"):
        jobs = GridPlan(build(GridConfig, {**GRID, "target": {"protocol": protocol}})).checked().jobs.values()
        found[protocol] = [job.key for job in jobs if job.stage == protocol and job.needs is None]
    return found


@pytest.mark.parametrize(("stage", "changes"), [("pretrain", PRETRAIN), ("finetune", FINETUNE)])
def test_an_interrupted_run_goes_on(stage, changes, old, tmp_path):
    run = shutil.copytree(old / stage, tmp_path / "run")
    assert (run / "last/state.pt").exists() and not (run / "result.json").exists()
    assert not NEW_KEYS.keys() & flatten(yaml.safe_load((run / "config.yaml").read_text())).keys()
    assert inside(stage, run, **changes, resume="must") == 0
    assert [record["loss"] for record in metrics(run)] == pytest.approx(LOSSES[stage], rel=1e-6)
    assert json.loads((run / "result.json").read_text())["train_size"] == 96


def test_a_finished_run_loads_and_is_fine_tuned(old, tmp_path):
    assert features(old / "finished") == pytest.approx(FEATURES, rel=1e-5)
    assert inside("finetune", tmp_path / "run", **FROM_WEIGHTS, **FRESH, init=str(old / "finished")) == 0
    losses = [record["loss"] for record in metrics(tmp_path / "run")]
    assert losses == pytest.approx(LOSSES["from weights"], rel=1e-6)


def test_a_finished_run_says_so(old, tmp_path, capsys):
    run = shutil.copytree(old / "finished", tmp_path / "run")
    before = (run / "result.json").read_text()
    assert inside("pretrain", run, **PRETRAIN) == 0
    assert "finished already, nothing to do" in capsys.readouterr().err
    assert (run / "result.json").read_text() == before


def test_keys_of_jobs_stay():
    """Else a grid that was begun would begin again. Those of pretrainings depend on every field of method and views."""
    assert keys() == KEYS
