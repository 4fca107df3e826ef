"""Hugging Face datasets that are stored as tables: ``hfds:NAME`` from the hub, ``hfds:FOLDER`` from a disk."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from idmm import config
from idmm.data.images import BadImage, read
from idmm.data.split import LazyFiles, Split, Splits, arranged
from idmm.errors import UserError, install, listed
from idmm.files import home

log = logging.getLogger(__name__)

PREFIX = "hfds:"
STREAMS = ("hfids:", "wds:", "tfds:")  # timm's names of sources that are read from front to back
STREAMING = (
    "is a stream, which has no index: instance discrimination needs image i to be the same image in every epoch;"
    " wanted hfds:NAME or a folder"
)
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
    """Reads ``data.name`` 'hfds:NAME' from the hub's cache (downloading with ``data.download`` only) or from a folder.

    Raises:
        UserError: The library is missing, the dataset cannot be opened, or its columns cannot be told apart.
    """
    tables = _open(data)
    found = {part: next((n for n in names if n in tables), None) for part, names in _SPLITS.items()}
    if found["train"] is None:
        raise UserError(f"data.name: '{data.name}' has no split 'train', only {listed(sorted(tables))}")
    image, label = _columns(data, tables[found["train"]], labelled)
    try:
        return _splits(data, tables, found, image, label)
    except UserError as error:
        if labelled or label is None:
            raise
        log.warning("%s; going on without labels", error)
        return _splits(data, tables, found, image, None)


def _splits(data: config.Data, tables: dict, found: dict, image: str, label: str | None) -> Splits:
    classes = None if label is None else _classes(tables[found["train"]], label)
    splits = {}
    for part, name in found.items():
        if name is not None:
            splits[part] = _split(data, tables[name], name, image, label, classes)
            if part != "train" and label is not None and splits[part].labels is None:
                log.warning("data.name: '%s': the split '%s' has no labels and is not used", data.name, name)
                splits[part] = None
    return arranged(splits)


def _open(data: config.Data) -> dict:
    given = data.name.removeprefix(PREFIX).strip()
    name = given or data.root
    if not name:
        raise UserError(f"data.name: '{data.name}' names nothing; wanted hfds:NAME, hfds:FOLDER, or a data.root")
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.name: '{data.name}' needs the library datasets: {install('hf')}") from None
    folder = home(name)
    local, saved = folder.is_dir(), _is_saved(folder)
    if not local and (not given or name.startswith(("/", ".", "~")) or name.count("/") > 1):
        what = f"data.name: '{data.name}'" if given else f"data.root: '{name}'"
        raise UserError(f"{what}: there is no such folder; wanted hfds:OWNER/NAME (of the hub) or hfds:FOLDER")
    if local and not saved and (inner := sorted(path.name for path in folder.glob("*") if _is_saved(path))):
        one = f"wanted one of them, e.g. hfds:{folder / inner[0]}"
        raise UserError(f"data.name: '{data.name}' is a folder of saved datasets ({listed(inner)}); {one}")
    try:
        with contextlib.nullcontext() if data.download else _offline():
            if saved:
                opened = datasets.load_from_disk(str(folder))
            else:
                opened = datasets.load_dataset(str(folder) if local else name, cache_dir=None if local else data.root)
    except Exception as error:  # the library raises what it likes
        why = " ".join(str(error).split())[:200] or type(error).__name__
        hint = "" if local or data.download else "; --data.download true fetches it from the hub"
        raise UserError(f"data.name: '{data.name}' cannot be opened ({why}){hint}") from None
    if isinstance(opened, datasets.IterableDatasetDict):
        raise UserError(f"data.name: '{data.name}' {STREAMING}")
    tables = opened if isinstance(opened, datasets.DatasetDict) else {"train": opened}
    return {part: table.with_format(None) for part, table in tables.items()}  # a format may have been saved with it


def _is_saved(folder: Path) -> bool:
    return any(os.path.exists(folder / mark) for mark in ("dataset_dict.json", "state.json"))


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keeps both libraries from the network inside the block."""
    import datasets
    import huggingface_hub

    with contextlib.ExitStack() as undo:
        for module in (datasets.config, huggingface_hub.constants):
            undo.callback(setattr, module, "HF_HUB_OFFLINE", module.HF_HUB_OFFLINE)
            module.HF_HUB_OFFLINE = True
        yield


def _columns(data: config.Data, table, labelled: bool) -> tuple[str, str | None]:
    """The columns of images and of classes; no second one where there is none and none is needed."""
    import datasets

    def of(*kinds) -> list[str]:
        return [name for name, feature in table.features.items() if isinstance(feature, kinds)]

    images, classes = of(datasets.Image), of(datasets.ClassLabel, datasets.Value)
    likely = of(datasets.ClassLabel) or [name for name in ("label", "labels") if name in classes]
    return (
        _column(data, "image_column", "images", images, images, needed=True),
        _column(data, "label_column", "classes", classes, likely, needed=labelled and bool(classes)),
    )


def _column(data: config.Data, field: str, kind: str, columns: list, likely: list, needed: bool) -> str | None:
    """The column that the config names, else the only likely one; None where neither is, unless one is needed."""
    given = getattr(data, field)
    if given in columns or (given is None and len(likely) == 1):
        return given or likely[0]
    if given is None and not needed:
        return None
    what = f"'{data.name}' wants it named" if given is None else f"'{given}' is no column of {kind}"
    there = columns if given is not None else likely or columns
    raise UserError(f"data.{field}: {what}; {f'there are {listed(there)}' if there else 'there is none'}")


def _classes(table, label: str) -> list[str]:
    feature = table.features[label]
    if hasattr(feature, "names"):
        return list(feature.names)
    return [str(value) for value in sorted(set(table[label]) - {None, -1})]


def _split(data: config.Data, table, name: str, image: str, label: str | None, classes: list[str] | None) -> Split:
    import datasets

    if not isinstance(table.features.get(image), datasets.Image):
        raise UserError(f"data.name: '{data.name}': the split '{name}' has no column '{image}' of images")
    labels = None if label not in table.features else _labels(data, table, name, label, classes)
    images = table.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    names = [f"{name}/{i:06d}" for i in range(len(table))]
    return Split(HubFiles(images, image, np.arange(len(table))), names, labels, None if labels is None else classes)


def _labels(data: config.Data, table, name: str, label: str, classes: list[str]) -> np.ndarray | None:
    """Class numbers; None for a split whose labels are kept back (all -1 or empty)."""
    values = list(table[label])
    if all(value is None or value == -1 for value in values):
        return None
    own = getattr(table.features[label], "names", None)  # a split may number the classes in its own way
    named = ((value, str(value)) for value in set(values) - {None}) if own is None else enumerate(own)
    number = {key: i for i, key in enumerate(classes)}
    index = {value: number[key] for value, key in named if key in number}
    wrong = next((i for i, value in enumerate(values) if value not in index), None)
    if wrong is not None:
        what = f"row {wrong} of split '{name}' has {label} {values[wrong]!r}"
        raise UserError(f"data.name: '{data.name}': {what}, wanted one of {len(classes)} classes")
    return np.array([index[value] for value in values], dtype=np.int64)
