"""The plan of a grid: its jobs, each named by a hash of what it computes. It reads only recipes and
weights."""

import functools
import hashlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

from idmm.config import (
    PATHS,
    RESUME_IGNORED,
    FinetuneConfig,
    PretrainConfig,
    parsing,
    reading,
)
from idmm.config.schema import flatten, merged
from idmm.errors import Fault, UserError
from idmm.files import Json, expand_home, is_public
from idmm.grid.config import CONFIGS, TRAINING, GridConfig
from idmm.grid.entries import NONE, SCRATCH, Entry, read_entries
from idmm.runs.resolve import fill_data_name, fill_pretrain_names

# the list of the grid that decides a key, by command
DECIDED_BY = {
    "pretrain": {"data.name": "sources", "method.name": "methods"},
    "finetune": {"data.name": "targets", "method.name": "methods", "init": "weights"},
}
ALWAYS_DECIDED_BY = {
    "model.name": "backbones",
    "model.kwargs": "backbones",
    "seed": "seeds",
    "out": "out",
}


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
    """One run of a command."""

    key: str  # hash of what it computes
    command: str
    config: Json  # plain, without ``out``, and without ``init`` if it needs another job
    title: str  # in messages and folder names
    needs: str | None  # key of the job whose backbone it starts from
    folder: str  # under the grid's folder


@dataclass(frozen=True)
class _Row:
    """What fine-tuning starts from: a job, a file, or nothing."""

    source: str
    seeds: Sequence[int]  # of fine-tuning
    method: str = NONE
    pretrain_seed: int | None = None
    needs: str | None = None
    init: str | None = None
    entries: tuple[Entry, ...] = ()  # whose options it takes


