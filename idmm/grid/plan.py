"""The plan of a grid: its jobs, each named by a hash of what it computes. It reads only recipes and
weights."""

import functools
import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

from idmm.config import PATHS, RESUME_IGNORED, parsing, reading
from idmm.config.schema import merged
from idmm.errors import UserError
from idmm.files import expand_home, is_public
from idmm.grid.config import TRAINING, GridConfig
from idmm.grid.entries import NONE, SCRATCH, Entry, read_entries
from idmm.runs import STAGES


@dataclass(frozen=True)
class Cell:
    """One number of the grid, by the labels of its entries and by its seeds."""

    source: str  # or the label of weights, or ``scratch`` without pretraining
    method: str  # ``none`` if nothing was pretrained here
    backbone: str
    target: str
    pretrain_seed: int | None  # None if nothing was pretrained here
    seed: int  # of fine-tuning


@dataclass(frozen=True)
class Job:
    """One run of a stage."""

    key: str  # hash of what it computes
    stage: str
    config: dict  # plain, without ``out``, and without ``init`` if it needs another job
    title: str  # in messages and folder names
    needs: str | None  # key of the job whose backbone it starts from
    folder: str  # under the grid's folder


@dataclass(frozen=True)
class _Row:
    """The start of stage 2: a job, a file, or nothing."""

    source: str
    method: str
    pretrain_seed: int | None
    seeds: tuple[int, ...]
    needs: str | None = None
    init: str | None = None
    entries: tuple[Entry, ...] = ()  # whose options it takes


