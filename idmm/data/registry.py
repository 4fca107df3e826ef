"""The datasets by name, the rows of ``datasets.yaml``: their facts, listing and download."""

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

import yaml

from idmm.config import Data
from idmm.config.commands import DataInfoConfig, DataListConfig
from idmm.config.reading import read_value
from idmm.data import official
from idmm.data.folder import FilesMissing, read_any, read_labelled, root_folder
from idmm.data.split import Listing
from idmm.data.user_lists import read_with_labels
from idmm.errors import RunError, UserError, in_short, reason
from idmm.files import AnyPath, Json, expand_home, holds_run
from idmm.progress import aligned
from idmm.text import listed, nearest

log = logging.getLogger(__name__)

D = TypeVar("D", bound=Data)
TIMEOUT = 60.0  # without a byte (seconds)
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")


@dataclass(frozen=True)
class Spec:
    """Facts about a dataset before its files are read. Figures that come from the data are None."""

    name: str
    title: str
    num_classes: int | None = None
    train_size: int | None = None
    test_size: int | None = None
    metric: str = "top1"  # the literature's: top1, or mean_per_class (reported in addition)
    citation: str = ""
    licence: str = ""  # in a few words, no legal advice
    source: str = ""
    # patterns of the files under data.root, as published. Empty: a package ships it
    layout: Sequence[str] = ()
    archives: dict[str, str] = field(default_factory=dict)  # URLs to download, and their md5 sums
    into: str = ""  # folder under data.root that archives are unpacked (other files: put) into
    manual: str = ""  # how to get it if it cannot be downloaded without a login or at all
    torchvision: Json = field(default_factory=dict)  # how torchvision reads it, if it does


def spec_of(name: str | None) -> Spec:
    """Return the dataset of ``data.name`` as :func:`resolve_name` gives it.

    Raises:
        UserError: It is unknown.
    """
    assert name is not None
    if name in DATASETS:
        return DATASETS[name]
    if os.path.isdir(name):
        raise UserError.of(
            "data.name",
            f"'{name}' is a folder, expected the name of a dataset",
            "Pass a folder by --data.root DIR, or --root DIR of idmm data",
        )
    known = ", ".join(DATASETS)
    raise UserError.of(
        "data.name", f"'{name}' is not known, expected one of {known}", nearest(name, DATASETS)
    )


def resolve_name(data: D) -> tuple[D, list[str]]:
    """Fill in ``data.name``: ``folder`` if there is a root, else ``digits``.

    Returns:
        The section, and lines for the log.

    Raises:
        UserError: The name is unknown, or has no files and is given a root.
    """
    if data.name is None and data.root is None:
        note = (
            "data.name: scikit-learn's digits, as neither --data.name nor --data.root was given. "
            "--data.root DIR takes your own images"
        )
        return replace(data, name="digits"), [note]
    data = replace(data, name=data.name or "folder")
    if not spec_of(data.name).layout and data.root is not None:
        raise UserError.of(
            "data.root",
            f"'{data.root}', but data.name '{data.name}' comes with a package and takes none",
            "Leave it out, or the name, which is then 'folder'",
        )
    return data, []


def check_folder(data: Data, out: str | None) -> None:
    """Raise UserError if a user's folder ``data.root`` is missing, unless ``out`` holds a run.

    A finished run needs its images no longer.
    """
    data, _ = resolve_name(data)
    if data.name == "folder" and not (out and holds_run(out)):
        root_folder(data)


def read_dataset(data: Data, labelled: bool, least_classes: int | None = None) -> Listing:
    """List all images of ``data.name``, with labels if they are needed or the dataset has some.

    ``least_classes`` is as for :func:`idmm.data.listing.list_images`.

    Raises:
        FilesMissing: Files of it are missing or damaged.
        UserError: Images or labels of the user's cannot be used.
    """
    spec = spec_of(data.name)
    if spec.name == "digits":
        return official.read_digits()
    root = root_folder(data)
    if spec.name != "folder":
        return _read_official(spec, root)
    if data.labels is not None:
        return read_with_labels(str(root), data.labels, labelled, least_classes)
    if labelled:
        return read_labelled(str(root), least_classes=least_classes)
    return read_any(str(root))


