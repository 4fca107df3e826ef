"""The official layouts in miniature, file by file as their publishers lay them out; each builder
returns the base."""

import dataclasses
import functools
import pickle
import shutil
import zlib
from importlib.resources import files

import numpy as np
from folders import paint, section, tree
from scipy.io import savemat

from idmm.data.listing import list_images
from idmm.data.registry import DATASETS


def resize(monkeypatch, name, train, test, classes):
    """Sets the figures of a protocol to those of a miniature."""
    spec = dataclasses.replace(
        DATASETS[name], train_size=train, test_size=test, num_classes=classes
    )
    monkeypatch.setitem(DATASETS, name, spec)


def opened(name, root, **fields):
    return list_images(section(root, name=name, **fields), labelled=True)


def advice(name, root):
    """The line on where the files of a dataset come from."""
    if DATASETS[name].archives:
        return f"data.root: 'idmm data download {name} --root {root}' fetches {name}"
    manual = DATASETS[name].manual.replace("ROOT", str(root))
    return f"data.root: {name} cannot be downloaded: {manual}"


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
    return write(path, *path.read_text().splitlines(), line)


def structs(keys, records):
    """A MATLAB struct array, 1 x N."""
    return np.array([records], dtype=[(key, object) for key in keys])


BIRDS = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
CARS = [
    "AM General Hummer SUV 2000",
    "Acura RL Sedan 2012",
    "Acura TL Sedan 2012",
]
CIFAR10 = [
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
]
TENCH = "n01440764"
TABBY = "n02123045"
CMC = sorted((files("idmm.data") / "imagenet100.txt").read_text().split())
FRUIT = ["apple", "aquarium_fish", "baby", "bear"]
DIGITS = [str(digit) for digit in range(10)]
DOMAINS = [name.removeprefix("domainnet-") for name in DATASETS if name.startswith("domainnet-")]


def table(pattern, text):
    """Path → label from 'NAME LABEL, ...'; in the pattern {0} is the name, {1} and {3} are its ends
    at the last '_'."""
    words = (item.split() for item in text.split(", "))
    return {pattern.format(name, *name.rpartition("_")): int(label) for name, label in words}


def counted(pattern, labels):
    """Path → label of images that are numbered."""
    return {pattern.format(i): label for i, label in enumerate(labels)}


def domain_images(domain):
    """Numbers of classes as in the official lists; one without training images, one that no list
    uses."""
    path = f"{domain}/{{1}}/{domain}_001_{{3}}.{'png' if domain == 'quickdraw' else 'jpg'}"
    train = (
        "the_Eiffel_Tower_000001 4, aircraft_carrier_000002 0, axe_000003 2, "
        "aircraft_carrier_000004 0"
    )
    classes = [
        "aircraft_carrier",
        "airplane",
        "axe",
        "class 3",
        "the_Eiffel_Tower",
    ]
    return (
        table(path, train),
        table(path, "airplane_000005 1, the_Eiffel_Tower_000006 4"),
        classes,
    )


