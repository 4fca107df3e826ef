"""What has to run: from a grid to jobs, each named by a hash of what it computes. Of files only recipes and weights are
read."""

import functools
import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from idmm.config import METHODS, PATHS, RESUME_IGNORED, parsing, reading
from idmm.config.schema import merged
from idmm.errors import UserError
from idmm.files import home, is_public
from idmm.stages import STAGES
from idmm.transfer.config import TRAINING, GridConfig
from idmm.transfer.entries import NONE, SCRATCH, data_of, read_entries, stage_of_target


@dataclass(frozen=True)
class Cell:
    """One number of the grid, by the labels of its entries and by its seeds."""

    source: str  # or the label of weights; ``scratch`` without pretraining
    method: str  # ``none`` where nothing was pretrained here
    backbone: str
    target: str
    pretrain_seed: int | None  # None where nothing was pretrained here
    seed: int  # of fine-tuning


@dataclass(frozen=True)
class Job:
    """One run of a stage."""

    key: str  # hash of what it computes
    stage: str
    config: dict  # plain; without ``out``, and without ``init`` where it needs another job
    title: str  # for people and folder names
    needs: str | None  # key of the job whose backbone it starts from
    folder: str  # under the grid's folder


@dataclass(frozen=True)
class _Row:
    """Where stage 2 starts from: a job, a file, or nothing."""

    source: str
    method: str
    pretrain_seed: int | None
    seeds: tuple[int, ...]
    needs: str | None = None
    init: str | None = None
    given: str | None = None  # the file as the user wrote it
    entries: tuple[dict, ...] = ()  # whose options it takes


