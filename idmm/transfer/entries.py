"""The lists of a grid: its sources, targets, methods, backbones and files of weights, each entry checked. No torch."""

import os
from dataclasses import fields
from itertools import product
from pathlib import Path

from idmm.config import METHODS, Data, PretrainConfig, parsing
from idmm.data.registry import resolve_name, spec_of
from idmm.errors import UserError, nearest
from idmm.files import home, is_public, weights_file
from idmm.transfer.config import PROTOCOLS, TRAINING, TUNING, GridConfig

SCRATCH, NONE = "scratch", "none"
SIDES = ("sources", "targets")
_DATA_KEYS = {item.name for item in fields(Data)}
_KEYS = {
    "sources": {"label", *_DATA_KEYS, *TRAINING},
    "targets": {"label", "protocol", *_DATA_KEYS, *TRAINING},
    "methods": {"name", "label", *TRAINING},
    "backbones": {"name", "kwargs", "label", *TRAINING},
    "weights": {"label", "path", "backbone", *TUNING},
}


def read_entries(grid: GridConfig, faults: list[str]) -> dict[str, list[dict]]:
    """Returns the valid entries of each list as mappings with ``label``; adds the faults of the others.

    An entry without a label is called by its name, a folder by the last part of its path; labels are in no job's key.
    """
    entries = {name: _listed(grid, name, faults) for name in _KEYS}
    _add_labels(entries)
    _check_labels(grid, entries, faults)
    for name in ("seeds", "pretrain_seeds", "finetune_seeds"):
        seeds = getattr(grid, name) or []
        faults += [f"{name}: {seed} is there twice" for seed in dict.fromkeys(seeds) if seeds.count(seed) > 1]
    if not (grid.scratch or grid.weights or (grid.sources and grid.methods)):
        faults.append("sources: none, and neither scratch nor weights: there is nothing to run; name a dataset")
    backbones, valid = [entry["label"] for entry in entries["backbones"]], {name: [] for name in entries}
    for name, entry in [(name, entry) for name, found in entries.items() for entry in found]:
        wrong = _entry_faults(name, entry, grid, backbones)
        faults += [f"{name} '{entry['label']}': {fault}" for fault in wrong]
        valid[name] += [entry] if not wrong else []
    return valid


def data_of(entry: dict, grid: GridConfig) -> dict:
    """Returns the keys of ``data`` that a source or target says."""
    data = {key: value for key, value in entry.items() if key in _DATA_KEYS}
    if grid.roots is not None and "root" not in data and spec_of(entry["name"]).layout and entry["name"] != "folder":
        data["root"] = str(Path(grid.roots) / entry["name"])
    return data


def stage_of_target(entry: dict, grid: GridConfig) -> str:
    """Returns the stage whose options a target takes; a probe takes those of fine-tuning."""
    protocol = entry.get("protocol", grid.target.protocol)
    return "finetune" if protocol == "probe" else protocol


def _listed(grid: GridConfig, name: str, faults: list[str]) -> list[dict]:
    found = []
    for number, given in enumerate(getattr(grid, name)):
        entry = {"name": given} if isinstance(given, str) else dict(given) if isinstance(given, dict) else {}
        where = f"{name}[{number}]"
        for key in sorted(set(entry) - _KEYS[name], key=str):
            faults.append(f"{where}.{key}: unknown key{nearest(str(key), _KEYS[name])}")
        for stage in TRAINING:
            if not isinstance(entry.get(stage, {}), dict):
                faults.append(f"{where}.{stage}: got {entry.pop(stage)!r}, wanted a mapping")
        if entry.get("root") == "":  # of a variable that is not set, say
            faults.append(f"{where}.root: got '', wanted a folder")
        if name in SIDES and entry.get("name") is None and entry.get("root") is not None:
            entry["name"] = "folder"
        wanted = "label" if name == "weights" else "name"
        if not isinstance(entry.get(wanted), str):
            faults.append(f"{where}: got {given!r}, wanted a name or a mapping with '{wanted}'")
            continue
        found.append({**entry, "where": where})
    return found


def _add_labels(entries: dict[str, list[dict]]) -> None:
    for entry in [entry for found in entries.values() for entry in found]:
        if entry.get("label") is not None:
            entry["label"] = str(entry["label"])
            continue
        name, subset = entry["name"], entry.get("subset")
        if name == "folder" and entry.get("root") is not None:
            name = _images(entry)[-1]
        parts = [f"{key}{value}" for key, value in subset.items()] if isinstance(subset, dict) else []
        entry["label"] = "-".join([name, *parts])


