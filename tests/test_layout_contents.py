"""Official layouts with one thing wrong in their files: each is one line that names the file and what is wanted."""

import shutil

import numpy as np
import pytest
from folders import faults, paint, section
from official_trees import (
    BUILD,
    TABBY,
    TENCH,
    advice,
    append,
    batch,
    digits_mat,
    python2_pickle,
    squares,
    structs,
    write,
)
from scipy.io import loadmat, savemat

from idmm.data.datasets import open_splits
from idmm.data.readers.layout import HALF


def change_mat(path, **values):
    """Changes variables of a .mat file; None removes one."""
    content = {key: value for key, value in loadmat(path).items() if not key.startswith("__")}
    savemat(path, {key: value for key, value in {**content, **values}.items() if value is not None})


def change_structs(path, key, **fields):
    """Changes a field of all structs of an array, or of one by number: {2: value}; None leaves it out."""
    records = [dict(zip(row.dtype.names, row, strict=True)) for row in loadmat(path)[key].ravel()]
    for name, values in fields.items():
        for i, record in enumerate(records):
            if values is None:
                del record[name]
            else:
                record[name] = values.get(i, record[name]) if isinstance(values, dict) else values
    savemat(path, {key: structs(records)})


def pictured(base, list_name, line):
    """Appends a line for an image that is there."""
    paint(base / line.rpartition(" ")[0])
    append(base / list_name, line)


def first_again(path):
    append(path, path.read_text().splitlines()[0])


def bird(base, number, path, label=1, part=1):
    for name, value in (("images", path), ("image_class_labels", label), ("train_test_split", part)):
        append(base / f"{name}.txt", f"{number} {value}")
    paint(base / "images" / path)


def write_lists(base, **lists):
    """Writes files of lines, e.g. of cub200."""
    for name, lines in lists.items():
        write(base / f"{name}.txt", *lines)


