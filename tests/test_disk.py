"""Decoded images: kept or decoded again with the same result, found again, and never taken for what
they are not."""

import os
import pickle
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import entry_of, opened, paint, same, section, sums, tree
from PIL import Image

from idmm import config
from idmm.data import image_store
from idmm.data.image_store import store_split
from idmm.data.images import fitted, read_image
from idmm.data.listing import list_images
from idmm.data.loaders import own_batches
from idmm.errors import RunError
from idmm.training.device import enough_memory

SIZES = [(40, 30), (9, 50), (64, 64), (20, 21), (33, 12), (1, 7)]


@pytest.fixture
def root(tmp_path):
    """Images of many shapes under two classes."""
    for i, size in enumerate(SIZES):
        paint(tmp_path / "images/train" / "ab"[i % 2] / f"{i}.png", i, size)
    return tmp_path / "images"


def entries(folder):
    return [path for path in folder.iterdir() if path.is_dir()]


def rewritten(path):
    """Other pixels in a file of the same size and time."""
    before = os.stat(path)
    paint(path, 99, (20, 20))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns) == (
        before.st_size,
        before.st_mtime_ns,
    )


@pytest.mark.parametrize("change", ["content", "added", "removed", "swapped"])
def test_built_again_when_a_file_changes(root, decoded, change):
    a = paint(root / "train/a/x.bmp", 1, (20, 20))
    b = paint(root / "train/b/y.bmp", 2, (20, 20))
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
    assert len(decoded) == len(store)
    assert same(store, opened(root, keep="off"))
    decoded.clear()
    assert same(opened(root), store)
    assert not decoded
    assert len(list(entry_of(root).glob("*.pixels"))) == 1


def test_built_again_for_other_limits_only(root, decoded, monkeypatch):
    def decodes_again(*bound, **fields):
        decoded.clear()
        opened(root, *bound, **fields)
        return len(decoded) == len(SIZES)

    assert decodes_again(16)
    assert not decodes_again(16, workers=3, mean=[0.5])
    assert decodes_again(17)
    assert not decodes_again(16)
    assert len(entries(root.parent / "cache")) == 2
    monkeypatch.setattr(image_store.PIL, "__version__", "0")
    assert decodes_again(17)  # by another Pillow


def test_parts_and_subsets_have_entries_of_their_own(tmp_path, decoded):
    root = tree(
        tmp_path / "images",
        train={"x": 4, "y": 4},
        val={"x": 1, "y": 1},
        test={"x": 2, "y": 2},
    )
    subsets = [
        config.Subset(total=3),
        config.Subset(total=3, seed=1),
        config.Subset(per_class=2),
    ]
    for _ in range(2):
        whole = opened(root, labelled=True)
        parts = [opened(root, part=part, labelled=True) for part in ("val", "test")]
        drawn = [opened(root, labelled=True, subset=subset) for subset in subsets]
        assert [len(store) for store in (whole, *parts, *drawn)] == [
            8,
            2,
            4,
            3,
            3,
            4,
        ]
        assert len(decoded) == 24
    for store, subset in zip(drawn, subsets, strict=True):
        assert same(store, opened(root, labelled=True, subset=subset, keep="off"))


def test_two_lists_of_classes_in_use_at_once(tmp_path):
    root = tree(tmp_path / "images", train={"x": 4, "y": 4}, val={"x": 1, "y": 1})
    rows = ["path,class", "val/x/0.png,a", "val/y/0.png,b"]
    stores = []
    for i in range(4):
        rows += [f"train/x/{i}.png,a", f"train/y/{i}.png,b"]
        file = tmp_path / f"{i}.csv"
        file.write_text("\n".join(rows))
        stores.append(opened(root, labelled=True, labels=str(file)))
    assert [len(sums(store)) for store in stores] == [2, 4, 6, 8]


def test_copies_read_the_same_file(root):
    store = opened(root)
    ram = opened(root, keep="off")
    data = pickle.dumps(store)
    assert len(data) < store.sizes.prod(axis=1).sum()
    assert same(pickle.loads(data), ram)
    shutil.rmtree(root.parent / "cache")
    assert same(store, ram)  # what is mapped stays
    image_store._mapped.cache_clear()  # as in another process
    fault = r"/folder-train-\w+/\w+\.pixels: decoded images cannot be read \(no such"
    with pytest.raises(RunError, match=fault):
        pickle.loads(data).image(0)


def test_a_loader_worker_that_is_killed_while_a_step_is_computed():
    """torch says so wherever the process is, not where batches are asked for."""

    def batch(epoch, indices):
        return {"worker": os.getpid()}

    fault = "a loader worker was killed, probably because memory ran out. Try fewer --data"
    with (
        pytest.raises(RunError, match=fault),
        enough_memory(RunError("too little memory")),
    ):
        for item in own_batches(batch, np.arange(40), 2, 1, 0):
            os.kill(int(item["worker"]), signal.SIGKILL)
            time.sleep(5)


def test_where_the_cache_lies(monkeypatch):
    for name in ("IDMM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert image_store.cache_folder(None) == Path("/home/someone/.cache/idmm")
    monkeypatch.setenv("IDMM_CACHE", "~/kept")
    assert image_store.cache_folder(None) == Path("/home/someone/kept")
    assert image_store.cache_folder("~/given") == Path("/home/someone/given")


def mixed_folder(root):
    """Images of several sizes and formats under two classes."""
    for i, size in enumerate([(40, 30), (9, 50), (64, 64), (20, 21), (33, 12)]):
        paint(root / "train/a" / f"{i}.png", i, size)
    paint(root / "train/b/5.jpg", 5, (48, 70))
    Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)).save(root / "train/b/6.png")
    return list_images(section(root), labelled=False).train


def test_pixels_are_the_same_kept_or_not_and_found_again(tmp_path, decoded):
    bound = 16
    split = mixed_folder(tmp_path / "images")

    def load(cache):
        data = section(
            tmp_path / "images",
            cache=cache,
            cache_dir=str(tmp_path / "cache"),
            range=[0, 65535],
        )
        return store_split(split, stored_size=bound, data=data)

    off, cached, again = (load(cache) for cache in ("off", "auto", "auto"))
    assert [store.decodes for store in (off, cached, again)] == [
        True,
        False,
        False,
    ]
    assert len(decoded) == 14
    assert cached.names == split.names
    assert cached.classes == ["a", "b"]
    for i, path in enumerate(split.items):
        expected = torch.from_numpy(fitted(read_image(path).pixels, bound)).permute(2, 0, 1)
        torch.testing.assert_close(cached.image(i), expected, rtol=0, atol=0)
        assert expected.shape[1:] == tuple(cached.sizes[i])
    assert same(off, cached)
    assert same(again, cached)


def test_files_that_change_or_vanish_during_the_run(tmp_path):
    split = mixed_folder(tmp_path)
    store = store_split(split, stored_size=None, data=section(cache="off"))
    paint(tmp_path / "train/a/0.png", 99, (40, 30))
    with pytest.raises(
        RunError,
        match=r"^data.root: 'train/a/0.png' was changed while in use$",
    ):
        store.image(0)
    os.remove(tmp_path / "train/a/1.png")
    with pytest.raises(
        RunError,
        match=r"^data.root: 'train/a/1.png' was fine when loaded, but now: no such file",
    ):
        store.image(1)
