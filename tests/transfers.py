"""Tiny transfer grids for tests: their keys, their runs in this process, in others, or made up."""

import json
import time
from pathlib import Path

import yaml
from helpers import ROOT, VIT, Forked, call, read

from idmm.report import grid_pictures

GRID = {
    "sources": [
        "digits",
        {"name": "digits", "label": "few", "subset": {"total": 60}},
    ],
    "targets": [
        "digits",
        {"name": "digits", "label": "other", "subset": {"per_class": 2}},
    ],
    "methods": ["idmm"],
    "backbones": [{"name": "vit_tiny_patch16_224", "label": "tiny", "kwargs": VIT}],
    "seeds": [3],
    "pretrain": {
        "data": {"subset": {"total": 80}, "workers": 0},
        "views": {"size": 16, "crops": [{"count": 2, "scale": [0.3, 1.0]}]},
        "train": {
            "epochs": 2,
            "batch_size": 32,
            "lr": 1e-3,
            "precision": "fp32",
            "device": "cpu",
            "save_minutes": 0,
        },
    },
    "finetune": {
        "data": {"subset": {"per_class": 4}, "workers": 0},
        "train": {
            "epochs": 2,
            "size": 16,
            "batch_size": 20,
            "lr": 1e-3,
            "precision": "fp32",
            "device": "cpu",
        },
    },
}
JOBS = 2 + 3 * 2  # two pretrainings; from each of them and from scratch to two targets


def write(path, **changes):
    """Writes the grid as YAML."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**GRID, **changes}))
    return path


def inside(out, *argv, **changes):
    """Runs the command line in this process; returns the exit code."""
    return call(
        [
            "transfer",
            "--config",
            write(f"{out}.yaml", **changes),
            "--out",
            out,
            *argv,
        ]
    )


def forked(out, *argv):
    """Starts ``python transfer.py`` in a process that has done its imports."""
    argv = [
        ROOT / "transfer.py",
        "--config",
        write(f"{out}.yaml"),
        "--out",
        out,
        *argv,
    ]
    return Forked(argv, f"{out}.{time.monotonic_ns()}.err")


def results(out):
    return read(Path(out) / "grid.json")


def cells(out, protocol="finetune"):
    """What was measured, by source, target and seed."""
    measured = [cell for cell in results(out)["cells"] if cell["protocol"] == protocol]
    return {
        (c["source"], c["target"], c["seed"]): (
            c["status"],
            c["top1"],
            c["top5"],
        )
        for c in measured
    }


def runs(out):
    """The folders of jobs by their keys."""
    return {path.name.rpartition("-")[2]: path for path in (Path(out) / "runs").glob("*/*")}


def stamps(out):
    """When the finished jobs' files were written; a run that is opened again adds to its log."""
    done = [path for path in runs(out).values() if (path / "result.json").exists()]
    return {
        p: p.stat().st_mtime_ns
        for folder in done
        for p in (folder / "result.json", folder / "log.txt")
    }


def begun(out):
    """How often training was begun, over all jobs."""
    logs = [path / "log.txt" for path in runs(out).values()]
    return sum(log.read_text().count("training on cpu") for log in logs if log.exists())


class Made:
    """Jobs that are not run but made up, and no pictures: lists titles in ``asked``, does what
    ``instead`` says.

    Their results hold ``more``, too.
    """

    def __init__(self, monkeypatch, **more):
        self.asked = []
        self.instead = {}
        self.result = {
            "top1": 50.0,
            "top5": 90.0,
            "seconds": 4.0,
            "train_size": 7,
            **more,
        }
        monkeypatch.setattr("idmm.grid.run.run_command", lambda _, config: self(config))
        monkeypatch.setattr(grid_pictures, "bars", lambda *_: None)
        monkeypatch.setattr(grid_pictures, "parameters", lambda *_: None)

    def __call__(self, config):
        folder = Path(config["out"])
        title = folder.name.rpartition("-")[0]
        self.asked.append(title)
        for word, what in self.instead.items():
            if word in title:
                what()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(self.result))