class GridPlan:
    """The cells of a grid, and the jobs that give them.

    Attributes:
        entries: The valid ones of each list, see :func:`idmm.transfer.entries.read_entries`.
        jobs: By key; a job stands after the one that it needs.
        cells: The key of the job that gives each cell; only those that could be resolved.
        faults: What is wrong with the others, a line each.
        notes: Lines for the log, as keys.
    """

    def __init__(self, grid: GridConfig):
        self.grid = grid
        self.jobs: dict[str, Job] = {}
        self.cells: dict[Cell, str] = {}
        self.faults: list[str] = []
        self._known: set[tuple[str, str]] = set()  # stages and faults of options, which a cell need not repeat
        self.notes: dict[str, None] = {}
        self._recipes: dict[tuple[str, str], dict] = {}
        self._pairs = _seed_pairs(grid)
        self.entries = read_entries(grid, self.faults)
        self._check_options()
        for backbone in self.entries["backbones"]:
            for row, target in product(self._rows(backbone), self.entries["targets"]):
                if grid.pairs == "all" or row.needs is None or target["label"] == row.source:
                    self._add_cell(row, backbone, target)

    def checked(self) -> "GridPlan":
        """Returns itself; raises UserError with all its faults."""
        if self.faults:
            raise UserError(*self.faults)
        return self

    def remaining(self, finished: Collection[str] = ()) -> list[Job]:
        """Returns the jobs that are left when those with these keys are done, each after the one it needs; a job that
        no cell needs any more is not among them."""
        left = set(self.cells.values()) - set(finished)
        left |= {self.jobs[key].needs for key in left} - set(finished)
        return [job for key, job in self.jobs.items() if key in left]

    # -------------------------------------------------------------- rows and cells
    def _rows(self, backbone: dict) -> list[_Row]:
        """The rows of a backbone; their pretrainings are added to the jobs."""
        grid, entries = self.grid, self.entries
        tuned = tuple(dict.fromkeys(seed for _, seed in self._pairs))
        rows = [_Row(SCRATCH, NONE, None, tuned)] if grid.scratch else []
        for entry in entries["weights"]:
            if entry.get("backbone", backbone["label"]) == backbone["label"]:
                path = home(entry["path"])
                init = entry["path"] if is_public(entry["path"]) else str(path.absolute())
                files = {"init": init, "given": entry.get("given", str(path))}
                rows.append(_Row(entry["label"], NONE, None, tuned, **files, entries=(entry,)))
        pretrained = dict.fromkeys(seed for seed, _ in self._pairs)
        for source, method, seed in product(entries["sources"], entries["methods"], pretrained):
            job = self._pretrain_job(source, method, backbone, seed)
            if job is not None:
                self.jobs.setdefault(job.key, job)
                tuned = tuple(second for first, second in self._pairs if first == seed)
                rows.append(_Row(source["label"], method["label"], seed, tuned, job.key, entries=(source, method)))
        return rows

    def _pretrain_job(self, source: dict, method: dict, backbone: dict, seed: int) -> Job | None:
        layers = [self.grid.pretrain, *(entry.get("pretrain", {}) for entry in (source, method, backbone))]
        own = {"data": data_of(source, self.grid), "method": {"name": method["name"]}}
        config, faults = self._resolved("pretrain", layers, {**own, "model": _model(backbone), "seed": seed})
        self._add_faults("pretrain", f"pretrain of {method['label']} on {source['label']}", faults)
        title = f"{source['label']}-{method['label']}-{backbone['label']}-s{seed}"
        return config and _job("pretrain", parsing.to_dict(config), title)

    def _add_cell(self, row: _Row, backbone: dict, target: dict) -> None:
        stage, protocol = stage_of_target(target, self.grid), target.get("protocol", self.grid.target.protocol)
        layers = [getattr(self.grid, stage), *(entry.get(stage, {}) for entry in (*row.entries, backbone, target))]
        for seed in row.seeds:
            own = {"data": data_of(target, self.grid), "model": _model(backbone), "seed": seed}
            own["init"] = row.init or row.needs  # a job's key stands for its folder, which only its runner knows
            config, faults = self._resolved(stage, layers, own)
            self._add_faults(stage, f"{stage} on {target['label']}", faults)
            plain = config and parsing.to_dict(config)
            if protocol == "probe":
                plain = plain and self._probe(plain, row.needs, backbone)
            if plain is None:
                return
            start = "" if row.pretrain_seed is None else f"{row.method}-s{row.pretrain_seed}-"
            title = f"{row.source}-{start}{backbone['label']}-to-{target['label']}-s{seed}"
            job = _job(protocol, plain, title, row.needs, row.given)
            self.jobs.setdefault(job.key, job)
            cell = Cell(row.source, row.method, backbone["label"], target["label"], row.pretrain_seed, seed)
            self.cells[cell] = job.key

    def _probe(self, plain: dict, needs: str | None, backbone: dict) -> dict | None:
        """The part of a fine-tuning's config that a probe has, at the image size of pretraining (pixels); without one,
        at that of the backbone's."""
        if needs is not None:
            size = self.jobs[needs].config["views"]["size"]
        else:
            layers = [self.grid.pretrain, backbone.get("pretrain", {})]
            config, _ = self._resolved(
                "pretrain", layers, {"model": _model(backbone), **self._methods()[0]}, resolve=False
            )
            if config is None:
                return None
            size = config.views.size
        kept = {name: plain[name] for name in ("init", "seed", "data")}
        model = {name: plain["model"][name] for name in ("name", "kwargs", "drop_path")}
        return {**kept, "model": model, "device": plain["train"]["device"], "size": size}

    # -------------------------------------------------------------- options
    def _resolved(self, stage: str, layers: list[dict], own: dict, resolve: bool = True) -> tuple[Any, list[str]]:
        """The recipe of the last layer that names one, the layers' keys over it, then what the grid itself decides."""
        recipe = next((layer["config"] for layer in reversed(layers) if layer.get("config")), None)
        try:
            if not isinstance(recipe, str | None):
                raise UserError(f"--config: got {recipe!r}, wanted the path of one YAML file")
            if recipe is not None and (stage, recipe) not in self._recipes:
                self._recipes[stage, recipe] = reading.recipe(STAGES[stage].CONFIG, recipe)
            found = self._recipes.get((stage, recipe), {})
            if method := own.get("method"):
                found, note = reading.of_method(found, method["name"], recipe)
                self.notes |= {note: None} if note and resolve else {}
            layers = [{key: value for key, value in layer.items() if key != "config"} for layer in layers]
            data = merged(found, *layers, {**own, "out": None, "resume": "auto"})
            config = STAGES[stage].build(data)
            return STAGES[stage](config).fill_names()[0] if resolve else config, []
        except UserError as error:
            return None, [_short(fault) for fault in error.faults]

    def _add_faults(self, stage: str, where: str, faults: list[str]) -> None:
        """Adds the faults of a stage's options that are not known yet."""
        new = [fault for fault in faults if (stage, fault) not in self._known]
        self.faults += [f"{where}: {fault}" for fault in new]
        self._known |= {(stage, fault) for fault in new}

    def _check_options(self) -> None:
        """Finds faults of the grid's own options, also of those that no cell reaches."""
        for stage in TRAINING:
            layer = getattr(self.grid, stage)
            faults = self._overruled(stage, layer)
            for own in self._methods() if stage == "pretrain" else [{}]:  # the options depend on the method
                faults += self._resolved(stage, [layer], own, resolve=False)[1]
            self._add_faults(stage, stage, [*dict.fromkeys(faults)])

    def _methods(self) -> list[dict]:
        """Return the key that names the method, for each of the grid's methods."""
        names = [entry["name"] for entry in self.entries["methods"] if entry["name"] in METHODS]
        return [{"method": {"name": name}} for name in names] or [{}]

    def _overruled(self, stage: str, layer: dict) -> list[str]:
        """Keys that the grid sets itself, to something else."""
        side = "sources" if stage == "pretrain" else "targets"
        decided = {"data.name": side, "method.name": "methods", "model.name": "backbones", "model.kwargs": "backbones"}
        asked, faults = parsing.flatten(merged(layer)), []
        for key, name in decided.items():
            value, there = asked.get(key), [entry.get(key.partition(".")[2]) for entry in self.entries[name]]
            if value and value not in there:
                faults.append(f"{key}: {value!r}, but the grid's '{name}' decide it; say it there")
        if asked.get("seed") not in (None, *(pair[stage != "pretrain"] for pair in self._pairs)):
            faults.append(f"seed: {asked['seed']!r}, but the grid's 'seeds' decide it; say it there")
        if asked.get("out") is not None:
            faults.append(f"out: {asked['out']!r}, but the grid names its runs' folders; leave it out")
        if stage != "pretrain" and asked.get("init"):
            faults.append(f"init: {asked['init']!r}, but rows that start from a file are the grid's 'weights'")
        return faults


