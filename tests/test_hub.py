"""Hugging Face datasets from a folder, in every form that the library stores them in; the network is out of bounds."""

import io
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from folders import HOW, faults, section
from helpers import ENVIRONMENT, ROOT, inside, metrics
from PIL import Image

from idmm import config
from idmm.data.cache import load_split
from idmm.data.datasets import open_splits
from idmm.data.doctor import check
from idmm.data.images import decode
from idmm.data.loaders import BatchPlan, training_batches
from idmm.errors import install

datasets = pytest.importorskip("datasets")
CLASSES = ["owl", "axe", "tea pot"]


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
    columns = columns or {"label": (datasets.ClassLabel(names=CLASSES), [i % 3 for i in range(count)])}
    cells = {"image": [{"bytes": png(first + i), "path": None} for i in range(count)]}
    cells |= {name: values for name, (_, values) in columns.items()}
    features = {"image": datasets.Image(), **{name: feature for name, (feature, _) in columns.items()}}
    return datasets.Dataset.from_dict(cells, features=datasets.Features(features))


def saved(path, **tables):
    datasets.DatasetDict(tables).save_to_disk(path)
    return path


def hub(path, **fields):
    return section(name=f"hfds:{path}", **fields)


def pixels(split):
    return [decode(item, 10**6) for item in split.items]


def painted(*seeds):
    return [decode(png(seed), 10**6) for seed in seeds]


def same(found, wanted):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


# ------------------------------------------------------------------ forms
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


@pytest.mark.parametrize("form", [saved, as_images, as_parquet])
@pytest.mark.parametrize("by_root", [False, True])
def test_every_form_gives_back_what_was_put_in(form, by_root, tmp_path, connections):
    path = form(tmp_path / "data", train=table(6), validation=table(3, 10), test=table(4, 20))
    splits = open_splits(section(path, name="hfds:") if by_root else hub(path), labelled=True)
    for part, name, first, count in (("train", "train", 0, 6), ("val", "validation", 10, 3), ("test", "test", 20, 4)):
        split = getattr(splits, part)
        assert split.names == [f"{name}/{i:06d}" for i in range(count)]
        assert sorted(split.classes) == sorted(CLASSES) and split.labels.dtype == np.int64
        wanted = [CLASSES[i % 3] for i in range(count)]
        found = dict(zip((p.tobytes() for p in pixels(split)), (split.classes[i] for i in split.labels), strict=True))
        assert found == {p.tobytes(): c for p, c in zip(painted(*range(first, first + count)), wanted, strict=True)}
    if form is not as_images:  # which sorts by class
        same(pixels(splits.train), painted(*range(6)))
        assert splits.train.classes == CLASSES and splits.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert connections == []


def test_a_single_split_with_val_fraction_and_subset(tmp_path):
    table(12).save_to_disk(tmp_path / "one")
    data = hub(tmp_path / "one", val_fraction=0.25, subset=config.Subset(per_class=2))
    splits = open_splits(data, labelled=True)
    assert (len(splits.train), splits.val, len(splits.test)) == (6, None, 3)
    assert np.bincount(splits.train.labels).tolist() == [2, 2, 2]
    few = splits.train.take([4, 1])
    assert few.names == [splits.train.names[4], splits.train.names[1]]
    for split in (splits.train, splits.test, few):
        same(pixels(split), painted(*(int(name.removeprefix("train/")) for name in split.names)))


def test_a_format_that_was_saved_with_the_table_is_passed_over(tmp_path):
    saved(tmp_path / "data", train=table().with_format("numpy", columns=["label"]), test=table())
    same(pixels(open_splits(hub(tmp_path / "data"), labelled=True).train), painted(*range(6)))


@pytest.mark.parametrize("name", ["valid", "val", "dev"])
def test_other_names_of_val(name, tmp_path):
    splits = open_splits(hub(saved(tmp_path / "a", train=table(), **{name: table(3)})), labelled=True)
    assert splits.val is None and splits.test.names[0] == f"{name}/000000"  # a single one is test


# ------------------------------------------------------------------ columns
def image_values(first, data=None):
    return datasets.Image(), [{"bytes": data or png(first + i), "path": None} for i in range(6)]


NUMBERED = datasets.ClassLabel(names=CLASSES)
LABEL = (NUMBERED, [0, 1, 2, 0, 1, 2])
COARSE = (datasets.ClassLabel(names=["alive", "dead"]), [0, 1, 1, 0, 1, 1])
TAGS = (datasets.List(datasets.Value("int64")), [[1, 2]] * 6)
WORDS = (datasets.Value("string"), ["None", "a", None, "a", "None", "a"])


def unlabelled(count=6):
    return table(count).remove_columns("label")


def saved_masks(root):
    return saved(root, train=table(label=LABEL, mask=image_values(50)), test=table(label=LABEL))


