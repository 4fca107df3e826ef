"""The entries of a grid's lists: sources, targets, methods, backbones and weights, each checked. No
torch."""

import os
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from idmm.config import METHODS, Data, PretrainConfig, parsing
from idmm.data.registry import resolve_name, spec_of
from idmm.errors import Fault, UserError
from idmm.files import Json, expand_home, is_public
from idmm.grid.config import TRAINING, GridConfig
from idmm.text import nearest

SCRATCH = "scratch"
NONE = "none"
RESERVED = {"sources": SCRATCH, "weights": SCRATCH, "methods": NONE}  # labels, by list
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
    position: str  # e.g. sources[0]
    label: str  # in no job's key
    values: Json  # its keys

    @property
    def name(self) -> str:
        """Of the dataset, method or backbone."""
        return str(self.values["name"])

    def data(self, grid: GridConfig) -> Json:
        """Return the keys of ``data`` of a source or target."""
        data = {key: value for key, value in self.values.items() if key in _DATA_KEYS}
        if grid.roots is not None and "root" not in data:
            if self.name != "folder" and spec_of(self.name).layout:
                data["root"] = str(Path(grid.roots) / self.name)
        return data


Entries = dict[str, list[Entry]]  # by list


def read_entries(grid: GridConfig, faults: list[Fault]) -> Entries:
    """Return the valid entries of each list, and add the faults of the others to ``faults``."""
    entries = {kind: _read_list(kind, getattr(grid, kind), faults) for kind in _KEYS}
    backbones = [entry.label for entry in entries["backbones"]]
    if len(backbones) == 1:
        for entry in entries["weights"]:
            entry.values.setdefault("backbone", backbones[0])
    _check_labels(grid, entries, faults)
    if not (grid.scratch or grid.weights or (grid.sources and grid.methods)):
        faults.append(
            Fault(
                "sources",
                "none, and neither scratch nor weights: there is nothing to run",
                "Name a dataset",
            )
        )
    valid: Entries = {kind: [] for kind in entries}
    for kind, members in entries.items():
        for entry in members:
            try:
                _check(entry, grid, backbones)
                valid[kind].append(entry)
            except UserError as error:
                owner = f"{kind} '{entry.label}'"
                faults += [fault.within(owner) for fault in error.faults]
    return valid


def _read_list(kind: str, members: list[Any], faults: list[Fault]) -> list[Entry]:
    """Return the entries of a list that have a name, and add faults of their keys to ``faults``."""
    entries = []
    required = "label" if kind == "weights" else "name"
    for number, member in enumerate(members):
        position = f"{kind}[{number}]"
        values: Json = dict(member) if isinstance(member, dict) else {"name": member}
        for key in sorted(values.keys() - _KEYS[kind], key=str):
            faults.append(Fault(f"{position}.{key}", "unknown key", nearest(str(key), _KEYS[kind])))
        for command in TRAINING:
            if not isinstance(values.get(command, {}), dict):
                wrong = values.pop(command)
                faults.append(Fault(f"{position}.{command}", f"got {wrong!r}, expected a mapping"))
        if values.get("root") == "":  # of a variable that is not set, say
            faults.append(Fault(f"{position}.root", "got '', expected a folder"))
        if kind in SIDES and values.get("name") is None and values.get("root") is not None:
            values["name"] = "folder"
        if values.get("label") is not None:
            values["label"] = str(values["label"])
        if isinstance(values.get(required), str):
            label = values.get("label") or _default_label(kind, values)
            entries.append(Entry(kind, position, label, values))
        else:
            faults.append(
                Fault(position, f"got {member!r}, expected a name or a mapping with '{required}'")
            )
    return entries


def _default_label(kind: str, values: Json) -> str:
    """Return the name, or the last part of a folder's path, with the subset."""
    name = values["name"]
    subset = values.get("subset")
    root = values.get("root")
    if kind in SIDES and name == "folder" and root is not None:
        name = os.path.basename(os.path.abspath(expand_home(str(root))))
    if not isinstance(subset, dict):
        return str(name)
    return "-".join([name, *(f"{key}{value}" for key, value in subset.items())])


def _check_labels(grid: GridConfig, entries: Entries, faults: list[Fault]) -> None:
    labels = {kind: {entry.label for entry in members} for kind, members in entries.items()}
    for members in entries.values():
        twins = defaultdict(list)
        for entry in members:  # weights of several backbones may share a label
            twins[entry.label, str(entry.values.get("backbone"))].append(entry.position)
        for (label, _), positions in twins.items():
            if len(positions) > 1:
                text = f"each has the label '{label}'"
                faults.append(Fault(" and ".join(positions), text, "Give each its own label"))
    for kind, label in RESERVED.items():
        if label in labels[kind]:
            text = f"'{label}' is the label of rows without pretraining"
            faults.append(Fault(kind, text, "Choose another"))
    for label in sorted(labels["sources"] & labels["weights"]):
        text = f"'{label}' is also the label of a source"
        faults.append(Fault("weights", text, "Choose another"))
    if grid.pairs == "same":
        for label in sorted(labels["sources"] - labels["targets"]):
            text = f"'same', but no target has the label '{label}' of that source"
            faults.append(Fault("pairs", text))


def _check(entry: Entry, grid: GridConfig, backbones: list[str]) -> None:
    """Raise UserError with the faults of an entry. Public weights are fetched."""
    if entry.kind in SIDES:
        resolve_name(parsing.build(PretrainConfig, {"data": entry.data(grid)}).data)
    elif entry.kind == "methods" and entry.name not in METHODS:
        raise UserError.of(
            "",
            f"'{entry.name}' is not known, expected one of {', '.join(METHODS)}",
            nearest(entry.name, METHODS),
        )
    elif entry.kind == "backbones" and not isinstance(entry.values.get("kwargs", {}), dict):
        raise UserError.of("kwargs", f"got {entry.values['kwargs']!r}, expected a mapping")
    elif entry.kind == "weights":
        _check_weights(entry.values.get("path"), entry.values.get("backbone"), backbones)


def _check_weights(path: object, backbone: object, backbones: list[str]) -> None:
    faults = []
    if not isinstance(path, str) or not (is_public(path) or expand_home(path).exists()):
        text = f"got {path!r}, expected an existing run folder or file of weights"
        faults.append(Fault("path", text))
    if backbone not in backbones:
        text = f"got {backbone!r}, expected one of {', '.join(backbones)}"
        faults.append(Fault("backbone", text))
    if faults:
        raise UserError(*faults)
    if isinstance(path, str) and is_public(path):
        # torch, which plans without public weights do not need
        from idmm.models.public import public_weights

        public_weights(path, "path")
