"""A server on loopback that can be told to fail, and datasets in miniature for it to serve."""

import contextlib
import dataclasses
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import official_trees
import pytest

from idmm.data.download import fetch
from idmm.data.registry import DATASETS, Archive
from idmm.errors import RunError

CONTENT = np.random.default_rng(0).bytes(300_000)


class Server(ThreadingHTTPServer):
    """Serves bytes by path, in parts where it is asked to.

    Attributes:
        files: Content by path.
        asked: Path and Range of every request so far.
        orders: What to do at the next requests: {"status": 503}, {"cut": n} (close after n bytes), {"stall": n} (say
            nothing more after n bytes), {"wait": event} (before it answers), {"content": bytes}; {}: as it should.
        always: What to do when there are no orders left.
        ranges: Whether it knows Range.
    """

    daemon_threads = True

    def __init__(self, handler=None):
        super().__init__(("127.0.0.1", 0), handler or _Handler)
        self.files, self.asked, self.orders, self.always, self.ranges = {}, [], [], {}, True
        self.over = threading.Event()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"

    def archive(self, path, content, into="", checksum=None):
        """Serves a file; returns what a spec says of it."""
        self.files[path] = content
        return Archive(self.url(path), checksum or f"md5:{hashlib.md5(content).hexdigest()}", into)

    def handle_error(self, request, client_address):
        pass  # a client that was killed

    @classmethod
    @contextlib.contextmanager
    def running(cls):
        with cls() as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield server
            finally:
                server.over.set()
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        asked = self.headers.get("Range")
        self.server.asked.append((self.path, asked))
        order = self.server.orders.pop(0) if self.server.orders else self.server.always
        if "wait" in order:
            order["wait"].wait()
        content = order.get("content", self.server.files.get(self.path))
        status = order.get("status", 200 if content is not None else 404)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        if status == 200 and start:
            status = 206 if start < len(content) else 416
        self.send_response(status)
        if status >= 400:
            if status == 416:
                self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        few = order.get("cut", order.get("stall"))
        self.wfile.write(content[start:] if few is None else content[start : start + few])
        if "stall" in order:
            self.server.over.wait()


MEMBERS = {  # what the official archives hold, which goes into the dataset's folder
    "102flowers.tgz": "jpg", "images.tar.gz": "images", "annotations.tar.gz": "annotations", "dtd-r1.0.1.tar.gz": "dtd",
    "indoorCVPR_09.tar": "Images", "CUB_200_2011.tgz": "CUB_200_2011",
    "fgvc-aircraft-2013b.tar.gz": "fgvc-aircraft-2013b", "cifar-10-python.tar.gz": "cifar-10-batches-py",
    "cifar-100-python.tar.gz": "cifar-100-python", **{f"{domain}.zip": domain for domain in official_trees.DOMAINS},
}  # fmt: skip


def miniature(server, name, folder, **more):
    """Builds a dataset in a folder and serves it as its publishers pack it; returns its row of the registry."""
    official_trees.BUILD[name](folder, **more)
    archives = []
    for archive in DATASETS[name].archives:
        if archive.name in MEMBERS:
            content = packed(archive.name, folder / archive.into, MEMBERS[archive.name])
        else:
            (file,) = folder.rglob(archive.name)
            content = file.read_bytes()
        archives.append(server.archive(f"/{name}/{archive.name}", content, archive.into))
    return spec(name, archives)


def packed(name, folder, entry):
    """A tar or zip, by its name, of a file or folder in a folder."""
    file = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(file, "w") as archive:
            for path in sorted((folder / entry).rglob("*")):
                archive.write(path, path.relative_to(folder))
    else:
        with tarfile.open(fileobj=file, mode="w" if name.endswith(".tar") else "w:gz") as archive:
            archive.add(folder / entry, entry)
    return file.getvalue()


def tarred(content, mode="w:gz"):
    """A tar of {name: bytes}; a TarInfo in the place of the bytes goes in as it is."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in content.items():
            entry = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if entry is data else data
            entry.name, entry.size = name, len(data)
            archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


def zipped(*entries):
    """A zip of pairs of a name or ZipInfo and its bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for entry, data in entries:
            archive.writestr(entry, data)
    return file.getvalue()


def spec(name, archives):
    """A row of the registry that is fetched from elsewhere and has no figures."""
    return dataclasses.replace(
        DATASETS[name], archives=tuple(archives), num_classes=None, train_size=None, test_size=None
    )


# ------------------------------------------------------------------ what comes of it
def one(server, content=CONTENT, name="file.bin", **fields):
    """A dataset of one file."""
    return spec("svhn", [dataclasses.replace(server.archive(f"/{name}", content), **fields)])


def fails(row, root):
    """The line of the RunError that fetching ends with."""
    with pytest.raises(RunError) as caught:
        fetch(row, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ranges(server):
    """What was asked for since the last look: the first byte of each request, 0 without Range."""
    asked = [int((header or "bytes=0-")[6:-1]) for _, header in server.asked]
    server.asked.clear()
    return asked


def files(root):
    """Files and links under a folder, without what is hidden."""
    paths = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    names = [path.relative_to(root).as_posix() for path in paths]
    return sorted(name for name in names if not name.startswith(".idmm/"))


def hidden(root):
    return sorted(path.name for path in (root / ".idmm").iterdir())


def begun(root, content, name="file.bin"):
    """As if an earlier run had fetched so much of it."""
    (root / ".idmm").mkdir(parents=True, exist_ok=True)
    (root / f".idmm/{name}.part").write_bytes(content)
