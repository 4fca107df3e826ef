"""Cache entries on a disk for tests, and what is known of them."""

import json
from pathlib import Path

import numpy as np
import torch
from folders import section

from idmm.data import cache, disk
from idmm.data.cache import fingerprint, load_split
from idmm.data.datasets import open_splits


def opened(root, bound=None, part="train", keep="disk", labelled=False, **fields):
    """A part's store; the cache lies beside the images' folder."""
    fields = {"cache_dir": str(Path(root).parent / "cache"), **fields}
    data = section(root, cache=keep, **fields)
    return load_split(getattr(open_splits(data, labelled), part), bound=bound, data=data, part=part)


def same(a, b):
    """Whether two stores hold the same images."""
    np.testing.assert_array_equal(a.sizes, b.sizes)
    assert json.dumps(fingerprint(a)) == json.dumps(fingerprint(b)) and a.names == b.names
    assert (a.labels is b.labels is None) or a.labels.tolist() == b.labels.tolist()
    return len(a) == len(b) and all(torch.equal(a.image(i), b.image(i)) for i in range(len(a)))


def sums(store):
    return [int(store.image(i).sum()) for i in range(len(store))]


def entry_of(root):
    """The only entry of the cache beside a folder."""
    (found,) = disk.cache_entries(root.parent / "cache")
    return found["path"]


def decodes(monkeypatch):
    """A list that grows by what is decoded."""
    seen, load = [], cache.load
    monkeypatch.setattr(cache, "load", lambda item, *rest: (seen.append(item), load(item, *rest))[1])
    return seen