def saved_tags(root):
    columns = {"fine": LABEL, "coarse": COARSE, "tags": TAGS}
    return saved(root, train=table(**columns), test=table(**columns))


def test_columns_that_are_named(tmp_path):
    masks, tags = saved_masks(tmp_path / "masks"), saved_tags(tmp_path / "tags")
    same(pixels(open_splits(hub(masks, image_column="image"), labelled=True).train), painted(*range(6)))
    alone = saved(tmp_path / "train", train=table(label=LABEL, mask=image_values(50), broken=image_values(0, b"none")))
    same(pixels(open_splits(hub(alone, image_column="mask"), labelled=False).train), painted(*range(50, 56)))
    split = open_splits(hub(tags, label_column="coarse"), labelled=True).test
    assert split.classes == ["alive", "dead"] and split.labels.tolist() == COARSE[1]
    split = open_splits(hub(tags), labelled=False).train  # pretraining needs none
    assert split.labels is split.classes is None and len(split) == 6


NAMED, COLUMNS = "'NAME' wants it named; there", "there are fine, coarse"
FAULTY = {  # how it is saved, fields of the config, what is said
    "two images": (saved_masks, {}, f"data.image_column: {NAMED} are image, mask"),
    "no image": (saved_masks, {"image_column": "label"},
                 "data.image_column: 'label' is no column of images; there are image, mask"),
    "no mask": (saved_masks, {"image_column": "mask"},
                "data.name: 'NAME': the split 'test' has no column 'mask' of images"),
    "text": (lambda root: saved(root, train=datasets.Dataset.from_dict({"text": ["a", "b"]})), {},
             f"data.image_column: {NAMED} is none"),
    "two labels": (saved_tags, {}, f"data.label_column: {NAMED} are fine, coarse"),
    **{f"label {wrong}": (saved_tags, {"label_column": wrong},
                          f"data.label_column: '{wrong}' is no column of classes; {COLUMNS}")
       for wrong in ("nothing", "tags", "image")},
    "no labels": (lambda root: saved(root, train=unlabelled(), test=unlabelled(2)), {},
                  "data.name: 'NAME' has no labels; fine-tuning needs them"),
    "kept back": (lambda root: saved(root, train=table(label=(NUMBERED, [-1] * 6))), {},
                  "data.name: 'NAME' has no labels; fine-tuning needs them"),
    "one split": (lambda root: saved(root, train=table(9)), {},
                  "data.name: 'NAME' has no split to evaluate on; add one, or hold out a share of train with"
                  " --data.val_fraction, e.g. 0.2, or give --data.folds 5"),
    "no train": (lambda root: saved(root, holdout=table(), extra=table()), {},
                 "data.name: 'NAME' has no split 'train', only extra, holdout"),
    "new class": (lambda root: saved(root, train=table(), test=table(
                      2, 10, label=(datasets.ClassLabel(names=[*CLASSES, "hat"]), [0, 3]))), {},
                  "data.name: 'NAME': row 1 of split 'test' has label 3, wanted one of 3 classes"),
    "some words": (lambda root: saved(root, train=table(label=WORDS), test=table(label=WORDS)), {},
                   "data.name: 'NAME': row 2 of split 'train' has label None, wanted one of 2 classes"),
    **{f"some {missing}": (
        lambda root, m=missing: saved(root, train=table(label=(NUMBERED, [0, 1, m, 0, m, 2])), test=table(3)), {},
        f"data.name: 'NAME': row 2 of split 'train' has label {missing}, wanted one of 3 classes")
       for missing in (-1, None)},
}  # fmt: skip
BETTER_UNLABELLED = {"no labels", "kept back", "some words", "some -1", "some None"}


@pytest.mark.parametrize("case", FAULTY)
def test_tables_that_cannot_be_used(case, tmp_path, caplog):
    save, fields, line = FAULTY[case]
    data = hub(save(tmp_path / "data"), **fields)
    line = line.replace("NAME", data.name)
    assert faults(open_splits, data, True) == [line]
    if "image_column" in line or case in ("no mask", "no train"):
        assert faults(open_splits, data, False) == [line]
    if case in BETTER_UNLABELLED:  # pretraining goes on
        split = open_splits(data, labelled=False).train
        assert split.labels is split.classes is None
        same(pixels(split), painted(*range(6)))
        assert not case.startswith("some") or f"{line}; going on without labels" in caplog.text


