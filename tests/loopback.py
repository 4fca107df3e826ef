"""A server on loopback that can be told to fail, and datasets in miniature for it to serve."""

import contextlib
import dataclasses
import hashlib
import io
import os
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import official_trees

from idmm.data.registry import DATASETS


class Server(ThreadingHTTPServer):
    """Serves bytes by path.

    Attributes:
        files: Content by path.
        asked: Path of every request so far.
        orders: What to do at the next requests: {"status": 503}, {"cut": n} (close after n bytes),
            {"stall": n} (send nothing more after n bytes), {"wait": event} (before it answers).
    """

    daemon_threads = True

    def __init__(self, handler=None):
        super().__init__(("127.0.0.1", 0), handler or _Handler)
        self.files = {}
        self.asked = []
        self.orders = []
        self.over = threading.Event()

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"

    def archive(self, path, content):
        """Serves a file; returns its URL and its md5 sum."""
        self.files[path] = content
        return self.url(path), hashlib.md5(content).hexdigest()

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
        if self.headers.get("Method") == "HEAD":  # torchvision looks for redirections first
            self.send_response(200)
            self.end_headers()
            return
        self.server.asked.append(self.path)
        order = self.server.orders.pop(0) if self.server.orders else {}
        if "wait" in order:
            order["wait"].wait()
        content = self.server.files.get(self.path, b"")
        self.send_response(order.get("status", 200))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: order.get("cut", order.get("stall"))])
        if "stall" in order:
            self.server.over.wait()


MEMBERS = {  # what the official archives hold, which goes into the dataset's folder
    "102flowers.tgz": "jpg",
    "images.tar.gz": "images",
    "annotations.tar.gz": "annotations",
    "dtd-r1.0.1.tar.gz": "dtd",
    "indoorCVPR_09.tar": "Images",
    "CUB_200_2011.tgz": "CUB_200_2011",
    "fgvc-aircraft-2013b.tar.gz": "fgvc-aircraft-2013b",
    "cifar-10-python.tar.gz": "cifar-10-batches-py",
    "cifar-100-python.tar.gz": "cifar-100-python",
    **{f"{domain}.zip": domain for domain in official_trees.DOMAINS},
}


def miniature(server, name, folder, **more):
    """Builds a dataset in a folder and serves it as its publishers pack it; returns its row of the
    registry."""
    official_trees.BUILD[name](folder, **more)
    spec = DATASETS[name]
    archives = []
    for file in map(os.path.basename, spec.archives):
        if file in MEMBERS:
            content = packed(file, folder / spec.into, MEMBERS[file])
        else:
            (path,) = folder.rglob(file)
            content = path.read_bytes()
        archives.append(server.archive(f"/{name}/{file}", content))
    free = dict.fromkeys(("num_classes", "train_size", "test_size"))  # whatever the sizes
    return dataclasses.replace(spec, archives=dict(archives), **free)


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