IMAGES = {  # what the builders lay out: train, test (path or name → label), classes
    "flowers": (
        table("jpg/image_0000{}.jpg", "7 101, 2 0, 5 4, 1 76"),
        table("jpg/image_0000{}.jpg", "8 4, 3 101, 6 76, 4 0"),
        {
            0: "pink primrose",
            4: "english marigold",
            76: "passion flower",
            101: "blackberry lily",
        },
    ),
    "pets": (
        table(
            "images/{}.jpg",
            "american_bulldog_12 1, Abyssinian_100 0, american_pit_bull_terrier_9 2",
        ),
        table(
            "images/{}.jpg",
            "american_pit_bull_terrier_10 2, Abyssinian_201 0, american_bulldog_203 1",
        ),
        ["Abyssinian", "American Bulldog", "American Pit Bull Terrier"],
    ),
    "dtd": (
        table(
            "images/{1}/{0}.jpg",
            "zigzagged_64 2, banded_2 0, blotchy_3 1, banded_5 0, blotchy_6 1, zigzagged_1 2",
        ),
        table(
            "images/{1}/{0}.jpg",
            "blotchy_0101 1, banded_0100 0, zigzagged_0102 2",
        ),
        ["banded", "blotchy", "zigzagged"],
    ),
    "indoor67": (
        table(
            "Images/{}.jpg",
            "gameroom/bt_132294gameroom2 1, airport_inside/airport_inside_0001 0, gameroom/g_1 1",
        ),
        table(
            "Images/{}.jpg",
            "airport_inside/airport_inside_0005 0, gameroom/game_room_08 1",
        ),
        ["airport_inside", "gameroom"],
    ),
    "cub200": (
        table(
            "images/{}.jpg",
            f"{BIRDS[0]}/Black_0009_34 0, {BIRDS[1]}/Laysan_2 1, {BIRDS[1]}/Laysan_82 1",
        ),
        table(
            "images/{}.jpg",
            f"{BIRDS[0]}/Black_0046_18 0, {BIRDS[1]}/Laysan_0003_1033 1",
        ),
        BIRDS,
    ),
    "aircraft": (
        table("images/{}.jpg", "1025794 4, 0787226 2, 1340192 0, 0056978 3"),
        table("images/{}.jpg", "1514522 1, 0747566 4, 1008575 2"),
        ["707-320", "727-200", "F/A-18", "Yak-42", "Model B200"],
    ),
    "cars": (
        counted("cars_train/{:05d}.jpg", [2, 0, 1, 2]),
        counted("cars_test/{:05d}.jpg", [1, 2, 0]),
        CARS,
    ),
    "cifar10": (
        counted("train/{:06d}", [6, 9, 1, 6, 8, 0, 0, 6, 1, 8]),
        counted("test/{:06d}", [3, 8, 9]),
        CIFAR10,
    ),
    "cifar100": (
        counted("train/{:06d}", [3, 0, 1, 0, 2]),
        counted("test/{:06d}", [1, 3]),
        FRUIT,
    ),
    "svhn": (
        counted("train_32x32.mat/{:06d}", [1, 9, 0, 2]),
        counted("test_32x32.mat/{:06d}", [5, 0]),
        DIGITS,
    ),
    **{f"domainnet-{domain}": domain_images(domain) for domain in DOMAINS},
    "imagenet": (
        table("train/{1}/{0}.JPEG", f"{TENCH}_26 0, {TENCH}_27 0, {TABBY}_26 1"),
        table("val/{1}/{0}.JPEG", f"{TENCH}_3 0, {TABBY}_1 1, {TABBY}_2 1"),
        [TENCH, TABBY],
    ),
    "imagenet100": (
        {f"train/{wnid}/1.JPEG": label for label, wnid in enumerate(CMC)},
        {f"val/{wnid}/1.JPEG": label for label, wnid in enumerate(CMC)},
        CMC,
    ),
    "folder": (
        {"train/cat/0.png": 0, "train/cat/1.png": 0, "train/dog/0.png": 1},
        {"val/cat/0.png": 0, "val/dog/0.png": 1},
        ["cat", "dog"],
    ),
}


def labels_of(name):
    """Labels of train and of test."""
    return [list(part.values()) for part in IMAGES[name][:2]]


def painted_lists(base, name, folder, line, **lists):
    """Paints a dataset's images and writes its lists; ``lists``: file → train or test, or some of
    the images of one.

    ``line`` makes a line of a path without the folder and its label.
    """
    for file, part in lists.items():
        rows = list(IMAGES[name][part].items()) if isinstance(part, int) else part
        images(base, [path for path, _ in rows])
        write(
            base / f"{file}.txt",
            *(line(path.removeprefix(folder), label) for path, label in rows),
        )
    return base


def flowers(root, size=(12, 9), **numbers):
    """setid.mat and imagelabels.mat, 1 x N each; other ``numbers`` may be given."""
    ids = {"trnid": [7, 2], "valid": [5, 1], "tstid": [8, 3, 6, 4]}
    base = root / "flowers-102"
    numbers = {"labels": [77, 1, 102, 1, 5, 77, 102, 5], **ids, **numbers}
    images(
        base / "jpg",
        [f"image_{i + 1:05d}.jpg" for i in range(len(numbers["labels"]))],
        size,
    )
    savemat(
        base / "imagelabels.mat",
        {"labels": np.array([numbers["labels"]], dtype=np.uint8)},
    )
    ids = {key: np.array([numbers[key]], dtype=np.uint16) for key in ids}
    savemat(base / "setid.mat", ids)
    return base


def pets(root):
    base = root / "oxford-iiit-pet"
    lists = {"annotations/trainval": 0, "annotations/test": 1}
    painted_lists(
        base,
        "pets",
        "images/",
        lambda path, label: f"{path[:-4]} {label + 1} 1 1",
        **lists,
    )
    (base / "images/Abyssinian_100.mat").touch()  # as in the archive
    return base


def dtd(root):
    train = list(IMAGES["dtd"][0].items())
    lists = {
        "labels/train1": train[:3],
        "labels/val1": train[3:],
        "labels/test1": 1,
        "labels/train2": 1,
    }
    return painted_lists(root / "dtd/dtd", "dtd", "images/", lambda path, _: path, **lists)


def indoor67(root):
    base = root / "indoorCVPR_09"
    images(base / "Images", ["gameroom/in_no_list.jpg"])  # most of the archive
    return painted_lists(
        base,
        "indoor67",
        "Images/",
        lambda path, _: path,
        TrainImages=0,
        TestImages=1,
    )


