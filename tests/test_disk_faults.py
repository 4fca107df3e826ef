"""The cache on a disk where things go wrong: kills, several processes at once, torn files, no room,
no permission."""

import errno
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections import namedtuple

import pytest
from folders import entry_of, opened, paint, same, sums
from helpers import temporary
from tqdm import tqdm

from idmm.data import image_store, images

COUNT = 12
SIZE = (80, 60)
BYTES = COUNT * 80 * 60 * 3
processes = multiprocessing.get_context("fork")  # real ones, without the seconds of an import each


@pytest.fixture
def root(tmp_path):
    for i in range(COUNT):
        paint(tmp_path / f"images/{i:02d}.png", i, SIZE)
    return tmp_path / "images"


def pretend_free(monkeypatch, free):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, free))


def hang(reached):
    """Stops the process for good, and says so."""
    reached.set()
    time.sleep(600)


def stop_at(moment, reached):
    """Patches this process, which is to be killed, so that it stops at a moment of the build."""
    read = images.read_image
    replace = os.replace
    done = []

    def decode(*args, **named):
        done.append(None)
        if moment == "half of the images" and len(done) == COUNT // 2:
            hang(reached)
        return read(*args)

    def rename(source, target):
        name = os.path.splitext(target)[1]
        replace(source, target)
        if moment == f"{name} in place":
            hang(reached)

    images.read_image = decode
    os.replace = rename


MOMENTS = ["half of the images", ".pixels in place", ".npz in place"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_while_building(root, decoded, moment):
    opened(root)  # something old is there, too
    paint(root / "99.png", 99, SIZE)
    reached = processes.Event()
    child = processes.Process(target=lambda: (stop_at(moment, reached), opened(root)))
    child.start()
    assert reached.wait(60)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    finished = moment == ".npz in place"
    assert len(temporary(entry_of(root))) == (0 if "in place" in moment else 1)
    decoded.clear()
    store = opened(root)
    assert len(decoded) == (0 if finished else COUNT + 1)
    assert not store.decodes
    assert same(store, opened(root, keep="off"))
    assert temporary(root.parent / "cache") == []
    assert len(list(entry_of(root).glob("*.pixels"))) == 1 + finished
    decoded.clear()
    assert same(opened(root), store)
    assert not decoded


def test_three_start_at_once_and_one_builds(root, tmp_path):
    journal = tmp_path / "journal"
    start = processes.Barrier(3)
    answers = processes.Queue()

    read = images.read_image

    def slowed(*args):
        with open(journal, "a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.02)
        return read(*args)

    def run():
        images.read_image = slowed
        start.wait(60)
        store = opened(root)
        answers.put((store.decodes, sums(store)))

    children = [processes.Process(target=run) for _ in range(3)]
    for child in children:
        child.start()
    results = [answers.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    decoders = journal.read_text().split()
    assert len(decoders) == COUNT
    assert len(set(decoders)) == 1
    assert results == [(False, sums(opened(root, keep="off")))] * 3


TORN = {
    "pixels cut": lambda index, pixels: os.truncate(pixels, BYTES - 1),
    "index half": lambda index, pixels: os.truncate(index, index.stat().st_size // 2),
    "index spoilt": lambda index, pixels: index.write_bytes(
        (b := index.read_bytes())[:200] + bytes(100) + b[300:]
    ),
}


@pytest.mark.parametrize("what", TORN)
def test_what_is_torn_is_built_again(root, decoded, what):
    expected = opened(root, keep="off")
    opened(root)
    TORN[what](*sorted(entry_of(root).iterdir()))
    image_store._mapped.cache_clear()  # as in another process
    decoded.clear()
    store = opened(root)
    assert len(decoded) == COUNT
    assert same(store, expected)
    assert sorted(path.suffix for path in entry_of(root).iterdir()) == [
        ".npz",
        ".pixels",
    ]


def test_a_whole_entry_on_a_read_only_disk_is_used(root, decoded, monkeypatch, caplog):
    store = opened(root)

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(image_store.Lock, "acquire", refuse)
    decoded.clear()
    assert same(opened(root), store)
    assert not decoded
    paint(root / "99.png", 99, SIZE)
    assert opened(root).decodes
    assert "(read-only file system): images are decoded at each use" in caplog.text


def test_too_little_room_is_seen_before(root, decoded, monkeypatch, caplog):
    """Half of what is free is taken at most."""
    caplog.set_level(logging.INFO)
    pretend_free(monkeypatch, 2 * BYTES - 2)
    store = opened(root)
    assert store.decodes
    assert len(decoded) == COUNT
    assert same(store, opened(root, keep="off"))
    free, size = (tqdm.format_sizeof(count, "B") for count in (2 * BYTES - 2, BYTES))
    line = f"'{root.parent}/cache' has {free} free, the decoded images need about {size}"
    assert f"cache: {line}: images are decoded at each use" in caplog.text
    pretend_free(monkeypatch, 2 * BYTES)
    assert not opened(root).decodes
    pretend_free(monkeypatch, 0)
    assert not opened(root).decodes, "it is there already"
