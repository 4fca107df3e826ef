"""Tables of Hugging Face: ``hfds:NAME`` from the hub, ``hfds:FOLDER`` from a disk."""

import contextlib
from unittest import mock

import numpy as np

from idmm import config
from idmm.data.formats import BadImage
from idmm.data.images import read
from idmm.data.split import LazyFiles, Split, Splits, arranged
from idmm.errors import UserError, in_short, listed, needed
from idmm.files import home

PREFIX = "hfds:"
_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}


class HubFiles(LazyFiles):
    """The encoded images of some rows of a ``datasets.Dataset`` of nothing but an image column, not decoded."""

    def __init__(self, table, column: str, rows: np.ndarray):
        self.table, self.column, self.rows = table, column, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> bytes:
        cell = self.table[int(self.rows[i])][self.column]
        if cell is None or cell["bytes"] is cell["path"] is None:
            raise BadImage("no image in this row")
        return cell["bytes"] if cell["bytes"] is not None else read(cell["path"])

    def select(self, indices: np.ndarray) -> "HubFiles":
        return HubFiles(self.table, self.column, self.rows[indices])

    @property
    def version(self) -> str:
        return f"{self.table._fingerprint} {self.column}"


def read_hub(data: config.Data, labelled: bool) -> Splits:
    """Reads ``data.name`` from a folder, the hub's cache or, with ``data.download``, the hub; UserError if it cannot be
    opened or its columns cannot be told apart."""
    needed(f"data.name: '{data.name}'", ["datasets"], "hf")
    import datasets
    from huggingface_hub import constants

    name, hint = data.name.removeprefix(PREFIX), "" if data.download else "; --data.download true fetches it"
    try:
        with contextlib.ExitStack() as stack:
            for module in () if data.download else (datasets.config, constants):
                stack.enter_context(mock.patch.object(module, "HF_HUB_OFFLINE", True))
            saved = any((home(name) / mark).exists() for mark in ("dataset_dict.json", "state.json"))
            tables = datasets.load_from_disk(str(home(name))) if saved else datasets.load_dataset(name)
    except Exception as error:  # the library raises what it likes
        raise UserError(f"data.name: '{data.name}' cannot be opened ({in_short(error)}){hint}") from None
    tables = {"train": tables} if isinstance(tables, datasets.Dataset) else tables
    found = {part: next((n for n in names if n in tables), None) for part, names in _SPLITS.items()}
    if found["train"] is None:
        raise UserError(f"data.name: '{data.name}' has no split 'train', only {listed(sorted(tables))}")
    features = tables[found["train"]].features
    image = _column(data, "image_column", [key for key, kind in features.items() if isinstance(kind, datasets.Image)])
    classes = [key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    label = _column(data, "label_column", classes) if labelled or len(classes) == 1 else None
    return arranged({part: _split(tables[name], name, image, label) for part, name in found.items() if name})


def _column(data: config.Data, field: str, columns: list[str]) -> str:
    """Returns the column that the config names, else the only one."""
    given = getattr(data, field)
    if given in columns or (given is None and len(columns) == 1):
        return given or columns[0]
    raise UserError(f"data.{field}: {given} is not one of the columns of '{data.name}': {listed(columns) or 'none'}")


def _split(table, name: str, image: str, label: str | None) -> Split | None:
    """Returns a split; None for one to evaluate on whose labels are kept back (-1 or none)."""
    import datasets

    table = table.with_format(None)
    images = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    items, names = HubFiles(images, image, np.arange(len(table))), [f"{name}/{i:06d}" for i in range(len(table))]
    if label is None:
        return Split(items, names, None, None)
    labels = np.array([-1 if value is None else value for value in table[label]])
    if labels.min() >= 0:
        return Split(items, names, labels, list(table.features[label].names))
    if name == "train":
        raise UserError(f"data.label_column: '{label}' has no class in row {labels.argmin()} of split 'train'")
    return None