def cub200(root):
    base = root / "CUB_200_2011"
    train, test, _ = IMAGES["cub200"]
    numbered = dict(enumerate(sorted({**train, **test}), start=1))
    images(base, numbered.values())
    for name, value in (
        ("images", lambda path: path.removeprefix("images/")),
        ("image_class_labels", lambda path: {**train, **test}[path] + 1),
        ("train_test_split", lambda path: int(path in train)),
    ):
        write(
            base / f"{name}.txt",
            *(f"{i} {value(path)}" for i, path in numbered.items()),
        )
    write(
        base / "classes.txt",
        *(f"{i} {name}" for i, name in enumerate(BIRDS, start=1)),
    )
    return base


def aircraft(root):
    base = root / "fgvc-aircraft-2013b/data"
    classes = IMAGES["aircraft"][2]
    write(base / "variants.txt", *classes)
    lists = {"images_variant_trainval": 0, "images_variant_test": 1}
    return painted_lists(
        base,
        "aircraft",
        "images/",
        lambda path, label: f"{path[:-4]} {classes[label]}",
        **lists,
    )


def cars(root):
    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    for file, part in (
        ("devkit/cars_train_annos.mat", 0),
        ("cars_test_annos_withlabels.mat", 1),
    ):
        labels = IMAGES["cars"][part]
        images(base, labels)
        records = [
            (39, np.uint8(label + 1), path.rpartition("/")[2]) for path, label in labels.items()
        ]
        savemat(
            base / file,
            {"annotations": structs(("bbox_x1", "class", "fname"), records)},
        )
    savemat(
        base / "devkit/cars_meta.mat",
        {"class_names": np.array([CARS], dtype=object)},
    )
    return base


def domainnet(root, domain):
    lists = {f"{domain}_train": 0, f"{domain}_test": 1}
    line = "{} {}".format
    return painted_lists(root / "domainnet", f"domainnet-{domain}", "", line, **lists)


def pickled(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


def squares(first, count):
    """uint8 [N, 32, 32, 3]: image i is (first + i, 100, 200) all over, but (255, 0, 9) in row 3,
    column 5."""
    pixels = np.empty((count, 32, 32, 3), dtype=np.uint8)
    pixels[...] = (0, 100, 200)
    pixels[..., 0] = np.arange(first, first + count)[:, None, None]
    pixels[:, 3, 5] = (255, 0, 9)
    return pixels


def batch(path, first, labels, key="labels", **more):
    """Writes a file of CIFAR: rows of 1024 red, 1024 green and 1024 blue values."""
    rows = np.ascontiguousarray(squares(first, len(labels)).transpose(0, 3, 1, 2)).reshape(
        len(labels), 3072
    )
    pickled(path, {key: labels, "data": rows, **more})


def cifar10(root):
    base = root / "cifar-10-batches-py"
    train, test = labels_of("cifar10")
    pickled(base / "batches.meta", {"label_names": CIFAR10})
    for i in range(5):
        batch(base / f"data_batch_{i + 1}", 2 * i, train[2 * i : 2 * i + 2])
    batch(base / "test_batch", 50, test)
    return base


def cifar100(root):
    base = root / "cifar-100-python"
    train, test = labels_of("cifar100")
    pickled(
        base / "meta",
        {
            "fine_label_names": IMAGES["cifar100"][2],
            "coarse_label_names": ["fish", "fruit"],
        },
    )
    batch(
        base / "train",
        0,
        train,
        key="fine_labels",
        coarse_labels=[1, 1, 0, 1, 1],
    )
    batch(base / "test", 50, test, key="fine_labels", coarse_labels=[0, 1])
    return base


def svhn(root):
    """X [32, 32, 3, N] and y [N, 1], with 10 for the digit 0."""
    root.mkdir(exist_ok=True)
    for first, part, labels in zip((0, 50), ("train", "test"), labels_of("svhn"), strict=True):
        y = np.array([[label or 10] for label in labels], dtype=np.uint8)
        savemat(
            root / f"{part}_32x32.mat",
            {"X": squares(first, len(labels)).transpose(1, 2, 3, 0), "y": y},
        )
    return root


def imagenet(root, name="imagenet"):
    for part in IMAGES[name][:2]:
        images(root, part)
    return root


def imagenet100(root):
    """An image of each class of the list that comes with idmm, and a class beside them."""
    source = paint(root / "one.JPEG")
    train, test, _ = IMAGES["imagenet100"]
    for path in [
        *train,
        *test,
        "train/n00000001/1.JPEG",
        "val/n00000001/1.JPEG",
    ]:
        (root / path).parent.mkdir(parents=True)
        shutil.copy(source, root / path)
    return root


def folder(root):
    return tree(root, train={"dog": 1, "cat": 2}, val={"cat": 1, "dog": 1})


BUILD = {
    **{
        f.__name__: f
        for f in (
            flowers,
            pets,
            dtd,
            indoor67,
            cub200,
            aircraft,
            cars,
            cifar10,
            cifar100,
            svhn,
        )
    },
    **{f.__name__: f for f in (imagenet, imagenet100, folder)},
    **{f"domainnet-{domain}": functools.partial(domainnet, domain=domain) for domain in DOMAINS},
}