def _seed_pairs(grid: GridConfig) -> list[tuple[int, int]]:
    """Seeds of stage 1 and stage 2."""
    if grid.pretrain_seeds is None and grid.finetune_seeds is None:
        return [(seed, seed) for seed in grid.seeds]
    return list(product(grid.pretrain_seeds or grid.seeds[:1], grid.finetune_seeds or grid.seeds[:1]))


def _model(backbone: dict) -> dict:
    return {"name": backbone["name"], "kwargs": backbone.get("kwargs", {})}


def _short(fault: str) -> str:
    """A fault of a recipe, without what its reader thinks is its place."""
    return fault.replace("--config: ", "config: ", 1) if fault.startswith("--") else fault.removeprefix("config: ")


def _job(stage: str, plain: dict, title: str, needs: str | None = None, given: str | None = None) -> Job:
    plain = plain if needs is None else {**plain, "init": None}
    flat = parsing.flatten(plain if given is None else {**plain, "init": given})
    counted = {
        key: _resolved(value) if key in PATHS else value for key, value in flat.items() if key not in RESUME_IGNORED
    }
    text = json.dumps([stage, counted, needs, _digest(plain.get("init"))], sort_keys=True, default=str)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    safe = "".join(c if c.isalnum() or c in "._" else "-" for c in title)[:80]
    return Job(key, stage, plain, title, needs, folder=f"runs/{stage}/{safe}-{key}")


def _resolved(path: str | None) -> str | None:
    """Returns one spelling of a path, from the present folder if it lies inside."""
    if path is None or is_public(path) or not home(path).exists():
        return path
    inside, whole = Path.cwd(), home(path).resolve()
    return str(whole.relative_to(inside) if whole.is_relative_to(inside) else whole)


def _digest(path: str | None) -> str | None:
    """Hashes the content of a file of weights: another file under the same name is another job."""
    if is_public(path):
        from idmm.models.hub import public_weights  # torch, which other plans do without

        path = str(public_weights(path).file)
    file = Path(path or "")
    file = file / "backbone.safetensors" if file.is_dir() else file
    if path is None or not file.is_file():
        return None
    return _hashed(str(file), file.stat().st_size, file.stat().st_mtime_ns)


@functools.cache
def _hashed(path: str, size: int, time: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
