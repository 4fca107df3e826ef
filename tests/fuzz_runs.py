"""Damaged run folders and inputs of ``idmm export``: commands on finished runs, and resumes."""

import functools
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from folders import tree
from fuzz import Case, damaged, family, pick, replace, spoil, strange
from helpers import call_ok, flags

FILES = (
    "config.yaml",
    "metrics.jsonl",
    "result.json",
    "backbone.json",
    "backbone.safetensors",
    "model.json",
    "model.safetensors",
    "predictions.csv",
    "per_class.csv",
    "last/images.json",
    "last/start.json",
    "last/state.pt",
)
READ = {  # what a command reads. Others are damaged, too, and must not matter
    "report": (
        "result.json",
        "metrics.jsonl",
        "per_class.csv",
        "predictions.csv",
    ),
    "predict": ("model.json", "model.safetensors"),
    "export": ("model.json", "model.safetensors", "result.json"),
    "explore": ("config.yaml", "backbone.json", "backbone.safetensors"),
    "embed": ("backbone.json", "backbone.safetensors"),
    "resume": (
        "config.yaml",
        "last/images.json",
        "last/state.pt",
        "metrics.jsonl",
    ),
}
KINDS = "damaged cut empty folder gone utf16 value value value other"
RUN = {
    "data.name": "folder",
    "data.subset": None,
    "model.name": "resnet10t",
    "train.eval_every": 1,
    "stages": None,
    "model.kwargs": {"channels": [4, 4, 4, 4]},
    "train.size": 16,
    "train.epochs": 2,
    "train.warmup_epochs": 0,
    "train.batch_size": 8,
    "train.ema": None,
    "model.drop_path": 0.0,
    "data.cache": "off",
    "train.classifier_init": "features",
}


@functools.cache
def template():
    """Return a folder with images, a finished run and one that was stopped before its result."""
    root = Path(tempfile.mkdtemp(prefix="idmm-fuzz-runs-"))
    tree(root / "d", train={"a": 5, "b": 5}, test={"a": 2, "b": 2})
    call_ok(["finetune", *argv_of(root, "run")])
    return root


def argv_of(root, name):
    return flags("finetune", root / name, **RUN, **{"data.root": root / "d"})


def copied(folder):
    """Return a copy of the template's run and images. The run's config names the copy's images."""
    root = template()
    for name in ("d", "run"):
        shutil.copytree(root / name, folder / name)
    config = folder / "run/config.yaml"
    config.write_text(config.read_text().replace(str(root), str(folder)))
    return folder / "run"


def damage(path, rng):
    """Damage a file of a run in one of many ways."""
    content = path.read_bytes()
    kind = pick(rng, KINDS)
    if kind == "value" and path.suffix in (".json", ".jsonl", ".safetensors"):
        spoil_content(path, rng)
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "gone":
        path.unlink()
    elif kind == "other":
        others = [other for other in path.parent.iterdir() if other.is_file()]
        replace(path, pick(rng, others).read_bytes())
    elif kind == "cut":
        replace(path, content[: int(rng.integers(len(content) + 1))])
    elif kind == "empty":
        replace(path, b"")
    elif kind == "utf16":
        replace(path, content.decode("utf-8", "replace").encode("utf-16"))
    else:
        replace(path, damaged(content, rng))


def spoil_content(path, rng):
    """Change a value of a JSON file, or the shape or type of a tensor."""
    if path.suffix == ".safetensors":
        tensors = safetensors.torch.load_file(path)
        name = pick(rng, sorted(tensors))
        value = tensors.pop(name)
        strange_value = pick(
            rng,
            [
                value[..., None],
                torch.zeros(0),
                value.flatten()[:1],
                value.double(),
                value / 0,
                torch.zeros(3, 5, dtype=torch.int8),
                None,
            ],
        )
        if strange_value is not None:
            tensors[name] = strange_value
        safetensors.torch.save_file(tensors, path)
        return
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = int(rng.integers(len(lines)))
    value = json.loads(lines[number])
    if rng.random() < 0.1:
        value = strange(rng)
    else:
        spoil(value, rng)
    lines[number] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


@family(650)
def run_folder(folder, rng):
    """One damaged file of a run, then a command that reads the run."""
    run = copied(folder)
    files = [name for name in FILES if (run / name).is_file()]
    command = pick(rng, "report predict export explore embed resume resume")
    if command == "resume" and rng.random() < 0.7:
        (run / "result.json").unlink()
        files.remove("result.json")
    if rng.random() < 0.7:
        files = READ[command]
    damage(run / pick(rng, files), rng)
    if command == "resume":
        return Case(["finetune", *argv_of(folder, "run")])
    if command in ("report", "explore"):
        return Case([command, run, "--out", folder / "out"])
    return reading(command, run, folder, rng)


def reading(command, init, folder, rng, out=None):
    """Return the case of a command that takes an init; ``out`` is for an export."""
    if command == "export":
        out = out or folder / "out"
        return Case(
            [
                "export",
                "--init",
                init,
                "--format",
                pick(rng, "timm hf"),
                "--out",
                out,
            ],
            [out],
        )
    out = folder / {"predict": "p.csv", "embed": "f.npz"}[command]
    return Case([command, "--init", init, folder / "d/test", "--out", out], [out])


class Planted:
    """A pickle that would write a file if it were executed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@family(350)
def export_input(folder, rng):
    """An init that is no run, a checkpoint that is none, or an out that cannot be written."""
    run = copied(folder)
    init = run
    out = None
    planted = folder / "planted"
    kind = pick(rng, "pickle weights init out json")
    if kind == "pickle":
        init = folder / f"weights{pick(rng, '.pt .pth .bin .ckpt .tar')}"
        content = {
            "state_dict": {"a": torch.zeros(2)},
            "more": Planted(planted),
        }
        torch.save(content, init) if rng.random() < 0.5 else init.write_bytes(pickle.dumps(content))
        shutil.copy(run / "model.json", init.with_suffix(".json"))
    elif kind == "weights":
        init = folder / f"weights{pick(rng, ['.safetensors', '.pt', '.jpg', ''])}"
        content = (run / "model.safetensors").read_bytes()
        init.write_bytes(pick(rng, [b"", rng.bytes(300), damaged(content, rng)]))
        shutil.copy(run / "model.json", init.with_suffix(".json"))
    elif kind == "init":
        places = [
            folder / "gone",
            folder / "d",
            folder,
            run / "last",
            run / "model.json",
        ]
        init = pick(rng, [*places, "timm:x", "/dev/null"])
    elif kind == "json":
        spoil_content(run / pick(rng, "model.json backbone.json"), rng)
    else:
        file = run / "model.json"
        out = pick(rng, [run, folder / "d", file, file / "x", folder / ("x" * 300)])
    command = pick(rng, "export predict embed finetune")
    if kind == "out":
        case = reading("export", init, folder, rng, out)
        case.absent = []  # it may be there before
    elif command == "finetune":
        case = Case(["finetune", *argv_of(folder, "new"), "--init", init])
    else:
        case = reading(command, init, folder, rng)
    case.absent.append(planted)
    return case