META, TRUTH = (f"ILSVRC2012_devkit_t12/data/{name}" for name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"))
CAR_LIST, CAR_TEST = "devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat"
SYNSETS = "wanted synsets with ILSVRC2012_ID, WNID and num_children, those without children numbered from 1"
UNLABELLED = "has annotations without fname and class; wanted the devkit with labels"
EMPTY = "leaves a split without images; HALF"


def number(low, high):
    return f"wanted a whole number from {low} to {high}"


def x_is(form):
    return f"wanted uint8 [{form}] and N labels"


SPOILT = [  # dataset, file, what is done to the base, what is said of the file
    # ---- images that are listed and not there
    *((name, file, lambda b, image=image: (b / image).unlink(),
       f"names an image that is not there: {image} (under 'BASE'); HALF")
      for name, file, image in (
          ("flowers", "setid.mat", "jpg/image_00006.jpg"),
          ("pets", "annotations/test.txt", "images/Abyssinian_201.jpg"),
          ("dtd", "labels/train1.txt' and 'BASE/labels/val1.txt", "images/blotchy/blotchy_0006.jpg"),
          ("indoor67", "TestImages.txt", "Images/gameroom/game_room_08.jpg"),
          ("cub200", "images.txt", "images/002.Laysan_Albatross/Laysan_Albatross_0003_1033.jpg"),
          ("aircraft", "images_variant_test.txt", "images/1514522.jpg"),
          ("cars", CAR_TEST, "cars_test/00003.jpg"),
          ("domainnet-real", "real_test.txt", "real/airplane/real_001_000005.jpg"),
      )),
    ("flowers", "setid.mat", lambda b: [path.unlink() for path in (b / "jpg").iterdir()],
     "names 4 images not there: jpg/image_00007.jpg, jpg/image_00002.jpg, jpg/image_00005.jpg and 1 more"
     " (under 'BASE'); HALF"),
    ("imagenet", f"val' and 'BASE/{TRUTH}", lambda b: (b / "val/ILSVRC2012_val_00000002.JPEG").unlink(),
     "have 3 images and 4 labels; HALF"),
    ("imagenet", f"train/{TENCH}", lambda b: [path.unlink() for path in (b / "train" / TENCH).iterdir()],
     "has no images; HALF"),
    ("imagenet", "train", lambda b: shutil.rmtree(b / "train") or (b / "train").mkdir(),
     "has no class folders; wanted train/WNID/*.JPEG"),
    # ---- images that are named twice
    *((name, file, spoil, f"names 1 image twice: {image}; wanted each once")
      for name, file, spoil, image in (
          ("flowers", "setid.mat", lambda b: change_mat(b / "setid.mat", valid=[[5, 7]]), "jpg/image_00007.jpg"),
          ("pets", "annotations/test.txt", lambda b: first_again(b / "annotations/test.txt"),
           "images/american_pit_bull_terrier_10.jpg"),
          ("dtd", "labels/train1.txt' and 'BASE/labels/val1.txt",
           lambda b: append(b / "labels/val1.txt", "banded/banded_0002.jpg"), "images/banded/banded_0002.jpg"),
          ("indoor67", "TestImages.txt", lambda b: first_again(b / "TestImages.txt"),
           "Images/airport_inside/airport_inside_0005.jpg"),
          ("cub200", "images.txt", lambda b: bird(b, 6, "002.Laysan_Albatross/Laysan_Albatross_0003_1033.jpg"),
           "images/002.Laysan_Albatross/Laysan_Albatross_0003_1033.jpg"),
          ("cub200", "images.txt", lambda b: bird(b, 5, "002.Laysan_Albatross/another.jpg"), "5"),
          ("aircraft", "images_variant_trainval.txt",
           lambda b: append(b / "images_variant_trainval.txt", "1340192 Yak-42"), "images/1340192.jpg"),
          ("cars", CAR_LIST, lambda b: change_structs(b / CAR_LIST, "annotations", fname={3: "00001.jpg"}),
           "cars_train/00001.jpg"),
          ("domainnet-real", "real_train.txt", lambda b: first_again(b / "real_train.txt"),
           "real/the_Eiffel_Tower/real_001_000001.jpg"),
      )),
    # ---- labels and image numbers that are none
    *((name, file, lambda b, spoil=spoil, value=value: spoil(b, value),
       f"has '{value}' as value {place}; {number(low, high)}")
      for name, file, values, place, (low, high), spoil in (
          ("flowers", "imagelabels.mat", (0, 103), 3, (1, 102),
           lambda b, n: change_mat(b / "imagelabels.mat", labels=[[77, 1, n, 1, 5, 77, 102, 5]])),
          ("flowers", "setid.mat", (0, 9), 2, (1, 8), lambda b, n: change_mat(b / "setid.mat", tstid=[[8, n]])),
          ("pets", "annotations/test.txt", (0, 38, "one"), 4, (1, 37),
           lambda b, n: append(b / "annotations/test.txt", f"Sphynx_1 {n} 1 1")),
          ("cub200", "image_class_labels.txt", (0, 3), 6, (1, 2), lambda b, n: bird(b, 6, "x.jpg", label=n)),
          ("cub200", "train_test_split.txt", (2,), 6, (0, 1), lambda b, n: bird(b, 6, "x.jpg", part=n)),
          ("cars", CAR_LIST, (0, 4), 3, (1, 3),
           lambda b, n: change_structs(b / CAR_LIST, "annotations", **{"class": {2: n}})),
          ("domainnet-real", "real_test.txt", (-1, 345, "x"), 3, (0, 344),
           lambda b, n: pictured(b, "real_test.txt", f"real/x/1.jpg {n}")),
          ("cifar10", "data_batch_2", (10,), 2, (0, 9), lambda b, n: batch(b / "data_batch_2", 0, [0, n])),
          ("cifar100", "test", (-1,), 1, (0, 3), lambda b, n: batch(b / "test", 0, [n, 3], key="fine_labels")),
          ("svhn", "test_32x32.mat", (0, 11), 2, (1, 10), lambda b, n: digits_mat(b / "test_32x32.mat", 0, [1, n])),
          ("svhn", "test_32x32.mat", (1.5, np.nan, np.inf), 2, (1, 10),
           lambda b, n: change_mat(b / "test_32x32.mat", y=[[1.0], [n]])),
          ("imagenet", TRUTH, (0, 4), 3, (1, 3), lambda b, n: write(b / TRUTH, 2, 3, n, 2)),
      )
      for value in values),
    # ---- classes that do not agree
    ("pets", "annotations/test.txt", lambda b: append(b / "annotations/test.txt", "Sphynx_1 1 1 1"),
     "has 'images/Sphynx_1.jpg' with the class 1, which is 'Abyssinian' before; wanted a number for each class"),
    ("domainnet-real", "real_train.txt", lambda b: append(b / "real_train.txt", "real/hammer/1.jpg 2"),
     "has 'real/hammer/1.jpg' with the class 2, which is 'axe' before; wanted a number for each class"),
    *(("cub200", f"{name}.txt", lambda b, name=name: write_lists(b, **{name: ("1 1", "2 1", "3 1")}),
       "has no line for image 4, 5 of images.txt; HALF") for name in ("image_class_labels", "train_test_split")),
    ("aircraft", "images_variant_test.txt", lambda b: append(b / "images_variant_test.txt", "1514522 Zeppelin NT"),
     "has variants that variants.txt lacks: Zeppelin NT; HALF"),
    ("cars", CAR_TEST, lambda b: shutil.copy(b / "devkit/cars_test_annos.mat", b / CAR_TEST), UNLABELLED),
    ("cars", CAR_LIST, lambda b: change_mat(b / CAR_LIST, annotations=[[1, 2]]), UNLABELLED),
    # ---- lines that are cut off; the number is the line's in the file
    *((name, file, lambda b, file=file, line=line: append(b / file, line),
       f"has '{line.strip()}' in line {place}; wanted '{form}'")
      for name, file, line, place, form in (
          ("pets", "annotations/trainval.txt", "\n\nAbyssinian_100", 6, "NAME CLASS ..."),
          ("dtd", "labels/val1.txt", "banded_0005.jpg", 4, "CLASS/FILE"),
          ("indoor67", "TestImages.txt", "\nImages/gameroom/1.jpg", 4, "CLASS/FILE"),
          ("cub200", "images.txt", "6", 6, "IMAGE_NUMBER VALUE"),
          ("cub200", "image_class_labels.txt", "6", 6, "IMAGE_NUMBER VALUE"),
          ("cub200", "train_test_split.txt", "6", 6, "IMAGE_NUMBER VALUE"),
          ("cub200", "classes.txt", "3", 3, "CLASS_NUMBER NAME"),
          ("aircraft", "images_variant_test.txt", "1514522", 4, "NUMBER VARIANT"),
          ("domainnet-real", "real_test.txt", "real/x/1.jpg", 3, "real/CLASS/FILE LABEL"),
          ("domainnet-real", "real_train.txt", "axe/1.jpg 2", 5, "real/CLASS/FILE LABEL"),
      )),
    # ---- splits without images, which no flag may let pass
    ("flowers", "setid.mat", lambda b: change_mat(b / "setid.mat", tstid=np.zeros((1, 0))), EMPTY),
    ("pets", "annotations/trainval.txt",
     lambda b: write(b / "annotations/trainval.txt", "#Image CLASS-ID SPECIES BREED ID"), EMPTY),
    ("cub200", "images.txt", lambda b: write(b / "train_test_split.txt", *(f"{i} 1" for i in range(1, 6))), EMPTY),
    ("imagenet100", TRUTH, lambda b: write(b / TRUTH, 1, 1, 1, 1), EMPTY),
    # ---- pixels
    *(("svhn", "test_32x32.mat", lambda b, x=x: change_mat(b / "test_32x32.mat", X=x),
       f"has X as {x.dtype} {shape} beside 2 labels; {x_is('32, 32, 3, N')}")
      for x, shape in (
          (np.zeros((32, 32, 2), np.uint8), [32, 32, 2, 1]),
          (np.zeros((2, 32, 32, 3), np.uint8), [2, 32, 32, 3]),
          (np.zeros((32, 32, 3, 2)), [32, 32, 3, 2]),
      )),
    ("svhn", "train_32x32.mat", lambda b: change_mat(b / "train_32x32.mat", y=[[1], [2], [3]]),
     f"has X as uint8 [32, 32, 3, 4] beside 3 labels; {x_is('32, 32, 3, N')}"),
    ("svhn", "test_32x32.mat",
     lambda b: savemat(b / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1))}),
     f"has X as uint8 [0] beside 0 labels; {x_is('32, 32, 3, N')}"),
    *(("cifar10", "test_batch", lambda b, x=x: python2_pickle(b / "test_batch", {"data": x, "labels": [1, 2]}),
       f"has data as {x.dtype} {list(x.shape)} beside 2 labels; {x_is('N, 3072')}")
      for x in (np.zeros((2, 3071), np.uint8), np.zeros((1, 3072), np.uint8), np.zeros((2, 3072), np.int64))),
    ("cifar10", "data_batch_5", lambda b: batch(b / "data_batch_5", 0, []),
     f"has data as uint8 [0, 3072] beside 0 labels; {x_is('N, 3072')}"),
    ("cifar10", "test_batch", lambda b: python2_pickle(b / "test_batch", {"data": [[1, 2], [3]], "labels": [1, 2]}),
     "cannot be read (setting an array element with a sequence. the requested array has an inhomogeneous shape after 1"
     " dimensions. the detected shape was (2,) + inhomogeneous part.); wanted the Python version with data and labels"),
    ("cifar10", "test_batch",
     lambda b: python2_pickle(b / "test_batch", {"data": np.zeros((2, 3072), np.uint8), "labels": np.array(1)}),
     f"has data as uint8 [2, 3072] beside 1 labels; {x_is('N, 3072')}"),
    *((name, file, spoil, f"has no list '{key}'; wanted the Python version with {keys}")
      for name, file, key, keys, spoil in (
          ("cifar10", "test_batch", "labels", "data and labels",
           lambda b: batch(b / "test_batch", 0, 7 * [1], key="fine_labels")),
          ("cifar100", "meta", "fine_label_names", "fine_label_names",
           lambda b: python2_pickle(b / "meta", {"label_names": ["a"]})),
          ("cifar100", "meta", "fine_label_names", "fine_label_names",
           lambda b: python2_pickle(b / "meta", {"fine_label_names": 4})),
          ("cifar100", "train", "fine_labels", "data and fine_labels",
           lambda b: python2_pickle(b / "train", {"data": squares(0, 1), "fine_labels": 3})),
      )),
    # ---- .mat files that lack something
    *((name, file, lambda b, file=file, left=left: savemat(b / file, left or {"nothing": [[1]]}),
       f"lacks the variable {absent}; wanted a .mat file with {keys}")
      for name, file, left, absent, keys in (
          ("flowers", "imagelabels.mat", {}, "labels", "labels"),
          ("flowers", "setid.mat", {"trnid": [[1]]}, "valid, tstid", "trnid, valid, tstid"),
          ("cars", "devkit/cars_meta.mat", {}, "class_names", "class_names"),
          ("svhn", "train_32x32.mat", {"X": [[1]]}, "y", "X, y"),
          ("imagenet", META, {}, "synsets", "synsets"),
      )),
    ("imagenet", META, lambda b: (b / META).unlink(),
     "cannot be read (no such file or directory); wanted a .mat file with synsets"),
    *(("imagenet", META, lambda b, field=field, value=value: change_structs(b / META, "synsets", **{field: value}),
       f"has other synsets; {SYNSETS}")
      for field, value in (
          ("ILSVRC2012_ID", None), ("WNID", None), ("num_children", None), ("num_children", 2.0),
          ("ILSVRC2012_ID", {1: 7.0}), ("ILSVRC2012_ID", {1: np.zeros(0)}), ("ILSVRC2012_ID", {1: "two"}),
      )),
    # ---- ImageNet's labels and lists
    ("imagenet", "val", lambda b: shutil.rmtree(b / "ILSVRC2012_devkit_t12"),
     "has no class folders and no labels; wanted val/WNID/*.JPEG, or ILSVRC2012_devkit_t12/data or"
     " LOC_val_solution.csv beside it"),
    ("imagenet", TRUTH, lambda b: (b / TRUTH).unlink(), "cannot be read (no such file or directory); wanted a list"),
    ("imagenet", "val", lambda b: paint(b / "val" / TENCH / "1.JPEG"),
     f"lacks classes of 'BASE/train': n01443537, {TABBY}; HALF"),
    ("imagenet100", "train", lambda b: append(b / "imagenet100.txt", "n00000001 nothing"),
     "lacks classes of 'BASE/imagenet100.txt': n00000001; HALF"),
    ("imagenet100", "imagenet100.txt", lambda b: append(b / "imagenet100.txt", f"{TENCH} again"),
     "names a class twice; wanted a WNID a line, each once"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "spoil", "text"), SPOILT, ids=[f"{i}-{r[0]}" for i, r in enumerate(SPOILT)])
def test_what_is_wrong_is_named(name, file, spoil, text, tmp_path):
    base = BUILD[name](tmp_path)
    spoil(base)
    data = section(tmp_path, name=name, allow_size_mismatch=True)
    line = f"data.root: 'BASE/{file}' {text}".replace("BASE", str(base)).replace("HALF", HALF)
    wanted = [line, advice(name, tmp_path)] if "not there" in text else [line]  # a download may help
    for labelled in (True, False):
        assert faults(open_splits, data, labelled) == wanted


def test_an_image_to_train_and_to_test_on(tmp_path):
    """Two lists of the publishers' share no image: else accuracies come out too high."""
    base = BUILD["domainnet-real"](tmp_path)
    line = (base / "real_train.txt").read_text().splitlines()[0]
    append(base / "real_test.txt", line)
    data = section(tmp_path, name="domainnet-real", allow_size_mismatch=True)
    lists = f"'{base / 'real_train.txt'}' and '{base / 'real_test.txt'}'"
    image = line.rpartition(" ")[0]
    assert faults(open_splits, data, True) == [f"data.root: {lists} names 1 image twice: {image}; wanted each once"]
