"""The official layouts in miniature, file by file as their publishers lay them out; each builder returns the base."""

import csv
import dataclasses
import functools
import pickle
import shutil
import struct
import types
import zlib

import numpy as np
from folders import paint, section, tree
from scipy.io import savemat

from idmm.data.datasets import open_splits
from idmm.data.registry import DATASETS


def resize(monkeypatch, name, train, test, classes):
    """Sets the figures of a protocol to those of a miniature."""
    spec = dataclasses.replace(DATASETS[name], train_size=train, test_size=test, num_classes=classes)
    monkeypatch.setitem(DATASETS, name, spec)


def opened(name, root, **fields):
    return open_splits(section(root, name=name, **fields), labelled=True)


def images(folder, names, size=(12, 9)):
    """Paints images; JPEG or PNG, as their names say."""
    for name in names:
        paint(folder / name, zlib.crc32(name.encode()), size)


def write(path, *lines):
    """Writes a list file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def append(path, line):
    with open(path, "a") as file:
        file.write(f"{line}\n")
    return path


def structs(records):
    """A MATLAB struct array, 1 x N, from dicts with the same keys."""
    array = np.empty((1, len(records)), dtype=[(key, object) for key in records[0]])
    for i, record in enumerate(records):
        array[0, i] = tuple(record.values())
    return array


def cells(words):
    """A MATLAB cell array, 1 x N."""
    array = np.empty((1, len(words)), dtype=object)
    array[0, :] = words
    return array


# ------------------------------------------------------------------ images and lists
FLOWERS = {"labels": [77, 1, 102, 1, 5, 77, 102, 5], "trnid": [7, 2], "valid": [5, 1], "tstid": [8, 3, 6, 4]}


def flowers(root, size=(12, 9), **numbers):
    """setid.mat and imagelabels.mat, 1 x N each; other ``numbers`` may be given."""
    base, numbers = root / "flowers-102", {**FLOWERS, **numbers}
    images(base / "jpg", [f"image_{i + 1:05d}.jpg" for i in range(len(numbers["labels"]))], size)
    savemat(base / "imagelabels.mat", {"labels": np.array([numbers["labels"]], dtype=np.uint8)})
    ids = {key: np.array([numbers[key]], dtype=np.uint16) for key in ("trnid", "valid", "tstid")}
    savemat(base / "setid.mat", ids)
    return base


def pets(root):
    base = root / "oxford-iiit-pet"
    parts = {
        "trainval": ["american_bulldog_12 2 2 1", "Abyssinian_100 1 1 1", "american_pit_bull_terrier_9 3 2 2"],
        "test": ["american_pit_bull_terrier_10 3 2 2", "Abyssinian_201 1 1 1", "american_bulldog_203 2 2 1"],
    }
    for part, lines in parts.items():
        write(base / f"annotations/{part}.txt", *lines)
        images(base / "images", [f"{line.split()[0]}.jpg" for line in lines])
    header = ("#Image CLASS-ID SPECIES BREED ID", "#ID: 1:37 Class ids")
    write(base / "annotations/list.txt", *header, *parts["trainval"], *parts["test"])
    (base / "images/Abyssinian_100.mat").touch()  # as in the archive
    return base


def dtd(root):
    base = root / "dtd/dtd"
    parts = {
        "train1": ["zigzagged/zigzagged_0064.jpg", "banded/banded_0002.jpg", "blotchy/blotchy_0003.jpg"],
        "val1": ["banded/banded_0005.jpg", "blotchy/blotchy_0006.jpg", "zigzagged/zigzagged_0001.jpg"],
        "test1": ["blotchy/blotchy_0101.jpg", "banded/banded_0100.jpg", "zigzagged/zigzagged_0102.jpg"],
    }
    for part, lines in parts.items():
        write(base / f"labels/{part}.txt", *lines)
        images(base / "images", lines)
    write(base / "labels/train2.txt", *parts["test1"])
    return base


def indoor67(root, lists="."):
    """``lists``: their folder, relative to the base."""
    base = root / "indoorCVPR_09"
    parts = {
        "Train": ["gameroom/bt_132294gameroom2.jpg", "airport_inside/airport_inside_0001.jpg", "gameroom/g_1.jpg"],
        "Test": ["airport_inside/airport_inside_0005.jpg", "gameroom/game_room_08.jpg"],
    }
    for part, lines in parts.items():
        images(base / "Images", lines)
        write(base / lists / f"{part}Images.txt", *lines)
    images(base / "Images", ["gameroom/in_no_list.jpg"])  # most of the archive
    return base


def cub200(root):
    base = root / "CUB_200_2011"
    paths = [
        "001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg",
        "001.Black_footed_Albatross/Black_Footed_Albatross_0009_34.jpg",
        "002.Laysan_Albatross/Laysan_Albatross_0002_1027.jpg",
        "002.Laysan_Albatross/Laysan_Albatross_0003_1033.jpg",
        "002.Laysan_Albatross/Laysan_Albatross_0082_524.jpg",
    ]
    images(base / "images", paths)
    for name, values in (
        ("images", paths),
        ("image_class_labels", [1, 1, 2, 2, 2]),
        ("train_test_split", [0, 1, 1, 0, 1]),
        ("classes", ["001.Black_footed_Albatross", "002.Laysan_Albatross"]),
    ):
        write(base / f"{name}.txt", *(f"{i + 1} {value}" for i, value in enumerate(values)))
    return base


def aircraft(root):
    base = root / "fgvc-aircraft-2013b/data"
    write(base / "variants.txt", "707-320", "727-200", "F/A-18", "Yak-42", "Model B200")
    parts = {
        "trainval": ["1025794 Model B200", "0787226 F/A-18", "1340192 707-320", "0056978 Yak-42"],
        "test": ["1514522 727-200", "0747566 Model B200", "1008575 F/A-18"],
    }
    for part, lines in parts.items():
        write(base / f"images_variant_{part}.txt", *lines)
        images(base / "images", [f"{line.split()[0]}.jpg" for line in lines])
    return base


CARS = ["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Acura TL Sedan 2012"]


def annotations(path, labels, with_labels=True):
    """Writes a list of the cars' devkit; images are numbered from 1."""
    boxes = {key: np.uint16(value) for key, value in zip(("x1", "y1", "x2", "y2"), (39, 116, 569, 375), strict=True)}
    records = []
    for i, label in enumerate(labels):
        record = {f"bbox_{key}": value for key, value in boxes.items()}
        record |= {"class": np.uint8(label)} if with_labels else {}
        records.append({**record, "fname": f"{i + 1:05d}.jpg"})
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": structs(records)})


