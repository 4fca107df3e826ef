"""The cache on a disk where things go wrong: kills, several processes at once, torn files, no room, no permission."""

import errno
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
from folders import entry_of, faults, opened, paint, same, section, sums
from helpers import temporary

from idmm.data import cache, disk
from idmm.data.datasets import open_splits
from idmm.errors import RunError
from idmm.progress import size as size_of

COUNT, SIZE = 12, (80, 60)
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


# ---- kills ----


def hang(reached):
    """Stops the process for good, and says so."""
    reached.set()
    time.sleep(600)


def stop_at(moment, reached):
    """Patches this process, which is to be killed, so that it stops at a moment of the build."""
    load, replace, done = cache.load, os.replace, []

    def decode(*args):
        done.append(None)
        if len(done) == {"the first image": 1, "half of the images": COUNT // 2}.get(moment):
            hang(reached)
        return load(*args)

    def rename(source, target):
        name = os.path.basename(target).partition("-")[0]
        if moment == f"{name} written":
            hang(reached)
        replace(source, target)
        if moment == f"{name} in place":
            hang(reached)

    def save(file, **arrays):
        file.write(b"PK\x03\x04 and no more")
        file.flush()
        hang(reached)

    cache.load, os.replace = decode, rename
    if moment == "half of the index":
        np.savez = save


MOMENTS = ["the first image", "half of the images", "pixels written", "pixels in place", "about.json in place"]
MOMENTS += ["half of the index", "index.npz written", "index.npz in place"]


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
    finished = moment == "index.npz in place"
    assert len(temporary(entry_of(root))) == (0 if "in place" in moment else 1)
    decoded.clear()
    store = opened(root)
    assert len(decoded) == (0 if finished else COUNT + 1)
    assert store.cache == "disk" and same(store, opened(root, keep="ram"))
    assert temporary(root.parent / "cache") == [] and len(list(entry_of(root).glob("pixels-*"))) == 1 + finished
    decoded.clear()
    assert same(opened(root), store) and not decoded


def test_the_index_comes_last_and_all_is_on_the_disk_before_it_has_its_name(root, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(os.fstat(handle).st_size), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append(paths[1].name.partition("-")[0]), replace(*paths)))
    opened(root)
    sizes = [(entry_of(root) / name).stat().st_size for name in ("about.json", "index.npz")]
    assert calls == [BYTES, "pixels", sizes[0], "about.json", sizes[1], "index.npz"]


def test_room_that_a_kill_took_is_given_back_before_it_is_counted(root, monkeypatch):
    opened(root)
    folder = entry_of(root)
    (folder / "index.npz").unlink()
    left = folder / ".pixels-00.part-x"
    left.touch()
    monkeypatch.setattr(disk.CacheEntry, "free", lambda self: 0 if left.exists() else 10 * BYTES)
    assert opened(root).cache == "disk"


# ---- several at once ----