def _images(entry: dict) -> tuple[str, ...]:
    """What tells an entry's images from another's: the parts of a folder's path, or the dataset's name."""
    if entry["name"] == "folder" and entry.get("root") is not None:
        return Path(os.path.abspath(home(str(entry["root"])))).parts
    return (entry["name"],)


def _check_labels(grid: GridConfig, entries: dict[str, list[dict]], faults: list[str]) -> None:
    labels = {name: {entry["label"] for entry in found} for name, found in entries.items()}
    for name, found in entries.items():
        # a file of weights is of one backbone: others have theirs under the same label
        twins: dict[tuple, list[str]] = {}
        for entry in found:
            own = entry["label"], str(entry.get("backbone")) if name == "weights" else None
            twins.setdefault(own, []).append(entry["where"])
        for (label, _), places in twins.items():
            if len(places) > 1:
                faults.append(f"{' and '.join(places)}: each is called '{label}'; give each entry a label of its own")
    for source, target in product(entries["sources"], entries["targets"] if grid.pairs == "all" else ()):
        if source["label"] == target["label"] and _images(source) != _images(target):
            where, label = f"{source['where']} and {target['where']}", source["label"]
            faults.append(f"{where}: each is called '{label}', but their images differ; give them other labels")
    for name in ("sources", "weights"):
        if SCRATCH in labels[name]:
            faults.append(f"{name}: '{SCRATCH}' is the label of the row without pretraining; name another")
    for label in sorted(labels["sources"] & labels["weights"]):
        faults.append(f"weights: '{label}' is the label of a source, too; name another")
    if grid.pairs == "same":
        for label in sorted(labels["sources"] - labels["targets"]):
            faults.append(f"pairs: 'same', but no target is called '{label}' as that source is")
    if NONE in labels["methods"]:
        faults.append(f"methods: '{NONE}' is the label of rows without a method; name another")


def _entry_faults(kind: str, entry: dict, grid: GridConfig, backbones: list[str]) -> list[str]:
    name, kwargs, path = entry.get("name"), entry.get("kwargs", {}), entry.get("path")
    faults = []
    if kind == "targets" and (protocol := entry.get("protocol", PROTOCOLS[0])) not in PROTOCOLS:
        return [f"protocol: got {protocol!r}, wanted one of {', '.join(PROTOCOLS)}{nearest(str(protocol), PROTOCOLS)}"]
    if kind == "targets" and "protocol" in entry:
        own = stage_of_target(entry, grid)
        others = [stage for stage in TUNING if stage in entry and stage != own]
        wrong = f"protocol: {entry['protocol']} takes no options of"
        faults += [f"{wrong} {stage}; wanted them under {own}" for stage in others]
    if kind in SIDES:
        try:
            resolve_name(parsing.build(PretrainConfig, {"data": data_of(entry, grid)}).data)
        except UserError as error:
            return faults + list(error.faults)
    if kind == "methods" and name not in METHODS:
        faults.append(f"'{name}' is not known; wanted one of {', '.join(METHODS)}{nearest(name, METHODS)}")
    if kind == "backbones" and not isinstance(kwargs, dict):
        faults.append(f"kwargs: got {kwargs!r}, wanted a mapping")
    if kind == "weights":
        if isinstance(path, str) and is_public(path):
            faults += _pin(entry)
        elif not isinstance(path, str) or not home(path).exists():
            faults.append(f"path is {path!r}, wanted a run folder or a file of weights that is there")
        if entry.get("backbone") not in backbones and not (len(backbones) == 1 and "backbone" not in entry):
            faults.append(f"backbone is {entry.get('backbone')!r}, wanted one of {', '.join(backbones)}")
    return faults


def _pin(entry: dict) -> list[str]:
    """Names public weights of an entry by their commit, fetched where the hub's cache does not have them; returns what
    is wrong with them."""
    from idmm.models.hub import pinned  # torch, which other grids are planned without

    try:
        weights_file(entry["path"], "path")
        entry |= {"given": entry["path"], "path": pinned(entry["path"], "path")}
    except UserError as error:
        return list(error.faults)
    return []
