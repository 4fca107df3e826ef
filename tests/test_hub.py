"""Hugging Face datasets from a folder; the network is out of bounds."""

import io
import os
import socket

import numpy as np
import pytest
from folders import HOW, faults, section
from helpers import inside, metrics
from PIL import Image

from idmm import config
from idmm.data.cache import load_split
from idmm.data.datasets import open_splits
from idmm.data.images import read_image

datasets = pytest.importorskip("datasets")
CLASSES = ["owl", "axe", "tea pot"]
NUMBERED = datasets.ClassLabel(names=CLASSES)
COARSE = (datasets.ClassLabel(names=["alive", "dead"]), [0, 1, 1, 0, 1, 1])


@pytest.fixture(autouse=True)
def connections(monkeypatch, tmp_path_factory):
    """Connections that were tried, all of which fail; the library's own cache is elsewhere."""
    tried, connect = [], socket.socket.connect

    def refuse(*where, **_):
        tried.append(where)
        raise ConnectionRefusedError(111, "no network in tests")

    def connect_within(self, address):  # as loader workers do
        return (connect if self.family == socket.AF_UNIX else refuse)(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_within)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    datasets.disable_progress_bars()
    return tried


def png(seed):
    """An encoded image of random pixels."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def table(count=6, first=0, **columns):
    """Images first, first + 1 and so on; each column is its feature and its values."""
    columns = columns or {"label": (NUMBERED, [i % 3 for i in range(count)])}
    cells = {"image": [{"bytes": png(first + i), "path": None} for i in range(count)]}
    cells |= {name: values for name, (_, values) in columns.items()}
    features = {"image": datasets.Image(), **{name: feature for name, (feature, _) in columns.items()}}
    return datasets.Dataset.from_dict(cells, features=datasets.Features(features))


def saved(path, **tables):
    datasets.DatasetDict(tables).save_to_disk(path)
    return path


def as_images(root, **tables):
    """A folder of images, ROOT/SPLIT/CLASS/*.png."""
    for part, rows in tables.items():
        for i, row in enumerate(rows.cast_column("image", datasets.Image(decode=False))):
            folder = root / part / CLASSES[row["label"]]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.png").write_bytes(row["image"]["bytes"])
    return root


def as_parquet(root, **tables):
    (root / "data").mkdir(parents=True)
    for part, rows in tables.items():
        rows.to_parquet(root / f"data/{part}-00000-of-00001.parquet")
    return root


def hub(path, **fields):
    return section(name=f"hfds:{path}", **fields)


def painted(*seeds):
    return [read_image(png(seed), 10**6).pixels for seed in seeds]


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", [saved, as_images, as_parquet])
def test_every_form_gives_back_what_was_put_in(form, tmp_path, connections):
    path = form(tmp_path / "data", train=table(6), validation=table(3, 10), test=table(4, 20))
    splits = open_splits(hub(path), labelled=True)
    for part, name, first, count in (("train", "train", 0, 6), ("val", "validation", 10, 3), ("test", "test", 20, 4)):
        split = getattr(splits, part)
        assert split.names == [f"{name}/{i:06d}" for i in range(count)]
        assert sorted(split.classes) == sorted(CLASSES) and split.labels.dtype == np.int64
        pixels = [read_image(item, 10**6).pixels.tobytes() for item in split.items]
        found = dict(zip(pixels, (split.classes[i] for i in split.labels), strict=True))
        wanted = [CLASSES[i % 3] for i in range(count)]
        assert found == {p.tobytes(): c for p, c in zip(painted(*range(first, first + count)), wanted, strict=True)}
    assert connections == []


def test_a_single_split_with_val_fraction_and_subset(tmp_path):
    table(12).with_format("numpy").save_to_disk(tmp_path / "one")
    splits = open_splits(hub(tmp_path / "one", val_fraction=0.25, subset=config.Subset(per_class=2)), labelled=True)
    assert (len(splits.train), splits.val, len(splits.test)) == (6, None, 3)
    assert np.bincount(splits.train.labels).tolist() == [2, 2, 2]
    for split in (splits.train, splits.test, splits.train.take([4, 1])):
        pixels = [read_image(item, 10**6).pixels for item in split.items]
        same(pixels, painted(*(int(name.removeprefix("train/")) for name in split.names)))


def test_columns_are_named_where_there_are_two(tmp_path):
    two = {"fine": (NUMBERED, [0, 1, 2] * 2), "coarse": COARSE}
    path = saved(tmp_path / "data", train=table(**two), test=table(**two))
    split = open_splits(hub(path, label_column="coarse"), labelled=True).test
    assert split.classes == ["alive", "dead"] and split.labels.tolist() == COARSE[1]
    assert open_splits(hub(path), labelled=False).train.labels is None  # pretraining needs none
    for given in (None, "tags"):
        line = f"data.label_column: {given} is not one of the columns of 'hfds:{path}': fine, coarse"
        assert faults(open_splits, hub(path, label_column=given), True) == [line]
    line = f"data.image_column: fine is not one of the columns of 'hfds:{path}': image"
    assert faults(open_splits, hub(path, image_column="fine"), True) == [line]


def test_labels_that_are_kept_back(tmp_path):
    hidden = table(2, 10, label=(NUMBERED, [-1, None]))
    path = saved(tmp_path / "data", train=table(), validation=table(3), test=hidden)
    splits = open_splits(hub(path), labelled=True)
    assert splits.val is None and splits.test.names[0] == "validation/000000"
    path = saved(tmp_path / "none", train=hidden)
    line = "data.label_column: 'label' has no class in row 0 of split 'train'"
    assert faults(open_splits, hub(path), True) == [line]


def test_what_cannot_be_opened(tmp_path, connections, monkeypatch):
    (line,) = faults(open_splits, section(name="hfds:nobody-here/no-such-images"), True)
    assert line.startswith("data.name: 'hfds:nobody-here/no-such-images' cannot be opened (") and connections == []
    assert line.endswith("; --data.download true fetches it") and "\n" not in line
    path = saved(tmp_path / "extra", extra=table())
    assert faults(open_splits, hub(path), True) == [f"data.name: 'hfds:{path}' has no split 'train', only extra"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (line,) = faults(open_splits, hub(path), True)
    assert line.startswith(f"data.name: 'hfds:{path}': needs datasets; install it with: pip install")


def test_bad_rows_are_told_by_name(tmp_path):
    cells = [{"bytes": png(i), "path": None} for i in range(4)]
    cells[1], cells[3] = {"bytes": b"no image", "path": None}, None
    rows = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    split = open_splits(hub(saved(tmp_path / "data", train=rows)), labelled=False).train
    assert faults(load_split, split, bound=None, data=section(cache_dir=str(tmp_path / "c"))) == [
        f"data.root: 2 of 4 images cannot be used {HOW}:",
        "  train/000001: not an image",
        "  train/000003: no image in this row",
    ]
    root = as_images(tmp_path / "images", train=table())
    split = open_splits(hub(root), labelled=False).train
    os.remove(root / "train/axe/1.png")
    lines = faults(load_split, split, bound=None, data=section(cache="off"))
    assert lines[1:] == ["  train/000000: no such file or directory"]


def test_both_stages(tmp_path):
    """Images are decoded by a loader worker at each use, and from the cache."""
    path = saved(tmp_path / "data", train=table(24), test=table(6, 50))
    common = {"data__name": f"hfds:{path}", "data__subset": None, "train__epochs": 1}
    assert inside("pretrain", tmp_path / "a", **common, data__cache="off", data__workers=1) == 0
    (record,) = metrics(tmp_path / "a")
    assert 0 < record["loss"] < 100 and (tmp_path / "a/backbone.safetensors").exists()
    assert inside("finetune", tmp_path / "b", **common, stages=None, train__size=16) == 0
    assert 0 <= metrics(tmp_path / "b")[-1]["top1"] <= 100