def _read_official(spec: Spec, root: Path) -> Listing:
    if missing := [pattern for pattern in spec.layout if not any(root.glob(pattern))]:
        raise FilesMissing.of(
            "data.root",
            f"'{root}' lacks {listed(missing)}",
            f"'idmm data info {spec.name}' shows the expected files",
        )
    try:
        if spec.torchvision:
            return official.read_by_torchvision(root, **spec.torchvision)
        return official.READERS[spec.name](root)
    except (LookupError, ValueError, OSError) as error:
        raise FilesMissing.of(
            "data.root", f"a list in '{root}' is damaged ({in_short(error)})"
        ) from None
    except UserError as error:
        raise FilesMissing(*error.faults) from None


_ROWS = read_value((files("idmm.data") / "datasets.yaml").read_text("utf-8"))
DATASETS = {name: Spec(name, **row) for name, row in _ROWS.items()}


# ------------------------------------------------------ the commands idmm data list, info, download
def table(_: DataListConfig) -> str:
    """Return the datasets, one line each."""
    rows = [["name", "classes", "train", "test", "download", "what it is"]]
    for spec in DATASETS.values():
        if spec.archives:
            download = "yes"
        elif spec.manual:
            download = "no"
        else:
            download = "not needed"
        figures = (spec.num_classes, spec.train_size, spec.test_size)
        numbers = ["" if figure is None else f"{figure:,}" for figure in figures]
        rows.append([spec.name, *numbers, download, spec.title])
    return "\n".join(aligned(rows, right=(1, 2, 3)))


def info(command: DataInfoConfig) -> str:
    """Return what is known about a dataset before it is opened, as YAML."""
    spec = spec_of(command.name)
    facts = asdict(spec) | {"archives": list(spec.archives), "into": None, "torchvision": None}
    facts = {name: value for name, value in facts.items() if value}
    return yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=110).rstrip()


def fetch(spec: Spec, root: AnyPath) -> None:
    """Download and unpack a dataset into its ``root``, unless it is there.

    Its files are checked and unpacked aside, then moved into place. Whole files of an interrupted
    call are not fetched again.

    Raises:
        UserError: There is nothing to download it from, or ``root`` cannot be written.
        RunError: The network, a checksum, an archive or the disk failed.
    """
    if not spec.archives:
        raise UserError.of(
            "data.name",
            f"{spec.name} cannot be downloaded: {spec.manual or 'it needs no download'}",
        )
    root = expand_home(root)
    with contextlib.suppress(FilesMissing):
        read_dataset(Data(name=spec.name, root=str(root)), True)
        return
    aside = root / ".idmm"
    shutil.rmtree(aside / "unpacked", ignore_errors=True)  # of a call that was killed
    target = aside / "unpacked" / spec.into
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError.of(
            "data.root", f"cannot write to '{root}' ({reason(error)}), expected a folder"
        ) from None
    from torchvision.datasets.utils import download_url, extract_archive

    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        for url, md5 in spec.archives.items():
            download_url(url, aside, md5=md5)  # unless it is there and whole
            file = aside / os.path.basename(url)
            if url.endswith(_ARCHIVES):
                log.info(f"unpacking {file.name}")
                extract_archive(file, target)
            else:
                shutil.copy(file, target)
    except Exception as error:  # a dozen types of networks, archives and disks
        raise RunError(
            f"{url}: cannot be fetched ({in_short(error)}). "
            "The same command tries again, and keeps the files that are whole"
        ) from None
    finally:
        socket.setdefaulttimeout(timeout)
    # file over file of the same name, which completes a half-unpacked tree
    shutil.copytree(aside / "unpacked", root, copy_function=os.replace, dirs_exist_ok=True)
    shutil.rmtree(aside)
