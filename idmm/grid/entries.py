"""The entries of a grid's lists: sources, targets, methods, backbones and weights, each checked. No
torch."""

import os
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path

from idmm.config import METHODS, Data, PretrainConfig, parsing
from idmm.data.registry import resolve_name, spec_of
from idmm.errors import UserError
from idmm.files import expand_home, is_public, weights_file
from idmm.grid.config import TRAINING, GridConfig
from idmm.text import nearest

SCRATCH = "scratch"
NONE = "none"
SIDES = ("sources", "targets")
_DATA_KEYS = {item.name for item in fields(Data)}
_KEYS = {
    "sources": {"label", *_DATA_KEYS, *TRAINING},
    "targets": {"label", *_DATA_KEYS, *TRAINING},
    "methods": {"name", "label", *TRAINING},
    "backbones": {"name", "kwargs", "label", *TRAINING},
    "weights": {"label", "path", "backbone", "finetune"},
}


@dataclass(frozen=True)
class Entry:
    """An entry of a list."""

    kind: str  # the list
    place: str  # e.g. sources[0]
    label: str  # in no job's key
    values: dict  # its keys

    @property
    def name(self) -> str:
        """Of the dataset, method or backbone."""
        return self.values["name"]

    def data(self, grid: GridConfig) -> dict:
        """Return the keys of ``data`` of a source or target."""
        data = {key: value for key, value in self.values.items() if key in _DATA_KEYS}
        if (
            grid.roots is not None
            and "root" not in data
            and self.name != "folder"
            and spec_of(self.name).layout
        ):
            data["root"] = str(Path(grid.roots) / self.name)
        return data


Entries = dict[str, list[Entry]]  # by list


def read_entries(grid: GridConfig, faults: list[str]) -> Entries:
    """Return the valid entries of each list, and add the faults of the others to ``faults``."""
    entries = {kind: _read_list(grid, kind, faults) for kind in _KEYS}
    backbones = [entry.label for entry in entries["backbones"]]
    for entry in entries["weights"]:
        if len(backbones) == 1:
            entry.values.setdefault("backbone", backbones[0])
    _check_labels(grid, entries, faults)
    if not (grid.scratch or grid.weights or (grid.sources and grid.methods)):
        faults.append(
            "sources: none, and neither scratch nor weights: there is nothing to run. Name a dataset"
        )
    valid = {kind: [] for kind in entries}
    for kind, members in entries.items():
        for entry in members:
            try:
                valid[kind].append(_checked(entry, grid, backbones))
            except UserError as error:
                faults += [f"{kind} '{entry.label}': {fault}" for fault in error.faults]
    return valid


def _read_list(grid: GridConfig, kind: str, faults: list[str]) -> list[Entry]:
    entries = []
    required = "label" if kind == "weights" else "name"
    for number, value in enumerate(getattr(grid, kind)):
        if isinstance(value, str):
            values = {"name": value}
        else:
            values = dict(value) if isinstance(value, dict) else {}
        place = f"{kind}[{number}]"
        for key in sorted(set(values) - _KEYS[kind], key=str):
            faults.append(f"{place}.{key}: unknown key{nearest(str(key), _KEYS[kind])}")
        for stage in TRAINING:
            if not isinstance(values.get(stage, {}), dict):
                faults.append(f"{place}.{stage}: got {values.pop(stage)!r}, expected a mapping")
        if values.get("root") == "":  # of a variable that is not set, say
            faults.append(f"{place}.root: got '', expected a folder")
        if kind in SIDES and values.get("name") is None and values.get("root") is not None:
            values["name"] = "folder"
        if values.get("label") is not None:
            values["label"] = str(values["label"])
        if not isinstance(values.get(required), str):
            faults.append(f"{place}: got {value!r}, expected a name or a mapping with '{required}'")
            continue
        entries.append(
            Entry(kind, place, values.get("label") or _default_label(kind, values), values)
        )
    return entries


def _default_label(kind: str, values: dict) -> str:
    """Return the name, or the last part of a folder's path, with the subset."""
    name = values["name"]
    subset = values.get("subset")
    root = values.get("root")
    if kind in SIDES and name == "folder" and root is not None:
        name = os.path.basename(os.path.abspath(expand_home(str(root))))
    if isinstance(subset, dict):
        suffixes = [f"{key}{value}" for key, value in subset.items()]
    else:
        suffixes = []
    return "-".join([name, *suffixes])


def _check_labels(grid: GridConfig, entries: Entries, faults: list[str]) -> None:
    labels = {kind: {entry.label for entry in members} for kind, members in entries.items()}
    for members in entries.values():
        twins = defaultdict(list)
        for entry in members:  # weights of several backbones may share a label
            twins[entry.label, str(entry.values.get("backbone"))].append(entry.place)
        for (label, _), places in twins.items():
            if len(places) > 1:
                faults.append(
                    f"{' and '.join(places)}: each has the label '{label}'. Give each its own label"
                )
    for kind, label in (("sources", SCRATCH), ("weights", SCRATCH), ("methods", NONE)):
        if label in labels[kind]:
            faults.append(
                f"{kind}: '{label}' is the label of rows without pretraining. Choose another"
            )
    for label in sorted(labels["sources"] & labels["weights"]):
        faults.append(f"weights: '{label}' is also the label of a source. Choose another")
    if grid.pairs == "same":
        for label in sorted(labels["sources"] - labels["targets"]):
            faults.append(f"pairs: 'same', but no target has the label '{label}' of that source")


def _checked(entry: Entry, grid: GridConfig, backbones: list[str]) -> Entry:
    """Return an entry, or raise UserError with its faults. Public weights are fetched."""
    values = entry.values
    faults = []
    if entry.kind in SIDES:
        resolve_name(parsing.build(PretrainConfig, {"data": entry.data(grid)}).data)
    elif entry.kind == "methods" and entry.name not in METHODS:
        expected = f"expected one of {', '.join(METHODS)}{nearest(entry.name, METHODS)}"
        raise UserError(f"'{entry.name}' is not known, {expected}")
    elif entry.kind == "backbones" and not isinstance(values.get("kwargs", {}), dict):
        raise UserError(f"kwargs: got {values['kwargs']!r}, expected a mapping")
    elif entry.kind == "weights":
        path = values.get("path")
        if not isinstance(path, str) or not (is_public(path) or expand_home(path).exists()):
            faults.append(f"path: got {path!r}, expected an existing run folder or file of weights")
        if values.get("backbone") not in backbones:
            faults.append(
                f"backbone: got {values.get('backbone')!r}, expected one of {', '.join(backbones)}"
            )
        if faults:
            raise UserError(*faults)
        if is_public(path):
            # torch, which plans without public weights do not need
            from idmm.models.weights import public_file

            weights_file(path, "path")
            public_file(path, "path")
    return entry