@pytest.mark.parametrize(
    "values, classes, labels",
    [
        (["b", "a", "c", "e", "d", "f"], ["a", "b", "c", "d", "e", "f"], [1, 0, 2, 4, 3, 5]),
        ([9, 2, 16, 9, 2, 16], ["2", "9", "16"], [1, 0, 2, 1, 0, 2]),
    ],
)
def test_labels_that_are_text_or_plain_numbers(values, classes, labels, tmp_path):
    kind = datasets.Value("string" if isinstance(values[0], str) else "int64")
    train, test = table(label=(kind, values)), table(2, 10, label=(kind, values[1:3]))
    splits = open_splits(hub(saved(tmp_path / "data", train=train, test=test)), labelled=True)
    assert splits.train.classes == splits.test.classes == classes
    assert splits.train.labels.tolist() == labels and splits.test.labels.tolist() == labels[1:3]


def test_a_split_that_numbers_the_classes_in_its_own_way(tmp_path):
    other = table(3, 10, label=(datasets.ClassLabel(names=CLASSES[::-1]), [0, 1, 2]))
    words = table(3, 20, label=(datasets.Value("string"), CLASSES))
    splits = open_splits(hub(saved(tmp_path / "data", train=table(), val=other, test=words)), labelled=True)
    assert splits.val.classes == CLASSES and splits.val.labels.tolist() == [2, 1, 0]
    assert splits.test.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kept_back", [[-1, -1], [None, None], "no column"])
def test_a_test_split_whose_labels_are_kept_back(kept_back, tmp_path, caplog):
    test = unlabelled(2) if kept_back == "no column" else table(2, 10, label=(NUMBERED, kept_back))
    path = saved(tmp_path / "data", train=table(), validation=table(3), test=test)
    splits = open_splits(hub(path), labelled=True)
    assert splits.val is None and splits.test.names[0] == "validation/000000"
    assert f"data.name: 'hfds:{path}': the split 'test' has no labels and is not used" in caplog.text


# ------------------------------------------------------------------ what cannot be opened
def test_a_name_that_is_not_there_asks_no_network(connections):
    start = time.monotonic()
    (line,) = faults(open_splits, section(name="hfds:nobody-here/no-such-images"), True)
    assert time.monotonic() - start < 5 and connections == []
    assert line.startswith("data.name: 'hfds:nobody-here/no-such-images' cannot be opened (")
    assert line.endswith("; --data.download true fetches it from the hub") and "\n" not in line


