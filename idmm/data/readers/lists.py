"""Official layouts made of images and lists: flowers, pets, dtd, indoor67, cub200, aircraft, cars, domainnet."""

from pathlib import Path

import numpy as np

from idmm.data.readers.layout import (
    base_folder,
    beside,
    labels_in,
    lines,
    listed_split,
    malformed,
    mat,
    no_repeats,
    numbered,
    rows,
)
from idmm.data.split import Splits
from idmm.errors import UserError, listed

# Of Flowers-102, in the order of its labels; its page shows them, its files do not hold them.
FLOWERS = """pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon
orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow iris,
globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily, pincushion flower,
fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless gentian, artichoke, sweet
william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly, ruby-lipped cattleya, cape flower,
great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword lily, poinsettia, bolero deep blue,
wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia, wild pansy, primula, sunflower, pelargonium,
bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow dahlia?, cautleya spicata, japanese anemone, black-eyed
susan, silverbush, californian poppy, osteospermum, spring crocus, bearded iris, windflower, tree poppy, gazania,
azalea, water lily, rose, thorn apple, morning glory, passion flower, lotus, toad lily, anthurium, frangipani, clematis,
hibiscus, columbine, desert-rose, tree mallow, magnolia, cyclamen, watercress, canna lily, hippeastrum, bee balm, ball
moss, foxglove, bougainvillea, camellia, mallow, mexican petunia, bromelia, blanket flower, trumpet creeper, blackberry
lily"""


def read_flowers(root: Path) -> Splits:
    """Oxford Flowers-102: jpg/, imagelabels.mat and setid.mat; train is its train and val, 2,040 images."""
    base = base_folder(root, "flowers", ("flowers-102", "flowers"), ("jpg", "imagelabels.mat", "setid.mat"))
    classes = " ".join(FLOWERS.split()).split(", ")
    (numbers,) = mat(base / "imagelabels.mat", "labels")
    labels = labels_in(base / "imagelabels.mat", numbers, 1, len(classes))  # [all images]
    train, val, test = mat(base / "setid.mat", "trnid", "valid", "tstid")
    splits = []
    for ids in (np.concatenate([train.ravel(), val.ravel()]), test):
        ids = labels_in(base / "setid.mat", ids, 1, len(labels))  # image numbers from 0
        paths = [f"jpg/image_{i + 1:05d}.jpg" for i in ids]
        no_repeats(base / "setid.mat", paths)
        splits.append(listed_split(base, base / "setid.mat", paths, labels[ids], classes))
    return Splits(splits[0], None, splits[1])


def read_pets(root: Path) -> Splits:
    """Oxford-IIIT Pet: images/, annotations/trainval.txt and test.txt, whose lines are 'NAME CLASS SPECIES BREED'."""
    needed = ("images", "annotations/trainval.txt", "annotations/test.txt")
    base = base_folder(root, "pets", ("oxford-iiit-pet", "pets"), needed)
    files = [base / "annotations" / name for name in ("trainval.txt", "test.txt")]
    tables = [[row for row in rows(file, 2, "NAME CLASS ...") if not row[0].startswith("#")] for file in files]
    labels = [labels_in(f, [r[1].split()[0] for r in table], 1, 37) for f, table in zip(files, tables, strict=True)]
    names: dict[int, str] = {}
    for file, table, own in zip(files, tables, labels, strict=True):
        for row, label in zip(table, own.tolist(), strict=True):
            name = row[0].rpartition("_")[0]
            if names.setdefault(label, name) != name:
                what = f"'{row[0]}' has the class {label + 1}, as '{names[label]}' has"
                raise UserError(f"data.root: '{file}': {what}, wanted a number for each class")
    classes = _classes(names)
    splits = []
    for file, table, own in zip(files, tables, labels, strict=True):
        paths = [f"images/{row[0]}.jpg" for row in table]
        no_repeats(file, paths)
        splits.append(listed_split(base, file, paths, own, classes))
    return Splits(splits[0], None, splits[1])


def read_dtd(root: Path) -> Splits:
    """Describable Textures: images/CLASS/ and labels/; train is train and val of split 1, 3,760 images."""
    needed = ("images", "labels/train1.txt", "labels/val1.txt", "labels/test1.txt")
    base = base_folder(root, "dtd", ("dtd", "dtd/dtd"), needed)
    train = [base / "labels" / name for name in ("train1.txt", "val1.txt")]
    return _by_folder(base, "images", train, [base / "labels" / "test1.txt"])


def read_indoor67(root: Path) -> Splits:
    """MIT Indoor-67: Images/CLASS/, TrainImages.txt and TestImages.txt, in one folder or the lists above it."""
    base = base_folder(root, "indoor67", ("indoorCVPR_09", "indoorCVPR_09/indoorCVPR_09", "indoor67"), ("Images",))
    train, test = (beside("indoor67", name, base, base.parent, root) for name in ("TrainImages.txt", "TestImages.txt"))
    return _by_folder(base, "Images", [train], [test])


def read_cub200(root: Path) -> Splits:
    """Caltech-UCSD Birds 200-2011: images/ and four lists of 'IMAGE_NUMBER VALUE'."""
    names = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
    base = base_folder(root, "cub200", ("CUB_200_2011", "cub200/CUB_200_2011", "cub200"), ("images", *names))
    images, labels, parts = (_by_number(base / name) for name in names[:3])
    classes = [name for _, name in rows(base / "classes.txt", 2, "CLASS_NUMBER NAME")]
    for name, table in (("image_class_labels.txt", labels), ("train_test_split.txt", parts)):
        if absent := [number for number in images if number not in table]:
            raise UserError(f"data.root: '{base / name}' has no line for image {listed(absent)} of images.txt")
    numbers = labels_in(base / "image_class_labels.txt", (labels[i] for i in images), 1, len(classes))
    is_train = labels_in(base / "train_test_split.txt", (parts[i] for i in images), 0, 1).astype(bool)
    paths = np.array([f"images/{path}" for path in images.values()], dtype=object)
    no_repeats(base / "images.txt", paths.tolist())
    train, test = (
        listed_split(base, base / "images.txt", paths[chosen].tolist(), numbers[chosen], classes)
        for chosen in (is_train, ~is_train)
    )
    return Splits(train, None, test)