class GridPlan:
    """The cells of a grid, and the jobs that compute them.

    Attributes:
        entries: The valid ones of each list.
        jobs: By key. A job follows the one that it needs.
        cells: The key of the job of each cell, without the cells that have faults.
        faults: Faults of the grid, a line each.
        notes: Lines for the log, as keys.
    """

    def __init__(self, grid: GridConfig):
        self.grid = grid
        self.jobs = {}
        self.cells = {}
        self.faults = []
        self.notes = {}
        self._places = {}  # by stage and fault of its options: where it occurred first
        self._recipes = {}
        self._seed_pairs = _seed_pairs(grid)
        self.entries = read_entries(grid, self.faults)
        for stage in TRAINING:
            self._check_options(stage)
        for backbone in self.entries["backbones"]:
            rows = self._rows(backbone)
            sizes = {
                row.needs: self.jobs[row.needs].config["views"]["size"] for row in rows if row.needs
            }
            sizes[None] = next(iter(sizes.values()), None)  # of probes without a pretraining
            for row, target in product(rows, self.entries["targets"]):
                if grid.pairs == "all" or row.needs is None or target.label == row.source:
                    self._add_cells(row, backbone, target, sizes[row.needs])
        self.faults += [f"{place}: {fault}" for (_, fault), place in self._places.items()]

    def remaining(self, finished: Collection[str] = ()) -> list[Job]:
        """Return the jobs that cells still need if ``finished`` (keys) are done, each after the one
        it needs."""
        keys = set(self.cells.values()) - set(finished)
        keys |= {self.jobs[key].needs for key in keys} - set(finished)
        return [job for key, job in self.jobs.items() if key in keys]

    # -------------------------------------------------------------- rows and cells
    def _rows(self, backbone: Entry) -> list[_Row]:
        """Return the rows of a backbone, and add their pretraining to the jobs."""
        grid = self.grid
        entries = self.entries
        seeds = tuple(dict.fromkeys(seed for _, seed in self._seed_pairs))
        rows = [_Row(SCRATCH, NONE, None, seeds)] if grid.scratch else []
        for entry in entries["weights"]:
            if entry.values["backbone"] == backbone.label:
                path = entry.values["path"]
                if is_public(path):
                    init = path
                else:
                    init = str(expand_home(path).absolute())
                rows.append(_Row(entry.label, NONE, None, seeds, init=init, entries=(entry,)))
        pretrain_seeds = dict.fromkeys(seed for seed, _ in self._seed_pairs)
        for source, method, seed in product(entries["sources"], entries["methods"], pretrain_seeds):
            layers = [
                grid.pretrain,
                *(entry.values.get("pretrain", {}) for entry in (source, method, backbone)),
            ]
            decided = {
                "data": source.data(grid),
                "method": {"name": method.name},
                "model": _model(backbone),
            }
            place = f"pretrain of {method.label} on {source.label}"
            config = self._resolved("pretrain", place, layers, {**decided, "seed": seed})
            if config is not None:
                title = f"{source.label}-{method.label}-{backbone.label}-s{seed}"
                key = self._add_job("pretrain", parsing.to_dict(config), title)
                seeds = tuple(second for first, second in self._seed_pairs if first == seed)
                rows.append(
                    _Row(source.label, method.label, seed, seeds, key, entries=(source, method))
                )
        return rows

    def _add_cells(self, row: _Row, backbone: Entry, target: Entry, probe_size: int | None) -> None:
        protocol = self.grid.target.protocol
        entries = (*row.entries, backbone, target)
        layers = [self.grid.finetune, *(entry.values.get("finetune", {}) for entry in entries)]
        decided = {"data": target.data(self.grid), "model": _model(backbone)}
        decided["init"] = row.init or row.needs  # a job's key, as only its runner knows its folder
        for seed in row.seeds:
            config = self._resolved(
                "finetune", f"finetune on {target.label}", layers, {**decided, "seed": seed}
            )
            if config is None:
                return
            values = parsing.to_dict(config)
            if protocol == "probe":
                values = _probe(values, probe_size)
            if row.pretrain_seed is None:
                start = ""
            else:
                start = f"{row.method}-s{row.pretrain_seed}-"
            title = f"{row.source}-{start}{backbone.label}-to-{target.label}-s{seed}"
            cell = Cell(
                row.source, row.method, backbone.label, target.label, row.pretrain_seed, seed
            )
            self.cells[cell] = self._add_job(protocol, values, title, row.needs)

    def _add_job(self, stage: str, values: dict, title: str, needs: str | None = None) -> str:
        """Add a job if no other one computes the same, and return its key."""
        if needs is not None:
            values = {**values, "init": None}
        options = {
            key: _identity(value, self.grid.out) if key in PATHS else value
            for key, value in parsing.flatten(values).items()
            if key not in RESUME_IGNORED
        }
        text = json.dumps([stage, options, needs], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = "".join(c if c.isalnum() or c in "._" else "-" for c in title)[:80]
        self.jobs.setdefault(
            key, Job(key, stage, values, title, needs, folder=f"runs/{stage}/{name}-{key}")
        )
        return key

    def _resolved(self, stage: str, place: str, layers: list[dict], decided: dict) -> Any:
        """Merge the recipe of the last layer that names one, the layers' keys, and the keys that
        the grid decides.

        Return the config, or None if it has faults. ``place`` names the layers in messages on them.
        """
        recipe = next((layer["config"] for layer in reversed(layers) if layer.get("config")), None)
        try:
            if not isinstance(recipe, str | None):
                raise UserError(f"--config: got {recipe!r}, expected the path of one YAML file")
            if recipe is not None and (stage, recipe) not in self._recipes:
                self._recipes[stage, recipe] = reading.recipe(STAGES[stage].CONFIG, recipe)
            values = self._recipes.get((stage, recipe), {})
            if method := decided.get("method"):
                values, notes = reading.of_method(values, method["name"], recipe)
                self.notes |= dict.fromkeys(notes)
            layers = [
                {key: value for key, value in layer.items() if key != "config"} for layer in layers
            ]
            config = STAGES[stage].build(
                merged(values, *layers, {**decided, "out": None, "resume": "auto"})
            )
            return STAGES[stage](config).fill_names()[0]
        except UserError as error:
            for fault in error.faults:  # the flag that a recipe's reader blames is a key here
                fault = str(fault).removeprefix("config: ").replace("--config: ", "config: ", 1)
                self._places.setdefault((stage, fault), place)

    def _check_options(self, stage: str) -> None:
        """Find options for a stage, of the grid or of an entry, that the grid's lists decide."""
        lists = {
            "data.name": "sources" if stage == "pretrain" else "targets",
            "method.name": "methods",
        }
        lists |= {
            "model.name": "backbones",
            "model.kwargs": "backbones",
            "seed": "seeds",
            "out": "out",
        }
        if stage == "finetune":
            lists["init"] = "weights"
        layers = {stage: getattr(self.grid, stage)}
        for entry in chain(*self.entries.values()):
            layers[f"{entry.place}.{stage}"] = entry.values.get(stage, {})
        for place, layer in layers.items():
            for key, value in parsing.flatten(merged(layer)).items():
                if key in lists and value not in (None, {}):
                    line = (
                        f"{key}: {value!r}, but the grid's '{lists[key]}' decides it. Set it there"
                    )
                    self.faults.append(f"{place}: {line}")


def _seed_pairs(grid: GridConfig) -> list[tuple[int, int]]:
    """Return the pairs of seeds of stage 1 and stage 2."""
    if grid.pretrain_seeds is None and grid.finetune_seeds is None:
        return [(seed, seed) for seed in grid.seeds]
    return list(
        product(grid.pretrain_seeds or grid.seeds[:1], grid.finetune_seeds or grid.seeds[:1])
    )


def _model(backbone: Entry) -> dict:
    return {"name": backbone.name, "kwargs": backbone.values.get("kwargs", {})}


def _probe(values: dict, size: int | None) -> dict:
    """Return the part of a fine-tuning's config that a probe has, with its image size (pixels)."""
    model = {name: values["model"][name] for name in ("name", "kwargs", "drop_path")}
    common = {name: values[name] for name in ("init", "seed", "data")}
    return {**common, "model": model, "device": values["train"]["device"], "size": size}


def _identity(path: str | None, out: str) -> Any:
    """Return a path with the hash of its file, so that another file with the same name is another
    job.

    The path is relative to the grid's folder ``out``, which may move with its images. A pattern
    stays.
    """
    if is_public(path):
        # torch, which plans without public weights do not need
        from idmm.models.weights import public_file

        place = path
        file = public_file(path)
    elif path is None or not expand_home(path).exists():
        return path
    else:
        file = expand_home(path).resolve()
        place = os.path.relpath(file, Path(out).resolve())
        file = file / "backbone.safetensors" if file.is_dir() else file
    if file.is_file():
        return [place, _digest(file, file.stat().st_size, file.stat().st_mtime_ns)]
    return place


@functools.cache
def _digest(file: Path, size: int, time: int) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