def test_the_network_is_asked_where_that_was_wanted(connections, monkeypatch):
    """Also shows that the tests would see a connection."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the library tries more than once
    data = section(name="hfds:nobody-here/no-such-images", download=True)
    (line,) = faults(open_splits, data, True)
    assert connections and "--data.download" not in line and "\n" not in line


def test_the_library_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert faults(open_splits, section(name="hfds:x"), True) == [
        f"data.name: 'hfds:x' needs the library datasets: {install('hf')}"
    ]


@pytest.mark.parametrize("name", ["hfds:", "hfds: "])
def test_a_name_that_names_nothing(name):
    wanted = f"data.name: '{name}' names nothing; wanted hfds:NAME, hfds:FOLDER, or a data.root"
    assert faults(open_splits, section(name=name), True) == [wanted]


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("name", ["/no/such", "./no", "../no", "~/no", "a/b/c", "/no"])
def test_a_folder_that_is_not_there_is_not_asked_of_the_hub(name, download, tmp_path, monkeypatch, connections):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = "there is no such folder; wanted hfds:OWNER/NAME (of the hub) or hfds:FOLDER"
    assert faults(open_splits, hub(name, download=download), True) == [f"data.name: 'hfds:{name}': {wanted}"]
    data = section("images", name="hfds:", download=download)
    assert faults(open_splits, data, True) == [f"data.root: 'images': {wanted}"]
    assert connections == []


def test_folders_that_are_no_datasets(tmp_path, connections, monkeypatch, capfd, caplog):
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "torn", train=table())
    shutil.rmtree(tmp_path / "torn/train")
    for name in ("empty", "torn"):
        (line,) = faults(open_splits, hub(tmp_path / name), True)
        assert line.startswith(f"data.name: 'hfds:{tmp_path}/{name}' cannot be opened (") and line.endswith(")")
    saved(tmp_path / "all/two", train=table())
    table().save_to_disk(tmp_path / "all/one")
    capfd.readouterr()
    assert faults(open_splits, hub(tmp_path / "all"), True) == [
        f"data.name: 'hfds:{tmp_path}/all' is a folder of saved datasets (one, two);"
        f" wanted one of them, e.g. hfds:{tmp_path}/all/one"
    ]
    assert capfd.readouterr() == ("", "") and not caplog.messages and connections == []

    def refuse(*_, **__):
        raise ValueError(f"two\n  lines {'x' * 1000}")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    (line,) = faults(open_splits, hub(tmp_path / "empty"), True)
    assert line.startswith(f"data.name: 'hfds:{tmp_path}/empty' cannot be opened (two lines xxx") and len(line) < 500


# ------------------------------------------------------------------ from the split to the pixels
def test_bad_rows_are_told_by_name(tmp_path, caplog):
    cells = [{"bytes": png(i), "path": None} for i in range(6)]
    cells[1], cells[3] = {"bytes": b"no image", "path": None}, None
    cells[4] = {"bytes": png(4)[:100], "path": None}
    rows = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    split = open_splits(hub(saved(tmp_path / "data", train=rows)), labelled=False).train
    for cache in ("ram", "disk"):
        assert faults(load_split, split, bound=None, data=section(cache=cache, cache_dir=str(tmp_path / "c"))) == [
            f"data.root: 3 of 6 images cannot be used {HOW}:",
            "  train/000001: not an image",
            "  train/000003: no image in this row",
            "  train/000004: unreadable or truncated (image file is truncated)",
        ]
    found, _ = check(hub(tmp_path / "data"), tiny=0, near_limit=0)
    assert [(bad["name"], bad["reason"]) for bad in found.unreadable][1] == ("train/000003", "no image in this row")
    store = load_split(split, bound=None, data=section(cache="off", on_error="skip"))
    assert store.names == [f"train/{i:06d}" for i in (0, 2, 5)]
    same([store.image(i).permute(1, 2, 0).numpy() for i in range(3)], painted(0, 2, 5))


def test_a_file_of_an_image_folder_that_is_gone(tmp_path):
    root = as_images(tmp_path / "data", train=table())
    split = open_splits(hub(root), labelled=False).train
    os.remove(root / "train/axe/1.png")
    lines = faults(load_split, split, bound=None, data=section(cache="ram"))
    assert lines[1:] == ["  train/000000: no such file or directory"]


@pytest.mark.parametrize("form", [saved, as_images])
def test_stores_travel_to_other_processes(form, tmp_path):
    split = open_splits(hub(form(tmp_path / "data", train=table(9))), labelled=False).train
    wanted = pixels(split)
    store = load_split(split.take([8, 1, 4, 0, 7]), bound=None, data=section(cache="off"))
    wanted = [wanted[i] for i in (8, 1, 4, 0, 7)]
    same([pickle.loads(pickle.dumps(store)).image(i).permute(1, 2, 0).numpy() for i in range(5)], wanted)
    plan = BatchPlan(count=5, batch_size=2, epochs=2, seed=0)
    seen = {0: {}, 1: {}}
    batches = training_batches(lambda epoch, indices: made(store, epoch, indices), plan, workers=2)
    for batch in batches:
        seen[batch["epoch"]] |= {i: image for i, image in zip(batch["indices"], batch["images"], strict=True)}
    for images in seen.values():
        same([images[i].permute(1, 2, 0).numpy() for i in range(5)], wanted)


def made(store, epoch, indices):
    assert os.getpid() != MAIN
    return {"epoch": epoch, "indices": indices.tolist(), "images": [store.image(i).contiguous() for i in indices]}


MAIN = os.getpid()


@pytest.mark.parametrize("form", [saved, as_images])
def test_the_cache_on_disk_is_used_again_until_the_table_changes(form, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    data = hub(tmp_path / "data", cache="disk", cache_dir=str(tmp_path / "cache"))

    def opened():
        caplog.clear()
        split = open_splits(data, labelled=False).train
        store = load_split(split, bound=None, data=data)
        same([store.image(i).permute(1, 2, 0).numpy() for i in range(len(split))], pixels(split))
        return split.items.version, "kept in" in caplog.text, store.image(0).clone()

    form(tmp_path / "data", train=table())
    first, filled, before = opened()
    assert filled and opened()[:2] == (first, False)
    shutil.rmtree(tmp_path / "data")
    form(tmp_path / "data", train=table(6, 30))
    second, filled, after = opened()
    assert second != first and filled and not after.equal(before)


def test_the_version_is_the_same_in_another_process(tmp_path):
    data = hub(saved(tmp_path / "data", train=table()))
    program = (
        "import sys; from idmm.config import Data; from idmm.data.datasets import open_splits;"
        " print(open_splits(Data(name=sys.argv[1]), labelled=False).train.items.version)"
    )
    command = [sys.executable, "-c", program, data.name]
    said = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    assert said.strip() == open_splits(data, labelled=False).train.items.version


def test_both_stages(tmp_path):
    path = saved(tmp_path / "data", train=table(24), test=table(6, 50))
    common = {"data__name": f"hfds:{path}", "data__subset": None, "train__epochs": 1}
    assert inside("pretrain", tmp_path / "a", **common, data__cache="off", data__workers=1) == 0
    (record,) = metrics(tmp_path / "a")
    assert 0 < record["loss"] < 100 and (tmp_path / "a/backbone.safetensors").exists()
    assert inside("finetune", tmp_path / "b", **common, stages=None, train__size=16) == 0
    assert 0 <= metrics(tmp_path / "b")[-1]["top1"] <= 100