def cars(root):
    base = root / "stanford_cars"
    for part, path, labels in (
        ("train", "devkit/cars_train_annos.mat", [3, 1, 2, 3]),
        ("test", "cars_test_annos_withlabels.mat", [2, 3, 1]),
    ):
        annotations(base / path, labels)
        images(base / f"cars_{part}", [f"{i + 1:05d}.jpg" for i in range(len(labels))])
    annotations(base / "devkit/cars_test_annos.mat", [2, 3, 1], with_labels=False)  # as in the devkit
    savemat(base / "devkit/cars_meta.mat", {"class_names": cells(CARS)})
    return base


def domainnet(root, domain):
    """Numbers of classes as in the official lists; one without training images, one that no list uses."""
    base = root / "domainnet"
    parts = {
        "train": [("the_Eiffel_Tower", 1, 4), ("aircraft_carrier", 2, 0), ("axe", 3, 2), ("aircraft_carrier", 4, 0)],
        "test": [("airplane", 5, 1), ("the_Eiffel_Tower", 6, 4)],
    }
    for part, entries in parts.items():
        suffix = "png" if domain == "quickdraw" else "jpg"
        lines = [f"{domain}/{name}/{domain}_001_{i:06d}.{suffix} {label}" for name, i, label in entries]
        write(base / f"{domain}_{part}.txt", *lines)
        images(base, [line.rpartition(" ")[0] for line in lines])
    return base


# ------------------------------------------------------------------ pixels
class _Python2Pickler(pickle._Pickler):
    """Writes what Python 2 and its NumPy wrote: text and bytes are the same, modules have their old names."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value):
        data = value.encode("latin1") if isinstance(value, str) else value
        head = b"U" + bytes([len(data)]) if len(data) < 256 else b"T" + struct.pack("<i", len(data))
        self.write(head + data)
        self.memoize(value)

    def save_named(self, value, name=None):
        module = value.__module__.replace("numpy._core", "numpy.core")
        self.write(f"c{module}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string
    dispatch[type] = dispatch[types.FunctionType] = dispatch[types.BuiltinFunctionType] = save_named


def python2_pickle(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        _Python2Pickler(file, protocol=2).dump(content)


def squares(first, count):
    """uint8 [N, 32, 32, 3]: image i is (first + i, 100, 200) all over, but (255, 0, 9) in row 3, column 5."""
    pixels = np.empty((count, 32, 32, 3), dtype=np.uint8)
    pixels[...] = (0, 100, 200)
    pixels[..., 0] = np.arange(first, first + count)[:, None, None]
    pixels[:, 3, 5] = (255, 0, 9)
    return pixels


def batch(path, first, labels, key="labels", **more):
    """Writes a file of CIFAR: rows of 1024 red, 1024 green and 1024 blue values."""
    rows = np.ascontiguousarray(squares(first, len(labels)).transpose(0, 3, 1, 2)).reshape(len(labels), 3072)
    names = [f"thing_s_{i:06d}.png" for i in range(len(labels))]
    python2_pickle(path, {"batch_label": "a batch", key: labels, "data": rows, "filenames": names, **more})


CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar10(root):
    base = root / "cifar-10-batches-py"
    python2_pickle(base / "batches.meta", {"num_cases_per_batch": 2, "label_names": CIFAR10, "num_vis": 3072})
    for i, labels in enumerate([[6, 9], [1, 6], [8, 0], [0, 6], [1, 8]]):
        batch(base / f"data_batch_{i + 1}", 2 * i, labels)
    batch(base / "test_batch", 50, [3, 8, 9])
    return base


def cifar100(root):
    base = root / "cifar-100-python"
    names = {"fine_label_names": ["apple", "aquarium_fish", "baby", "bear"], "coarse_label_names": ["fish", "fruit"]}
    python2_pickle(base / "meta", names)
    batch(base / "train", 0, [3, 0, 1, 0, 2], key="fine_labels", coarse_labels=[1, 1, 0, 1, 1])
    batch(base / "test", 50, [1, 3], key="fine_labels", coarse_labels=[0, 1])
    return base


def digits_mat(path, first, labels):
    """Writes a file of SVHN: X [32, 32, 3, N] and y [N, 1], with 10 for the digit 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = squares(first, len(labels)).transpose(1, 2, 3, 0)
    savemat(path, {"X": pixels, "y": np.array(labels, dtype=np.uint8)[:, None]})


