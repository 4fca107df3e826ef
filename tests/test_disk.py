"""Images that are decoded onto a disk: the same as elsewhere, found again, and never taken for what they are not."""

import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import entry_of, opened, paint, same, sums, tree

from idmm import config, distributed
from idmm.data import image_store
from idmm.data.loaders import evaluation_batches
from idmm.errors import RunError

SIZES = [(40, 30), (9, 50), (64, 64), (20, 21), (33, 12), (1, 7)]


@pytest.fixture
def root(tmp_path):
    """Images of many shapes under two classes."""
    for i, size in enumerate(SIZES):
        paint(tmp_path / "images/train" / "ab"[i % 2] / f"{i}.png", i, size)
    return tmp_path / "images"


def entries(folder):
    return [path for path in folder.iterdir() if path.is_dir()]


# ---- what makes it decode again ----


def rewritten(path):
    """Other pixels in a file of the same size and time."""
    before, content = os.stat(path), path.read_bytes()
    other = paint(path.with_name("other.bmp"), 99, (20, 20)).read_bytes()
    assert content != other and len(content) == len(other)
    path.write_bytes(other)
    path.with_name("other.bmp").unlink()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("change", ["content", "added", "removed", "swapped"])
def test_built_again_when_a_file_changes(root, decoded, change):
    a, b = paint(root / "train/a/x.bmp", 1, (20, 20)), paint(root / "train/b/y.bmp", 2, (20, 20))
    opened(root)
    decoded.clear()
    if change == "content":
        rewritten(a)
    elif change == "added":
        paint(root / "train/b/9.png", 9)
    elif change == "removed":
        a.unlink()
    else:
        for source, target in ((a, root / "c"), (b, a), (root / "c", b)):
            source.rename(target)
    store = opened(root)
    assert len(decoded) == len(store) and same(store, opened(root, keep="off"))
    decoded.clear()
    assert same(opened(root), store) and not decoded
    assert len(list(entry_of(root).glob("pixels-*"))) == 1


def test_built_again_for_other_limits_only(root, decoded, monkeypatch):
    def decodes_again(*bound, **fields):
        decoded.clear()
        opened(root, *bound, **fields)
        return len(decoded) == len(SIZES)

    assert decodes_again(16) and not decodes_again(16, on_error="skip", workers=3, mean=[0.5])
    assert decodes_again(17) and not decodes_again(16)
    assert decodes_again(16, max_pixels=64 * 64)  # an entry is for one limit at a time
    assert len(entries(root.parent / "cache")) == 2
    monkeypatch.setattr(image_store.PIL, "__version__", "0")
    assert decodes_again(17)  # by another Pillow


def test_parts_and_subsets_have_entries_of_their_own(tmp_path, decoded):
    root = tree(tmp_path / "images", train={"x": 4, "y": 4}, val={"x": 1, "y": 1}, test={"x": 2, "y": 2})
    subsets = [config.Subset(total=3), config.Subset(total=3, seed=1), config.Subset(per_class=2)]
    for _ in range(2):
        whole = opened(root, labelled=True)
        parts = [opened(root, part=part, labelled=True) for part in ("val", "test")]
        drawn = [opened(root, labelled=True, subset=subset) for subset in subsets]
        assert [len(store) for store in (whole, *parts, *drawn)] == [8, 2, 4, 3, 3, 4]
        assert len(decoded) == 24
    for store, subset in zip(drawn, subsets, strict=True):
        assert same(store, opened(root, labelled=True, subset=subset, keep="off"))
    decoded.clear()
    opened(root, part="test", labelled=True, subset=subsets[0], val_fraction=0.5)  # which draw from train
    assert not decoded


# ---- processes, pickles ----


def test_workers_and_copies_read_the_same_file(root):
    store, ram = opened(root), opened(root, keep="off")

    def batch(epoch, indices):
        return {"sums": torch.stack([store.image(int(i)).sum() for i in indices])}

    found = torch.cat([made["sums"] for made in evaluation_batches(batch, np.arange(len(store)), 2, workers=2)])
    assert found.tolist() == sums(ram)

    data = pickle.dumps(store)
    assert len(data) < store.sizes.prod(axis=1).sum() and same(pickle.loads(data), ram)

    shutil.rmtree(root.parent / "cache")
    assert same(store, ram)  # what is mapped stays
    found = torch.cat([made["sums"] for made in evaluation_batches(batch, np.arange(len(store)), 2, workers=1)])
    assert found.tolist() == sums(ram)
    with pytest.raises(RunError, match=r"/folder-train-full-\w+/pixels-\w+: decoded images cannot be read \(No such"):
        pickle.loads(data)


def test_a_loader_worker_that_is_killed_while_a_step_is_computed():
    """torch says so wherever the process is, not where batches are asked for."""

    def batch(epoch, indices):
        return {"worker": os.getpid()}

    with pytest.raises(RunError, match="a loader worker was killed, probably because memory ran out. Try fewer --data"):
        with distributed.enough_memory(RunError("too little memory")):
            for made in evaluation_batches(batch, np.arange(40), 2, workers=1):
                os.kill(int(made["worker"]), signal.SIGKILL)
                time.sleep(5)


# ---- the folder ----


def test_where_the_cache_lies(monkeypatch):
    for name in ("IDMM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert image_store.cache_folder(None) == Path("/home/someone/.cache/idmm")
    monkeypatch.setenv("IDMM_CACHE", "~/kept")
    assert image_store.cache_folder(None) == Path("/home/someone/kept")
    assert image_store.cache_folder("~/given") == Path("/home/someone/given")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home
    with pytest.raises(RunError, match="data.cache_dir: '~/kept' has no place, as there is no home folder"):
        image_store.cache_folder(None)