class GridPlan:
    """The cells of a grid, and the jobs that compute them.

    Attributes:
        entries: The valid ones of each list.
        jobs: By key. A job follows the one that it needs.
        cells: The key of the job of each cell, without the cells that have faults.
        faults: Faults of the grid.
        notes: Lines for the log, as keys.
    """

    def __init__(self, grid: GridConfig):
        self.grid = grid
        self.jobs: dict[str, Job] = {}
        self.cells: dict[Cell, str] = {}
        self.faults: list[Fault] = []
        self.notes: dict[str, None] = {}
        # by command and fault of its options: the run where it occurred first
        self._owners: dict[tuple[str, Fault], str] = {}
        self._recipes: dict[tuple[str, str], Json] = {}
        self._seed_pairs = _seed_pairs(grid)
        self.entries = read_entries(grid, self.faults)
        for command in TRAINING:
            self._check_options(command)
        for backbone in self.entries["backbones"]:
            self._add_backbone(backbone)
        self.faults += [fault.within(owner) for (_, fault), owner in self._owners.items()]

    def remaining(self, finished: Collection[str] = ()) -> list[Job]:
        """Return the jobs that cells still need if ``finished`` (keys) are done, each after the one
        it needs."""
        keys = {*self.cells.values()} - {*finished}
        needed = {self.jobs[key].needs for key in keys} - {*finished}
        return [job for key, job in self.jobs.items() if key in keys | needed]

    # -------------------------------------------------------------- rows and cells
    def _add_backbone(self, backbone: Entry) -> None:
        """Add the cells of a backbone, and their jobs."""
        rows = self._rows(backbone)
        # image size of a probe, by the pretraining it starts from
        sizes: dict[str | None, int] = {}
        for row in rows:
            if row.needs is not None:
                sizes[row.needs] = self.jobs[row.needs].config["views"]["size"]
        first_size = next(iter(sizes.values()), None)
        for row, target in product(rows, self.entries["targets"]):
            if self.grid.pairs == "all" or row.needs is None or target.label == row.source:
                self._add_cells(row, backbone, target, sizes.get(row.needs, first_size))

    def _rows(self, backbone: Entry) -> list[_Row]:
        """Return the rows of a backbone, and add their pretraining to the jobs."""
        seeds = [*dict.fromkeys(seed for _, seed in self._seed_pairs)]
        rows = []
        if self.grid.scratch:
            rows.append(_Row(SCRATCH, seeds))
        for entry in self.entries["weights"]:
            if entry.values["backbone"] == backbone.label:
                path = entry.values["path"]
                if not is_public(path):
                    path = str(expand_home(path).absolute())
                rows.append(_Row(entry.label, seeds, init=path, entries=(entry,)))
        pretrain_seeds = dict.fromkeys(seed for seed, _ in self._seed_pairs)
        sources = self.entries["sources"]
        for source, method, seed in product(sources, self.entries["methods"], pretrain_seeds):
            key = self._add_pretraining(source, method, backbone, seed)
            if key is not None:
                rows.append(
                    _Row(
                        source.label,
                        [second for first, second in self._seed_pairs if first == seed],
                        method.label,
                        seed,
                        needs=key,
                        entries=(source, method),
                    )
                )
        return rows

    def _add_pretraining(
        self, source: Entry, method: Entry, backbone: Entry, seed: int
    ) -> str | None:
        """Add the job of a pretraining and return its key, or None if it has faults."""
        config = self._resolved(
            "pretrain",
            f"pretrain of {method.label} on {source.label}",
            [source, method, backbone],
            {
                "data": source.data(self.grid),
                "method": {"name": method.name},
                "model": _model(backbone),
                "seed": seed,
            },
        )
        if config is None:
            return None
        title = f"{source.label}-{method.label}-{backbone.label}-s{seed}"
        return self._add_job("pretrain", config, title)

    def _add_cells(self, row: _Row, backbone: Entry, target: Entry, probe_size: int | None) -> None:
        protocol = self.grid.target.protocol
        start = row.source
        if row.pretrain_seed is not None:
            start = f"{row.source}-{row.method}-s{row.pretrain_seed}"
        for seed in row.seeds:
            config = self._resolved(
                "finetune",
                f"finetune on {target.label}",
                [*row.entries, backbone, target],
                {
                    "data": target.data(self.grid),
                    "model": _model(backbone),
                    # a job's key, as only its runner knows its folder
                    "init": row.init or row.needs,
                    "seed": seed,
                },
            )
            if config is None:
                return
            if protocol == "probe":
                config = _probe(config, probe_size)
            title = f"{start}-{backbone.label}-to-{target.label}-s{seed}"
            cell = Cell(
                row.source, row.method, backbone.label, target.label, row.pretrain_seed, seed
            )
            self.cells[cell] = self._add_job(protocol, config, title, row.needs)

    def _add_job(self, command: str, config: Json, title: str, needs: str | None = None) -> str:
        """Add a job if no other one computes the same, and return its key."""
        if needs is not None:
            config = {**config, "init": None}
        options = {}
        for name, value in flatten(config).items():
            if name in PATHS:
                options[name] = _identity(value, self.grid.out)
            elif name not in RESUME_IGNORED:
                options[name] = value
        text = json.dumps([command, options, needs], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        name = "".join(c if c.isalnum() or c in "._" else "-" for c in title)[:80]
        folder = f"runs/{command}/{name}-{key}"
        self.jobs.setdefault(key, Job(key, command, config, title, needs, folder))
        return key

    # -------------------------------------------------------------- options
    def _resolved(
        self, command: str, run: str, entries: Sequence[Entry], decided: Json
    ) -> Json | None:
        """Merge a recipe, the keys of the grid and of entries, and the keys that the grid decides.

        The recipe is that of the last entry that names one.

        Args:
            run: Its name in messages on its keys.

        Returns:
            The config, or None if it has faults.
        """
        layers = [getattr(self.grid, command)]
        layers += [entry.values.get(command, {}) for entry in entries]
        recipe = None
        options = []
        for layer in layers:
            layer = dict(layer)
            recipe = layer.pop("config", None) or recipe
            options.append(layer)
        try:
            values = self._recipe(command, recipe)
            if "method" in decided:
                values, note = reading.of_method(values, decided["method"]["name"], recipe)
                if note:
                    self.notes[note] = None
            keys = merged(values, *options, decided, {"out": None, "resume": "auto"})
            config: PretrainConfig | FinetuneConfig
            if command == "pretrain":
                config, _ = fill_pretrain_names(parsing.build(PretrainConfig, keys))
            else:
                config, _ = fill_data_name(parsing.build(FinetuneConfig, keys))
            resolved: Json = parsing.to_dict(config)
            return resolved
        except UserError as error:
            for fault in error.faults:
                self._owners.setdefault((command, _of_grid(fault)), run)
            return None

    def _recipe(self, command: str, name: object) -> Json:
        """Return the keys of a recipe, {} without a name. Each is read once."""
        if name is None:
            return {}
        if not isinstance(name, str):
            raise UserError.of("--config", f"got {name!r}, expected the path of one YAML file")
        if (command, name) not in self._recipes:
            self._recipes[command, name] = reading.recipe(CONFIGS[command], name)
        return self._recipes[command, name]

    def _check_options(self, command: str) -> None:
        """Find options for a command, of the grid or of an entry, that the grid's lists decide."""
        lists = DECIDED_BY[command] | ALWAYS_DECIDED_BY
        layers = {command: getattr(self.grid, command)}
        for entry in chain(*self.entries.values()):
            layers[f"{entry.position}.{command}"] = entry.values.get(command, {})
        for owner, layer in layers.items():
            for key, value in flatten(merged(layer)).items():
                if key in lists and value not in (None, {}):
                    text = f"{value!r}, but the grid's '{lists[key]}' decides it"
                    self.faults.append(Fault(f"{owner}: {key}", text, "Set it there"))


def _of_grid(fault: Fault) -> Fault:
    """Return a fault by the grid's name of its field: the flag --config is a key of a grid."""
    names = {"--config": "config", "config": ""}
    return replace(fault, field=names.get(fault.field, fault.field))


def _seed_pairs(grid: GridConfig) -> list[tuple[int, int]]:
    """Return the pairs of seeds of pretraining and fine-tuning."""
    if grid.pretrain_seeds is None and grid.finetune_seeds is None:
        return [(seed, seed) for seed in grid.seeds]
    return list(
        product(grid.pretrain_seeds or grid.seeds[:1], grid.finetune_seeds or grid.seeds[:1])
    )


def _model(backbone: Entry) -> Json:
    return {"name": backbone.name, "kwargs": backbone.values.get("kwargs", {})}


def _probe(values: Json, size: int | None) -> Json:
    """Return the part of a fine-tuning's config that a probe has, with its image size (pixels)."""
    model = {name: values["model"][name] for name in ("name", "kwargs", "drop_path")}
    common = {name: values[name] for name in ("init", "seed", "data")}
    return {**common, "model": model, "device": values["train"]["device"], "size": size}


def _identity(path: str | None, out: str) -> str | list[str] | None:
    """Return a path with the hash of its file, so that another file with the same name is another
    job.

    The path is relative to the grid's folder ``out``, which may move with its images. A pattern
    stays.
    """
    if path is None:
        return None
    if is_public(path):
        # torch, which plans without public weights do not need
        from idmm.models.public import public_weights

        name = path
        file = public_weights(path).file
    elif expand_home(path).exists():
        file = expand_home(path).resolve()
        name = os.path.relpath(file, Path(out).resolve())
        if file.is_dir():
            file = file / "backbone.safetensors"
    else:
        return path
    if file.is_file():
        return [name, _digest(file, file.stat().st_size, file.stat().st_mtime_ns)]
    return name


@functools.cache
def _digest(file: Path, size: int, time: int) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
