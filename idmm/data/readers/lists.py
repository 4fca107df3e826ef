"""Official layouts made of images and lists: flowers, pets, dtd, indoor67, cub200, aircraft, cars, domainnet."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from idmm.data.readers.layout import (
    NotAsPublished,
    folder_with,
    lines,
    listed_splits,
    mat,
    no_repeats,
    numbers_from,
    rows,
)
from idmm.data.split import Splits
from idmm.errors import listed

_TWO = r"(\S+)\s+(.+)"  # a word, and the rest of the line


def read_flowers(root: Path) -> Splits:
    """Oxford Flowers-102: jpg/, imagelabels.mat and setid.mat; train is its train and val, 2,040 images."""
    folders = [root, root / "flowers-102", root / "flowers"]
    base = folder_with("flowers", folders, "jpg", "imagelabels.mat", "setid.mat")
    classes = lines(files("idmm.data.readers") / "flowers102.txt")  # its page shows them, its files do not hold them
    (numbers,) = mat(base / "imagelabels.mat", "labels")
    labels = numbers_from(base / "imagelabels.mat", numbers, 1, len(classes))  # [all images]
    source = base / "setid.mat"
    train, val, test = mat(source, "trnid", "valid", "tstid")
    parts = []
    for ids in (np.concatenate([train.ravel(), val.ravel()]), test):
        ids = numbers_from(source, ids, 1, len(labels))  # image numbers from 0
        parts.append((source, [f"jpg/image_{i + 1:05d}.jpg" for i in ids], labels[ids]))
    return listed_splits(base, classes, *parts)


def read_pets(root: Path) -> Splits:
    """Oxford-IIIT Pet: images/, annotations/trainval.txt and test.txt, whose lines are 'NAME CLASS SPECIES BREED'."""
    names = ("annotations/trainval.txt", "annotations/test.txt")
    base = folder_with("pets", [root, root / "oxford-iiit-pet", root / "pets"], "images", *names)
    parts = []
    for file in (base / name for name in names):
        table = [row for row in rows(file, r"(\S+)\s+(\S+).*", "NAME CLASS ...") if not row[0].startswith("#")]
        parts.append((file, [(f"images/{name}.jpg", name.rpartition("_")[0], label) for name, label in table]))
    return _by_class_number(base, parts, 1, 37)


def read_dtd(root: Path) -> Splits:
    """Describable Textures: images/CLASS/ and labels/; train is train and val of split 1, 3,760 images."""
    train, test = ("labels/train1.txt", "labels/val1.txt"), ("labels/test1.txt",)
    base = folder_with("dtd", [root, root / "dtd", root / "dtd/dtd"], "images", *train, *test)
    return _by_class_folder(base, "images", [base / name for name in train], [base / name for name in test])


def read_indoor67(root: Path) -> Splits:
    """MIT Indoor-67: Images/CLASS/, TrainImages.txt and TestImages.txt, in one folder or the lists above it."""
    folders = [root / name for name in ("", "indoorCVPR_09", "indoorCVPR_09/indoorCVPR_09", "indoor67")]
    base = folder_with("indoor67", folders, "Images")
    names, places = ("TrainImages.txt", "TestImages.txt"), [base, base.parent, root]
    train, test = (folder_with("indoor67", places, name) / name for name in names)
    return _by_class_folder(base, "Images", [train], [test])


def read_cub200(root: Path) -> Splits:
    """Caltech-UCSD Birds 200-2011: images/ and four lists of 'IMAGE_NUMBER VALUE'."""
    names = ("images.txt", "image_class_labels.txt", "train_test_split.txt")
    folders = [root / name for name in ("", "CUB_200_2011", "cub200/CUB_200_2011", "cub200")]
    base = folder_with("cub200", folders, "images", *names, "classes.txt")
    classes = [name for _, name in rows(base / "classes.txt", _TWO, "CLASS_NUMBER NAME")]
    tables = []
    for file in (base / name for name in names):
        table = rows(file, _TWO, "IMAGE_NUMBER VALUE")
        no_repeats(file, [number for number, _ in table])
        tables.append(dict(table))
    images, values = tables[0], []
    for name, table, (low, high) in zip(names[1:], tables[1:], ((1, len(classes)), (0, 1)), strict=True):
        if absent := [number for number in images if number not in table]:
            raise NotAsPublished(base / name, f"has no line for image {listed(absent)} of images.txt")
        values.append(numbers_from(base / name, (table[number] for number in images), low, high))
    labels, is_train = values[0], values[1] == 1
    paths = np.array([f"images/{path}" for path in images.values()], dtype=object)
    no_repeats(base / names[0], paths.tolist())
    return listed_splits(
        base, classes, *((base / names[0], paths[chosen].tolist(), labels[chosen]) for chosen in (is_train, ~is_train))
    )


def read_aircraft(root: Path) -> Splits:
    """FGVC-Aircraft: data/images/ and data/images_variant_{trainval,test}.txt, whose lines are 'NUMBER VARIANT'."""
    names = ("images_variant_trainval.txt", "images_variant_test.txt")
    folders = ["", "data", "fgvc-aircraft-2013b/data", "aircraft/fgvc-aircraft-2013b/data"]
    base = folder_with("aircraft", [root / name for name in folders], "images", "variants.txt", *names)
    classes, parts = lines(base / "variants.txt"), []
    for file in (base / name for name in names):
        table = rows(file, _TWO, "NUMBER VARIANT")
        if unknown := sorted({variant for _, variant in table} - set(classes)):
            raise NotAsPublished(file, f"has variants that variants.txt lacks: {listed(unknown)}")
        parts.append((file, [(f"images/{number}.jpg", variant) for number, variant in table]))
    return _by_class_name(base, parts, classes)


def read_cars(root: Path) -> Splits:
    """Stanford Cars: cars_train/, cars_test/, devkit/ and cars_test_annos_withlabels.mat (there or in devkit)."""
    meta, train, test = "devkit/cars_meta.mat", "devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat"
    folders = [root, root / "stanford_cars", root / "cars"]
    base = folder_with("cars", folders, "cars_train", "cars_test", meta, train)
    sources = {"cars_train": base / train, "cars_test": folder_with("cars", [base, base / "devkit"], test) / test}
    (names,) = mat(base / meta, "class_names")
    classes, parts = [str(name) for name in names], []
    for folder, file in sources.items():
        (table,) = mat(file, "annotations")
        if table.dtype.names is None or not {"fname", "class"} <= set(table.dtype.names):
            raise NotAsPublished(file, "has annotations without fname and class", "the devkit with labels")
        labels = numbers_from(file, table["class"], 1, len(classes))
        parts.append((file, [f"{folder}/{name}" for name in table["fname"]], labels))
    return listed_splits(base, classes, *parts)


def read_domainnet(root: Path, domain: str) -> Splits:
    """A domain of DomainNet: DOMAIN/CLASS/ and DOMAIN_{train,test}.txt, whose lines are 'PATH LABEL'.

    Classes are numbered as the lists do it. In painting, one class has no training and another no test images.
    """
    name = f"domainnet-{domain}"
    base = folder_with(name, [root, root / "domainnet"], domain)
    parts = []
    for list_name in (f"{domain}_train.txt", f"{domain}_test.txt"):
        file = folder_with(name, [base, base / "splits", base / "txt"], list_name) / list_name
        # a path may hold spaces: the label is the last word
        table = rows(file, r"(.+/([^/]+)/[^/]*\S) +(\S+)", f"{domain}/CLASS/FILE LABEL")
        parts.append((file, table))
    return _by_class_number(base, parts, 0, 344)


def _by_class_number(base: Path, parts: Sequence[tuple], low: int, high: int) -> Splits:
    """Splits of lists that number the classes; ``parts``: a file and rows of path, class name and number each."""
    names: dict[int, str] = {}
    found = []
    for file, table in parts:
        labels = numbers_from(file, [number for _, _, number in table], low, high)
        for (path, name, number), label in zip(table, labels.tolist(), strict=True):
            if names.setdefault(label, name) != name:
                what = f"has '{path}' with the class {number}, which is '{names[label]}' before"
                raise NotAsPublished(file, what, "a number for each class")
        found.append((file, [path for path, _, _ in table], labels))
    # a label that no list uses has a number for a name
    return listed_splits(base, [names.get(i, f"class {i}") for i in range(max(names, default=-1) + 1)], *found)


def _by_class_folder(base: Path, folder: str, train: list[Path], test: list[Path]) -> Splits:
    """Splits of lists of CLASS/FILE."""
    parts = []
    for sources in (train, test):
        table = [row for file in sources for row in rows(file, "(([^/]+)/[^/]+)", "CLASS/FILE")]
        parts.append((sources, [(f"{folder}/{path}", name) for path, name in table]))
    return _by_class_name(base, parts, sorted({name for _, table in parts for _, name in table}))


def _by_class_name(base: Path, parts: Sequence[tuple], classes: list[str]) -> Splits:
    """Splits of lists that name the classes; ``parts``: a file, or some, and rows of path and class name each."""
    index = {name: i for i, name in enumerate(classes)}
    found = [(sources, [path for path, _ in table], [index[name] for _, name in table]) for sources, table in parts]
    return listed_splits(base, classes, *found)