def test_three_start_at_once_and_one_builds(root, tmp_path):
    journal, start, answers = tmp_path / "journal", processes.Barrier(3), processes.Queue()

    def run():
        load = cache.load

        def slowed(*args):
            with open(journal, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.02)
            return load(*args)

        cache.load = slowed
        start.wait(60)
        store = opened(root)
        answers.put((store.cache, sums(store)))

    children = [processes.Process(target=run) for _ in range(3)]
    for child in children:
        child.start()
    found = [answers.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    decoders = journal.read_text().split()
    assert len(decoders) == COUNT and len(set(decoders)) == 1
    assert found == [("disk", sums(opened(root, keep="ram")))] * 3


def test_one_that_waits_says_so_and_builds_what_a_killed_one_left(root, decoded, caplog):
    caplog.set_level(logging.INFO)
    reached = processes.Event()
    child = processes.Process(target=lambda: (stop_at("half of the images", reached), opened(root)))
    child.start()
    assert reached.wait(60)
    killer = threading.Thread(target=lambda: (time.sleep(0.3), os.kill(child.pid, signal.SIGKILL)))
    killer.start()
    begun = time.monotonic()
    store = opened(root)
    assert time.monotonic() - begun > 0.25 and len(decoded) == COUNT
    killer.join()
    child.join()
    assert f"cache: waiting for another process that fills '{entry_of(root)}'" in caplog.text
    assert same(store, opened(root, keep="ram")) and temporary(entry_of(root)) == []


def test_an_entry_that_is_cleared_or_replaced_while_it_is_opened(root, decoded, monkeypatch):
    """Between the index and the pixels; what is under the lock is safe."""
    wanted, mapped, read = opened(root, keep="ram"), cache.mapped, disk.CacheEntry.read

    def clear_once(path, count):
        monkeypatch.setattr(cache, "mapped", mapped)
        assert disk.clear(root.parent / "cache")[0] > 0
        return mapped(path, count)

    opened(root)
    decoded.clear()
    monkeypatch.setattr(cache, "mapped", clear_once)
    assert same(opened(root), wanted) and len(decoded) == COUNT

    def clear_before_lock(self):
        monkeypatch.setattr(disk.CacheEntry, "read", read)
        assert disk.clear(root.parent / "cache")[0] > 0

    monkeypatch.setattr(disk.CacheEntry, "read", clear_before_lock)
    assert same(opened(root), wanted) and len(decoded) == 2 * COUNT


# ---- torn files ----


def with_arrays(index, **changes):
    """Changes the index; None removes an array."""
    arrays = {**np.load(index), **changes}
    np.savez(index, **{name: array for name, array in arrays.items() if array is not None})


TORN = {
    "pixels cut": lambda index, pixels: os.truncate(pixels, BYTES - 1),
    "pixels grown": lambda index, pixels: os.truncate(pixels, BYTES + 1),
    "pixels gone": lambda index, pixels: pixels.unlink(),
    "pixels of others": lambda index, pixels: pixels.rename(pixels.with_name("pixels-00112233")),
    "index of others": lambda index, pixels: with_arrays(index, signature=np.array("00112233")),
    "array missing": lambda index, pixels: with_arrays(index, sizes=None),
    "index half": lambda index, pixels: os.truncate(index, index.stat().st_size // 2),
    "index spoilt": lambda index, pixels: index.write_bytes((b := index.read_bytes())[:200] + bytes(100) + b[300:]),
    "index empty": lambda index, pixels: index.write_bytes(b""),
    "index gone": lambda index, pixels: index.unlink(),
    "about.json gone": lambda index, pixels: index.with_name("about.json").unlink(),
}


@pytest.mark.parametrize("what", TORN)
def test_what_is_torn_is_built_again(root, decoded, what):
    wanted = opened(root, keep="ram")
    opened(root)
    TORN[what](entry_of(root) / "index.npz", next(entry_of(root).glob("pixels-*")))
    decoded.clear()
    assert same(opened(root), wanted) and len(decoded) == COUNT
    assert sorted(path.name.partition("-")[0] for path in entry_of(root).iterdir()) == [
        "about.json", "index.npz", "pixels",
    ]  # fmt: skip


# ---- no permission ----


def test_a_folder_that_cannot_be(root, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    for place, why in ((tmp_path / "file", "file exists|not a directory"), (tmp_path / "file/x", "not a directory")):
        (line,) = faults(opened, root, cache_dir=str(place))
        before, _, after = line.partition(" (")
        assert before == f"data.cache_dir: cannot write to '{place}'"
        reason, _, advice = after.partition(")")
        assert reason in why.split("|") and advice == "; name another folder, or --data.cache ram"
        caplog.clear()
        store = opened(root, keep="auto", cache_dir=str(place))
        assert store.cache == "ram" and same(store, opened(root, keep="ram"))
        assert f"{line}: using memory instead" in caplog.text


def test_a_whole_entry_on_a_read_only_disk_is_used(root, decoded, monkeypatch):
    store = opened(root)
    folder = root.parent / "cache"

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk.Lock, "acquire", refuse)
    decoded.clear()
    assert same(opened(root), store) and not decoded
    with pytest.raises(RunError, match=r"^.*: cannot be removed \(Read-only file system\)$"):
        disk.clear(folder)
    paint(root / "99.png", 99, SIZE)
    assert faults(opened, root) == [
        f"data.cache_dir: cannot write to '{folder}' (read-only file system); name another folder, or --data.cache ram"
    ]
    assert opened(root, keep="auto").cache == "ram"


# ---- no room ----


def loading(root, bound, **fields):
    data = section(root, **fields)
    return cache._Loading(open_splits(data, labelled=False).train, bound, data, False, "auto", bands=None, again=False)


@pytest.mark.parametrize("bound", [None, 16])
def test_the_estimate(root, bound):
    for i in range(100, 200):
        paint(root / f"{i}.png", i, SIZE[::-1] if i % 2 else SIZE)
    true = int(opened(root, bound, keep="off").sizes.prod(axis=1).sum()) * 3
    assert loading(root, bound).estimate() == pytest.approx(true, rel=0.03)
    for i in range(0, 200, 2):
        (root / f"{i:02d}.png").write_bytes(b"")  # now 106 are good, 100 are not
    (root / "199.png").unlink()
    paint(root / "199.png", 0, (4000, 20))  # a bomb
    skip = {"on_error": "skip", "max_pixels": 79_999}
    true = int(opened(root, bound, keep="off", **skip).sizes.prod(axis=1).sum()) * 3
    assert loading(root, bound, **skip).estimate() == pytest.approx(true, rel=0.25)
    for path in root.glob("*"):
        path.write_bytes(b"")
    assert loading(root, bound).estimate() == 0


def test_too_little_room_is_seen_before(root, decoded, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    folder, need = root.parent / "cache", f"about {size_of(BYTES)}"
    pretend_free(monkeypatch, BYTES - 1)
    assert faults(opened, root) == [
        f"data.cache_dir: '{folder}' has {size_of(BYTES - 1)} free, the decoded images need {need};"
        " name another folder, or --data.cache ram or off"
    ]
    assert not decoded
    pretend_free(monkeypatch, 2 * BYTES - 2)  # 'auto' takes half at most
    store = opened(root, keep="auto")
    assert store.cache == "ram" and len(decoded) == COUNT and same(store, opened(root, keep="off"))
    what = f"'{folder}' has {size_of(2 * BYTES - 2)} free, the decoded images need {need}: not kept there"
    assert f"cache: {what}" in caplog.text
    pretend_free(monkeypatch, 2 * BYTES)
    assert opened(root, keep="auto").cache == "disk"
    pretend_free(monkeypatch, 0)
    assert opened(root).cache == opened(root, keep="auto").cache == "disk"  # it is there already


def limited(root, keep, answers):
    """Loads where no file may grow beyond half of the pixels; a real process, as the limit cannot be undone."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES // 2, BYTES // 2))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    messages = []
    cache.log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: messages.append(record.getMessage())
    try:
        store = opened(root, keep=keep)
        answers.put((store.cache, sums(store), messages))
    except Exception as error:
        answers.put((type(error), str(error), messages))


def test_the_disk_fills_while_pixels_are_written(root, decoded):
    ram, answers, found = opened(root, keep="ram"), processes.Queue(), {}
    for keep in ("disk", "auto"):
        child = processes.Process(target=limited, args=(root, keep, answers))
        child.start()
        found[keep] = answers.get(timeout=60)
        child.join()
        folder = entry_of(root)
        assert list(folder.iterdir()) == []
    kind, line, _ = found["disk"]
    assert kind is RunError and line.startswith(f"{folder}/pixels-")
    assert line.endswith(": cannot be written (File too large); what was there before is kept")
    place, found_sums, messages = found["auto"]
    assert place == "ram" and found_sums == sums(ram)
    assert [m for m in messages if m.endswith("is kept: using memory instead")]
    decoded.clear()
    assert same(opened(root), ram) and len(decoded) == COUNT


def test_the_disk_fills_at_the_index(root, decoded, monkeypatch, caplog):
    (root / "00.png").write_bytes(b"")
    fields, savez = {"on_error": "skip"}, np.savez

    def full(file, **arrays):
        file.write(b"PK\x03\x04 and no more")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(RunError, match=r"/index.npz: cannot be written \(No space left on device\); "):
        opened(root, **fields)
    assert not (entry_of(root) / "index.npz").exists() and temporary(entry_of(root)) == []
    caplog.clear()
    store = opened(root, keep="auto", **fields)
    assert store.cache == "ram" and "using memory instead" in caplog.text
    assert caplog.text.count("data.root: left out 1 of 12 images") == 1  # though decoded twice
    monkeypatch.setattr(np, "savez", savez)
    decoded.clear()
    assert same(opened(root, **fields), store) and len(decoded) == COUNT