def read_aircraft(root: Path) -> Splits:
    """FGVC-Aircraft: data/images/ and data/images_variant_{trainval,test}.txt, whose lines are 'NUMBER VARIANT'."""
    files = ("images_variant_trainval.txt", "images_variant_test.txt")
    folders = ("data", "fgvc-aircraft-2013b/data", "aircraft/fgvc-aircraft-2013b/data")
    base = base_folder(root, "aircraft", folders, ("images", "variants.txt", *files))
    classes = lines(base / "variants.txt")
    index = {name: i for i, name in enumerate(classes)}
    splits = []
    for name in files:
        table = rows(base / name, 2, "NUMBER VARIANT")
        if unknown := sorted({variant for _, variant in table if variant not in index}):
            raise UserError(f"data.root: '{base / name}' has variants that variants.txt lacks: {listed(unknown)}")
        paths = [f"images/{number}.jpg" for number, _ in table]
        no_repeats(base / name, paths)
        splits.append(listed_split(base, base / name, paths, [index[variant] for _, variant in table], classes))
    return Splits(splits[0], None, splits[1])


def read_cars(root: Path) -> Splits:
    """Stanford Cars: cars_train/, cars_test/, devkit/ and cars_test_annos_withlabels.mat (there or in devkit)."""
    needed = ("cars_train", "cars_test", "devkit/cars_meta.mat", "devkit/cars_train_annos.mat")
    base = base_folder(root, "cars", ("stanford_cars", "cars"), needed)
    test = beside("cars", "cars_test_annos_withlabels.mat", base, base / "devkit")
    (names,) = mat(base / "devkit/cars_meta.mat", "class_names")
    classes = [str(name) for name in names]
    splits = []
    for folder, file in (("cars_train", base / "devkit/cars_train_annos.mat"), ("cars_test", test)):
        (table,) = mat(file, "annotations")
        if table.dtype.names is None or not {"fname", "class"} <= set(table.dtype.names):
            raise UserError(f"data.root: '{file}': 'annotations' has no fname and class; wanted the devkit with labels")
        paths = [f"{folder}/{name}" for name in table["fname"]]
        no_repeats(file, paths)
        labels = labels_in(file, table["class"], 1, len(classes))
        splits.append(listed_split(base, file, paths, labels, classes))
    return Splits(splits[0], None, splits[1])


def read_domainnet(root: Path, domain: str) -> Splits:
    """A domain of DomainNet: DOMAIN/CLASS/ and DOMAIN_{train,test}.txt, whose lines are 'PATH LABEL'.

    Classes are numbered as the lists do it. In painting, one class has no training and another no test images.
    """
    base = base_folder(root, f"domainnet-{domain}", ("domainnet",), (domain,))
    places = (base, base / "splits", base / "txt")
    files = [beside(f"domainnet-{domain}", f"{domain}_{part}.txt", *places) for part in ("train", "test")]
    # a path may hold spaces: the label is the last word
    tables = [[line.rpartition(" ") for line in lines(file)] for file in files]
    labels = [labels_in(f, [row[2] for row in table], 0, 344) for f, table in zip(files, tables, strict=True)]
    names: dict[int, str] = {}
    for file, table, own in zip(files, tables, labels, strict=True):
        for (path, _, _), label in zip(table, own.tolist(), strict=True):
            name = path.split("/")[-2] if path.count("/") >= 2 else ""
            if not name or names.setdefault(label, name) != name:
                wanted = f"wanted '{domain}/CLASS/FILE LABEL', a number for each class"
                raise UserError(f"data.root: '{file}': '{path} {label}', {wanted}")
    classes = _classes(names)
    splits = []
    for file, table, own in zip(files, tables, labels, strict=True):
        paths = [path.strip() for path, _, _ in table]
        no_repeats(file, paths)
        splits.append(listed_split(base, file, paths, own, classes))
    return Splits(splits[0], None, splits[1])


def _by_number(path: Path) -> dict[str, str]:
    table = rows(path, 2, "IMAGE_NUMBER VALUE")
    no_repeats(path, [number for number, _ in table])
    return dict(table)


def _classes(names: dict[int, str]) -> list[str]:
    """Names in the order of the labels; a label that no list uses has a number for a name."""
    return [names.get(label, f"class {label}") for label in range(max(names, default=-1) + 1)]


def _by_folder(base: Path, folder: str, train: list[Path], test: list[Path]) -> Splits:
    """Reads lists of CLASS/FILE."""
    tables = []
    for files in (train, test):
        paths = []
        for file in files:
            for number, path in numbered(file):
                if path.count("/") != 1:
                    raise malformed(file, number, path, "CLASS/FILE")
                paths.append(path)
        no_repeats(files, paths)
        tables.append(paths)
    classes = sorted({path.partition("/")[0] for paths in tables for path in paths})
    index = {name: i for i, name in enumerate(classes)}
    splits = []
    for files, paths in zip((train, test), tables, strict=True):
        labels = [index[path.partition("/")[0]] for path in paths]
        splits.append(listed_split(base, files, [f"{folder}/{path}" for path in paths], labels, classes))
    return Splits(splits[0], None, splits[1])
