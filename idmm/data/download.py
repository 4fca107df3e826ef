"""Download of a dataset: its files are checked and unpacked aside, then moved into place."""

import contextlib
import logging
import os
import shutil
import socket
import tarfile
import zipfile
import zlib

from idmm import config
from idmm.data.folder import FilesMissing
from idmm.data.registry import Spec, read_dataset
from idmm.errors import RunError, UserError, in_short, reason
from idmm.files import expand_home

log = logging.getLogger(__name__)

TIMEOUT = 60.0  # without a byte (seconds)
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".zip")
_FAILED = (OSError, RuntimeError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error)


def file_name(url: str) -> str:
    """Return the name of the file at a URL."""
    return url.rpartition("/")[2].partition("?")[0]


def fetch(spec: Spec, root: str | os.PathLike) -> None:
    """Download and unpack a dataset into its ``root``, unless it is there.

    Whole files of an interrupted call are not fetched again.

    Raises:
        UserError: There is nothing to download it from, or ``root`` cannot be written.
        RunError: The network, a checksum, an archive or the disk failed.
    """
    if not spec.archives:
        raise UserError(f"data.name: {spec.name} cannot be downloaded: {spec.manual or 'it needs no download'}")
    root = expand_home(root)
    with contextlib.suppress(FilesMissing):
        read_dataset(config.Data(name=spec.name, root=str(root)), True)
        return
    aside = root / ".idmm"
    shutil.rmtree(aside / "unpacked", ignore_errors=True)  # of a call that was killed
    target = aside / "unpacked" / spec.into
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.root: cannot write to '{root}' ({reason(error)}), expected a folder") from None
    from torchvision.datasets.utils import download_url, extract_archive

    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        for url, md5 in spec.archives.items():
            name = file_name(url)
            download_url(url, aside, name, md5)  # unless it is there and whole
            if name.endswith(_ARCHIVES):
                log.info("unpacking %s", name)
                extract_archive(aside / name, target)
            else:
                shutil.copy(aside / name, target)
    except _FAILED as error:
        rest = "The same command tries again, and keeps the files that are whole"
        raise RunError(f"{url}: cannot be fetched ({in_short(error)}). {rest}") from None
    finally:
        socket.setdefaulttimeout(timeout)
    # file over file of the same name, which completes a half-unpacked tree
    shutil.copytree(aside / "unpacked", root, copy_function=os.replace, dirs_exist_ok=True)
    shutil.rmtree(aside)
