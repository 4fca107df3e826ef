"""A built wheel: every module, the recipes, and the command line from a folder that is no
checkout."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from helpers import ENVIRONMENT, ROOT, real

SOURCES = ["setup.cfg", "pyproject.toml", "README.md", "LICENSE", "idmm", "configs"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's content, built from a copy of the sources without their version
    control."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "source" / name)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
    ]
    done = subprocess.run([*words, folder / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def ran(installed, folder, *argv):
    """Runs ``idmm`` with the wheel's content first on the path, from another folder; returns its
    standard output."""
    done = real(*argv, cwd=folder, env={**os.environ, "PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder, *kinds):
    return {str(path.relative_to(folder)) for kind in kinds for path in folder.rglob(f"*{kind}")}


def test_a_wheel_holds_every_file_of_the_package_and_the_recipes(installed):
    kinds = (".py", ".yaml", ".txt", ".j2", ".css", ".js", ".sh")
    expected = files(ROOT / "idmm", *kinds) | {
        f"configs/{name}" for name in files(ROOT / "configs", ".yaml", ".sh")
    }
    assert files(installed / "idmm", *kinds) == expected


def test_recipes_go_by_their_names_in_an_installed_package(installed, tmp_path):
    text = ran(installed, tmp_path, "pretrain", "--config", "idmm_fast", "--print_config")
    assert yaml.safe_load(text)["method"]["classifier"] == "cosine"
    text = ran(
        installed, tmp_path, "transfer", "--config", "table5", "--out", "o", "--print_config"
    )
    assert yaml.safe_load(text)["finetune"] == {"config": "paper"}
    listed = ran(installed, tmp_path, "configs").splitlines()
    assert any(line.split()[:2] == ["idmm_fast", "IDMM"] for line in listed)


API = """
import os
import sys
import numpy as np
import torch
from PIL import Image
import idmm

folder = sys.argv[1]
digits = {"name": "digits", "subset": {"per_class": 2}, "workers": 0}
vit = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
model = {"name": "vit_tiny_patch16_224", "kwargs": vit}
quick = {"epochs": 1, "batch_size": 20, "precision": "fp32", "device": "cpu"}
views = {"size": 16}
run = {"data": digits, "model": model, "views": views, "train": quick, "out": f"{folder}/a"}
idmm.pretrain(run)
tuned = {"data": digits, "init": f"{folder}/a", "out": f"{folder}/b"}
assert idmm.finetune({**tuned, "train": {**quick, "size": 16}})["test_size"] == 360
probe = {"data": digits, "init": f"{folder}/a", "size": 16, "out": f"{folder}/c"}
assert "top1" in idmm.probe(probe)
settings = {"train": {**quick, "size": 16}}
grid = {"targets": [digits], "backbones": [model], "finetune": settings, "out": f"{folder}/grid"}
cells = idmm.transfer(grid)["cells"]
assert [cell["status"] for cell in cells] == ["ok"], cells
images = np.zeros((3, 16, 16), np.uint8)
assert len(idmm.load_classifier(f"{folder}/b").predict(list(images))) == 3
assert idmm.embed(f"{folder}/a", list(images)).shape == (3, 32)
assert idmm.load_backbone(f"{folder}/a", img_size=24)(torch.zeros(2, 3, 24, 24)).shape == (2, 32)
rows = torch.randn(5, 4)
target = torch.tensor([0, 1])
loss = idmm.losses.instance_discrimination_loss(
    torch.randn(2, 4), rows, target, mixed_target=target.flip(0), lam=0.6, smoothing=0.1,
    chunk_size=2, bias=torch.zeros(5),
)
assert loss.shape == ()
localization = idmm.losses.DenseRelativeLocalization(
    4, mode="l1", num_pairs=8, hidden_dim=16, grid_size=3
)
assert localization(torch.randn(2, 4, 3, 3)).shape == ()
backbone = idmm.models.create_backbone("t2t_vit_7", img_size=32, num_classes=0)
assert idmm.models.token_grid(backbone, torch.zeros(1, 3, 32, 32)).shape[2:] == (2, 2)
spec = idmm.data.DATASETS["flowers"]
assert (spec.num_classes, spec.train_size, spec.test_size) == (102, 2040, 6149)
train = {"data": digits, "model": model, "minutes": 0.1, "out": f"{folder}/x"}
result = idmm.train(train)["result"]
assert result["test_size"] == 360
os.mkdir(f"{folder}/images")
for i, image in enumerate(images + np.arange(3, dtype=np.uint8)[:, None, None]):
    Image.fromarray(image).save(f"{folder}/images/{i}.png")
labels = {"data": {"root": f"{folder}/images"}, "count": 2, "out": f"{folder}/labels"}
assert len(idmm.suggest(labels)["to_label"]) == 2
print(idmm.__file__)
"""


@pytest.mark.slow
def test_the_whole_api_works_from_an_installed_wheel(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", API, tmp_path],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(installed / "idmm/__init__.py")
