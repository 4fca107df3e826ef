"""A built wheel: every module, the recipes, and the command line from a folder that is no
checkout."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest
import yaml
from helpers import ROOT, real

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