def svhn(root):
    base = root / "svhn"
    digits_mat(base / "train_32x32.mat", 0, [1, 9, 10, 2])
    digits_mat(base / "test_32x32.mat", 50, [5, 10])
    return base


# ------------------------------------------------------------------ ImageNet
TENCH, GOLDFISH, TABBY = "n01440764", "n01443537", "n02123045"
VAL = {1: TABBY, 2: TENCH, 3: GOLDFISH, 4: TABBY}  # image number → class


def train_folders(base, counts):
    for wnid, count in counts.items():
        images(base / "train" / wnid, [f"{wnid}_{26 + i}.JPEG" for i in range(count)])


def val_names():
    return [f"ILSVRC2012_val_{i:08d}.JPEG" for i in VAL]


def devkit(folder, truth):
    """meta.mat, whose numbers are in another order than the WNIDs and whose inner nodes come last; and the truth."""
    records = []
    for number, wnid, words, children in (
        (1, GOLDFISH, "goldfish, Carassius auratus", []),
        (2, TABBY, "tabby, tabby cat", []),
        (3, TENCH, "tench, Tinca tinca", []),
        (4, "n00001740", "entity", [5]),
        (5, "n02512053", "fish", [1, 3]),
    ):
        record = {"ILSVRC2012_ID": float(number), "WNID": wnid, "words": words, "gloss": f"a {words}"}
        record |= {"num_children": float(len(children)), "children": np.array([children], dtype=float)}
        records.append({**record, "wordnet_height": 0.0, "num_train_images": 1300.0})
    (folder / "data").mkdir(parents=True)
    savemat(folder / "data/meta.mat", {"synsets": structs(records).T})
    write(folder / "data/ILSVRC2012_validation_ground_truth.txt", *truth)


def imagenet(root):
    """val as the archive unpacks it, flat, with the devkit beside it."""
    base = root / "imagenet"
    train_folders(base, {TABBY: 1, TENCH: 2, GOLDFISH: 1})
    images(base / "val", val_names())
    devkit(base / "ILSVRC2012_devkit_t12", [2, 3, 1, 2])
    return base


def imagenet_folders(root):
    """val sorted into WNID folders."""
    base = root / "imagenet"
    train_folders(base, {TABBY: 1, TENCH: 2, GOLDFISH: 1})
    images(base / "val", [f"{VAL[i + 1]}/{name}" for i, name in enumerate(val_names())])
    return base


def imagenet_kaggle(root):
    """Kaggle's copy; its table is in an order of its own and has boxes behind the WNID."""
    base = root / "ILSVRC/Data/CLS-LOC"
    train_folders(base, {TABBY: 1, TENCH: 2, GOLDFISH: 1})
    images(base / "val", val_names())
    images(base / "test", ["ILSVRC2012_test_00000001.JPEG"])
    with open(root / "LOC_val_solution.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["ImageId", "PredictionString"])
        for number, wnid in reversed(VAL.items()):
            table.writerow([f"ILSVRC2012_val_{number:08d}", f"{wnid} 85 1 499 272 {wnid} 0 0 9 9 "])
    return base


def imagenet100(root):
    """Two classes of a list of one's own, in ImageNet as it is."""
    base = imagenet(root)
    write(base / "imagenet100.txt", f"{TABBY} tabby, tabby cat", TENCH)
    return base


def imagenet100_shipped(root, wnids):
    """All classes of a list, an image each; val in folders."""
    base = root / "imagenet"
    source = paint(root / "one.JPEG")
    for wnid in wnids:
        for part in ("train", "val"):
            (base / part / wnid).mkdir(parents=True)
            shutil.copy(source, base / part / wnid / f"{wnid}_1.JPEG")
    return base


# ------------------------------------------------------------------ all
def folder(root):
    return tree(root, train={"dog": 1, "cat": 2}, val={"cat": 1, "dog": 1})


BUILD = {
    **{f.__name__: f for f in (flowers, pets, dtd, indoor67, cub200, aircraft, cars, cifar10, cifar100, svhn)},
    **{f.__name__: f for f in (imagenet, imagenet100, folder)},
    **{
        name: functools.partial(domainnet, domain=name.removeprefix("domainnet-"))
        for name in DATASETS
        if name.startswith("domainnet-")
    },
}
