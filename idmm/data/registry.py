"""The datasets by name: the rows of ``datasets.yaml``, each with the function that reads its files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import yaml

from idmm import config
from idmm.data.readers import folder, labels, libraries, lists
from idmm.data.readers.layout import root_folder
from idmm.data.split import Listing
from idmm.errors import UserError, nearest
from idmm.files import begun


@dataclass(frozen=True)
class Archive:
    """A file to download, and the folder under ``data.root`` that it is unpacked (if no archive: put) into."""

    url: str
    md5: str
    into: str = ""

    @property
    def name(self) -> str:
        """Its file name."""
        return self.url.rpartition("/")[2].partition("?")[0]


@dataclass(frozen=True)
class Spec:
    """What is known of a dataset before its files are read; figures are None where they come from the data."""

    name: str
    read: Callable[[config.Data, bool], Listing]
    """Given the config's ``data`` section and whether labels are wanted, returns all that the dataset has, before
    ``val_fraction`` and ``subset``. Raises UserError."""
    title: str
    num_classes: int | None = None
    train_size: int | None = None
    test_size: int | None = None
    metric: str = "top1"  # what the literature reports: top1, or mean_per_class (then reported beside top-1)
    citation: str = ""
    licence: str = ""  # what its publishers allow, in a few words; no legal advice
    source: str = ""
    layout: tuple[str, ...] = ()  # files and folders that it needs under data.root, as published
    archives: tuple[Archive, ...] = ()
    manual: str = ""  # how to get it where it cannot be downloaded without a login or at all

    @property
    def embedded(self) -> bool:
        """Whether a package ships it: it has no files and no ``data.root``."""
        return not self.layout


def spec_of(name: str) -> Spec:
    """Returns the dataset of ``data.name``; UserError where it is unknown."""
    if name in DATASETS:
        return DATASETS[name]
    raise UserError(f"data.name: '{name}' is not known; wanted one of {', '.join(DATASETS)}{nearest(name, DATASETS)}")


def resolve_name(data: config.Data) -> tuple[config.Data, list[str]]:
    """Fills in ``data.name``: ``folder`` where there is a root, else ``digits``.

    Returns:
        The section, and lines for the log.

    Raises:
        UserError: The name is unknown, or has no files and is given a root.
    """
    if data.name is None and data.root is None:
        why = "neither --data.name nor --data.root was given; --data.root DIR takes your own images"
        return replace(data, name="digits"), [f"data.name: scikit-learn's digits, as {why}"]
    data = replace(data, name=data.name or "folder")
    if spec_of(data.name).embedded and data.root is not None:
        what = f"'{data.root}', but data.name '{data.name}' comes with a package and takes none"
        raise UserError(f"data.root: {what}; leave it out, or the name, which is then 'folder'")
    return data, []


def check_folder(data: config.Data, out: str | None) -> None:
    """Raises UserError where ``data.root`` names a user's folder that is not there, unless ``out`` holds a run already:
    of a finished one the images are not needed any more."""
    data, _ = resolve_name(data)
    if data.name == "folder" and not (out and begun(out)):
        root_folder(data)


def _at_root(read: Callable[[Path], Listing]) -> Callable[[config.Data, bool], Listing]:
    return lambda data, labelled: read(root_folder(data))


def _read_folder(data: config.Data, labelled: bool) -> Listing:
    root = str(root_folder(data))
    if data.labels is not None:
        return labels.read_with_labels(root, data.labels, labelled)
    return (folder.read_labelled if labelled else folder.read_any)(root)


_OTHERS = {"digits": libraries.read_digits, "folder": _read_folder}


def _registered() -> dict[str, Spec]:
    text = (files("idmm.data") / "datasets.yaml").read_text(encoding="utf-8")
    specs = {}
    for name, row in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)).items():
        row["layout"] = tuple(row.get("layout", ()))
        into = row.pop("into", "")
        row["archives"] = tuple(Archive(url, md5, into) for url, md5 in row.get("archives", {}).items())
        _, is_domain, domain = name.partition("domainnet-")
        if is_domain:
            read = _at_root(partial(lists.read_domainnet, domain=domain))
        else:
            read = _OTHERS.get(name) or _at_root(
                getattr(lists, f"read_{name}", None) or getattr(libraries, f"read_{name}")
            )
        specs[name] = Spec(name, read, **row)
    return specs


DATASETS: dict[str, Spec] = _registered()
