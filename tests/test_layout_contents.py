"""Official layouts with one thing wrong in their files: each is one line that names the file and what is wanted."""

import shutil

import numpy as np
import official
import pytest
from folders import faults, paint, section
from official import BUILD, GOLDFISH, TABBY, TENCH, append, squares, write
from scipy.io import loadmat, savemat

from idmm.data.datasets import open_splits
from idmm.data.registry import DATASETS

HALF = "the archive may be half-unpacked"


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
    savemat(path, {key: official.structs(records)})


def relabel_cars(base, number, label):
    change_structs(base / "devkit/cars_train_annos.mat", "annotations", **{"class": {number: label}})


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


META, TRUTH = (f"ILSVRC2012_devkit_t12/data/{name}" for name in ("meta.mat", "ILSVRC2012_validation_ground_truth.txt"))
NO_IMAGE, RANGE, NO_NUMBER = "names an image that is not there", "is out of range, wanted", "wanted a whole number"
SPOILT = [  # dataset, what is done to it, what is said after 'data.root: '
    # ---- images that are listed and not there
    ("flowers", lambda b: (b / "jpg/image_00006.jpg").unlink(),
     f"'BASE/setid.mat' {NO_IMAGE}: jpg/image_00006.jpg (under 'BASE'); HALF"),
    ("flowers", lambda b: [path.unlink() for path in (b / "jpg").iterdir()],
     "'BASE/setid.mat' names 4 images not there: jpg/image_00007.jpg, jpg/image_00002.jpg, jpg/image_00005.jpg"
     " and 1 more (under 'BASE'); HALF"),
    ("pets", lambda b: append(b / "annotations/test.txt", "Abyssinian_9 1 1 1"),
     f"'BASE/annotations/test.txt' {NO_IMAGE}: images/Abyssinian_9.jpg (under 'BASE'); HALF"),
    ("dtd", lambda b: (b / "images/blotchy/blotchy_0006.jpg").unlink(),
     f"'BASE/labels/train1.txt' and 'BASE/labels/val1.txt' {NO_IMAGE}: images/blotchy/blotchy_0006.jpg"
     " (under 'BASE'); HALF"),
    ("indoor67", lambda b: shutil.rmtree(b / "Images/gameroom"),
     "'BASE/TrainImages.txt' names 2 images not there: Images/gameroom/bt_132294gameroom2.jpg,"
     " Images/gameroom/g_1.jpg (under 'BASE'); HALF"),
    ("cub200", lambda b: append(b / "images.txt", "6 002.Laysan_Albatross/x.jpg") and
     append(b / "image_class_labels.txt", "6 2") and append(b / "train_test_split.txt", "6 0"),
     f"'BASE/images.txt' {NO_IMAGE}: images/002.Laysan_Albatross/x.jpg (under 'BASE'); HALF"),
    ("aircraft", lambda b: (b / "images/1514522.jpg").unlink(),
     f"'BASE/images_variant_test.txt' {NO_IMAGE}: images/1514522.jpg (under 'BASE'); HALF"),
    ("cars", lambda b: (b / "cars_test/00003.jpg").unlink(),
     f"'BASE/cars_test_annos_withlabels.mat' {NO_IMAGE}: cars_test/00003.jpg (under 'BASE'); HALF"),
    ("domainnet-real", lambda b: append(b / "real_test.txt", "real/axe/real 9.jpg 2"),
     f"'BASE/real_test.txt' {NO_IMAGE}: real/axe/real 9.jpg (under 'BASE'); HALF"),
    ("imagenet", lambda b: (b / "val/ILSVRC2012_val_00000002.JPEG").unlink(),
     f"'BASE/val' has 3 images, 'BASE/{TRUTH}' labels for 4; HALF"),
    ("imagenet", lambda b: [path.unlink() for path in (b / "train" / TENCH).iterdir()],
     f"'BASE/train/{TENCH}' has no images; HALF"),
    ("imagenet", lambda b: shutil.rmtree(b / "train") or (b / "train").mkdir(),
     "'BASE/train' has no class folders; wanted train/WNID/*.JPEG"),
    # ---- images that are named twice
    ("flowers", lambda b: change_mat(b / "setid.mat", valid=[[5, 7]]),
     "'BASE/setid.mat' names 1 image twice: jpg/image_00007.jpg"),
    ("pets", lambda b: first_again(b / "annotations/test.txt"),
     "'BASE/annotations/test.txt' names 1 image twice: images/american_pit_bull_terrier_10.jpg"),
    ("dtd", lambda b: append(b / "labels/val1.txt", "banded/banded_0002.jpg"),
     "'BASE/labels/train1.txt' and 'BASE/labels/val1.txt' names 1 image twice: banded/banded_0002.jpg"),
    ("indoor67", lambda b: first_again(b / "TestImages.txt"),
     "'BASE/TestImages.txt' names 1 image twice: airport_inside/airport_inside_0005.jpg"),
    ("cub200", lambda b: bird(b, 6, "002.Laysan_Albatross/Laysan_Albatross_0003_1033.jpg"),
     "'BASE/images.txt' names 1 image twice: images/002.Laysan_Albatross/Laysan_Albatross_0003_1033.jpg"),
    ("cub200", lambda b: bird(b, 5, "002.Laysan_Albatross/another.jpg"),
     "'BASE/images.txt' names 1 image twice: 5"),
    ("aircraft", lambda b: append(b / "images_variant_trainval.txt", "1340192 Yak-42"),
     "'BASE/images_variant_trainval.txt' names 1 image twice: images/1340192.jpg"),
    ("cars", lambda b: change_structs(b / "devkit/cars_train_annos.mat", "annotations", fname={3: "00001.jpg"}),
     "'BASE/devkit/cars_train_annos.mat' names 1 image twice: cars_train/00001.jpg"),
    ("domainnet-real", lambda b: first_again(b / "real_train.txt"),
     "'BASE/real_train.txt' names 1 image twice: real/the_Eiffel_Tower/real_001_000001.jpg"),
    # ---- labels that are none
    *(("flowers", lambda b, n=n: change_mat(b / "imagelabels.mat", labels=[[77, 1, n, 1, 5, 77, 102, 5]]),
       f"'BASE/imagelabels.mat', entry 3: label {n} {RANGE} 1 to 102") for n in (0, 103)),
    *(("flowers", lambda b, n=n: change_mat(b / "setid.mat", tstid=[[8, n]]),
       f"'BASE/setid.mat', entry 2: label {n} {RANGE} 1 to 8") for n in (0, 9)),
    *(("pets", lambda b, n=n: append(b / "annotations/test.txt", f"Sphynx_1 {n} 1 1"),
       f"'BASE/annotations/test.txt', entry 4: label {n} {RANGE} 1 to 37") for n in (0, 38)),
    ("pets", lambda b: append(b / "annotations/test.txt", "Sphynx_1 one 1 1"),
     f"'BASE/annotations/test.txt', entry 4: label 'one', {NO_NUMBER}"),
    ("pets", lambda b: append(b / "annotations/test.txt", "Sphynx_1 1 1 1"),
     "'BASE/annotations/test.txt': 'Sphynx_1' has the class 1, as 'Abyssinian' has, wanted a number for each class"),
    *(("cub200", lambda b, n=n: bird(b, 6, "x.jpg", label=n),
       f"'BASE/image_class_labels.txt', entry 6: label {n} {RANGE} 1 to 2") for n in (0, 3)),
    ("cub200", lambda b: bird(b, 6, "x.jpg", part=2),
     f"'BASE/train_test_split.txt', entry 6: label 2 {RANGE} 0 to 1"),
    *(("cub200", lambda b, name=name: write(b / name, "1 1", "2 1", "3 1"),
       f"'BASE/{name}' has no line for image 4, 5 of images.txt")
      for name in ("image_class_labels.txt", "train_test_split.txt")),
    ("aircraft", lambda b: append(b / "images_variant_test.txt", "1514522 Zeppelin NT"),
     "'BASE/images_variant_test.txt' has variants that variants.txt lacks: Zeppelin NT"),
    *(("cars", lambda b, n=n: relabel_cars(b, 2, n),
       f"'BASE/devkit/cars_train_annos.mat', entry 3: label {n} {RANGE} 1 to 3") for n in (0, 4)),
    ("cars", lambda b: shutil.copy(b / "devkit/cars_test_annos.mat", b / "cars_test_annos_withlabels.mat"),
     "'BASE/cars_test_annos_withlabels.mat': 'annotations' has no fname and class; wanted the devkit with labels"),
    *(("domainnet-real", lambda b, n=n: pictured(b, "real_test.txt", f"real/x/1.jpg {n}"),
       f"'BASE/real_test.txt', entry 3: label {n} {RANGE} 0 to 344") for n in (-1, 345)),
    ("domainnet-real", lambda b: append(b / "real_test.txt", "real/x/1.jpg"),
     f"'BASE/real_test.txt', entry 3: label 'real/x/1.jpg', {NO_NUMBER}"),
    *(("domainnet-real", lambda b, line=line: append(b / "real_train.txt", line),
       f"'BASE/real_train.txt': '{line}', wanted 'real/CLASS/FILE LABEL', a number for each class")
      for line in ("axe/1.jpg 2", "real/hammer/1.jpg 2")),
    ("cifar10", lambda b: official.batch(b / "data_batch_2", 0, [0, 10]),
     f"'BASE/data_batch_2', entry 2: label 10 {RANGE} 0 to 9"),
    ("cifar100", lambda b: official.batch(b / "test", 0, [-1, 3], key="fine_labels"),
     f"'BASE/test', entry 1: label -1 {RANGE} 0 to 3"),
    *(("svhn", lambda b, n=n: official.digits_mat(b / "test_32x32.mat", 0, [1, n]),
       f"'BASE/test_32x32.mat', entry 2: label {n} {RANGE} 1 to 10") for n in (0, 11)),
    *(("svhn", lambda b, n=n: change_mat(b / "test_32x32.mat", y=[[1.0], [n]]),
       f"'BASE/test_32x32.mat', entry 2: label '{n}', {NO_NUMBER}") for n in (1.5, np.nan, np.inf)),
    *(("imagenet", lambda b, n=n: write(b / TRUTH, 2, 3, n, 2),
       f"'BASE/{TRUTH}', entry 3: label {n} {RANGE} 1 to 3") for n in (0, 4)),
    # ---- lines that are cut off; the number is the line's in the file
    ("pets", lambda b: append(b / "annotations/trainval.txt", "\n\nAbyssinian_100"),
     "'BASE/annotations/trainval.txt', line 6 is 'Abyssinian_100', wanted 'NAME CLASS ...'"),
    ("dtd", lambda b: append(b / "labels/val1.txt", "banded_0005.jpg"),
     "'BASE/labels/val1.txt', line 4 is 'banded_0005.jpg', wanted 'CLASS/FILE'"),
    ("indoor67", lambda b: append(b / "TestImages.txt", "\nImages/gameroom/1.jpg"),
     "'BASE/TestImages.txt', line 4 is 'Images/gameroom/1.jpg', wanted 'CLASS/FILE'"),
    *(("cub200", lambda b, name=name: append(b / f"{name}.txt", "6"),
       f"'BASE/{name}.txt', line 6 is '6', wanted 'IMAGE_NUMBER VALUE'")
      for name in ("images", "image_class_labels", "train_test_split")),
    ("cub200", lambda b: append(b / "classes.txt", "3"),
     "'BASE/classes.txt', line 3 is '3', wanted 'CLASS_NUMBER NAME'"),
    ("aircraft", lambda b: append(b / "images_variant_test.txt", "1514522"),
     "'BASE/images_variant_test.txt', line 4 is '1514522', wanted 'NUMBER VARIANT'"),
    # ---- splits without images, which no flag may let pass
    ("flowers", lambda b: change_mat(b / "setid.mat", tstid=np.zeros((1, 0))),
     "'BASE/setid.mat' leaves a split without images; HALF"),
    ("pets", lambda b: write(b / "annotations/trainval.txt", "#Image CLASS-ID SPECIES BREED ID"),
     "'BASE/annotations/trainval.txt' leaves a split without images; HALF"),
    ("cub200", lambda b: write(b / "train_test_split.txt", *(f"{i} 1" for i in range(1, 6))),
     "'BASE/images.txt' leaves a split without images; HALF"),
    # ---- pixels
    ("svhn", lambda b: change_mat(b / "test_32x32.mat", X=np.zeros((32, 32, 2), np.uint8)),
     "'BASE/test_32x32.mat': X is uint8 [32, 32, 2, 1] beside 2 labels, wanted uint8 [32, 32, 3, N] and N"),
    ("svhn", lambda b: change_mat(b / "test_32x32.mat", X=np.zeros((2, 32, 32, 3), np.uint8)),
     "'BASE/test_32x32.mat': X is uint8 [2, 32, 32, 3] beside 2 labels, wanted uint8 [32, 32, 3, N] and N"),
    ("svhn", lambda b: change_mat(b / "train_32x32.mat", X=np.zeros((32, 32, 3, 4))),
     "'BASE/train_32x32.mat': X is float64 [32, 32, 3, 4] beside 4 labels, wanted uint8 [32, 32, 3, N] and N"),
    ("svhn", lambda b: change_mat(b / "train_32x32.mat", y=[[1], [2], [3]]),
     "'BASE/train_32x32.mat': X is uint8 [32, 32, 3, 4] beside 3 labels, wanted uint8 [32, 32, 3, N] and N"),
    ("svhn", lambda b: savemat(b / "test_32x32.mat", {"X": np.zeros((32, 32, 3, 0), np.uint8), "y": np.zeros((0, 1))}),
     "'BASE/test_32x32.mat': X is uint8 [0] beside 0 labels, wanted uint8 [32, 32, 3, N] and N"),
    *(("cifar10", lambda b, data=data: official.python2_pickle(b / "test_batch", {"data": data, "labels": [1, 2]}),
       f"'BASE/test_batch': data is {data.dtype} {list(data.shape)} beside 2 labels, wanted uint8 [N, 3072] and N")
      for data in (np.zeros((2, 3071), np.uint8), np.zeros((1, 3072), np.uint8), np.zeros((2, 3072), np.int64))),
    ("cifar10", lambda b: official.batch(b / "data_batch_5", 0, []),
     "'BASE/data_batch_5': data is uint8 [0, 3072] beside 0 labels, wanted uint8 [N, 3072] and N"),
    ("cifar10", lambda b: official.batch(b / "test_batch", 0, 7 * [1], key="fine_labels"),
     "'BASE/test_batch' lacks the entry 'labels'; wanted is the Python version"),
    ("cifar100", lambda b: official.python2_pickle(b / "meta", {"label_names": ["a"]}),
     "'BASE/meta' lacks the entry 'fine_label_names'; wanted is the Python version"),
    ("cifar100", lambda b: official.python2_pickle(b / "meta", {"fine_label_names": 4}),
     "cannot read 'BASE/meta' (its entry 'fine_label_names' is no list); HALF"),
    ("cifar100", lambda b: official.python2_pickle(b / "train", {"data": squares(0, 1), "fine_labels": 3}),
     "cannot read 'BASE/train' (its entry 'fine_labels' is no list); HALF"),
    # ---- .mat files that lack something
    ("flowers", lambda b: change_mat(b / "imagelabels.mat", labels=None, classes=[[1]]),
     "'BASE/imagelabels.mat' lacks the variable labels"),
    ("flowers", lambda b: change_mat(b / "setid.mat", valid=None, tstid=None),
     "'BASE/setid.mat' lacks the variable valid, tstid"),
    ("cars", lambda b: change_mat(b / "devkit/cars_meta.mat", class_names=None, names=[[1]]),
     "'BASE/devkit/cars_meta.mat' lacks the variable class_names"),
    ("cars", lambda b: change_mat(b / "devkit/cars_train_annos.mat", annotations=[[1, 2]]),
     "'BASE/devkit/cars_train_annos.mat': 'annotations' has no fname and class; wanted the devkit with labels"),
    ("svhn", lambda b: change_mat(b / "train_32x32.mat", y=None),
     "'BASE/train_32x32.mat' lacks the variable y"),
    ("imagenet", lambda b: savemat(b / META, {"nothing": [[1]]}),
     f"'BASE/{META}' lacks the variable synsets"),
    *(("imagenet", lambda b, f=f: change_structs(b / META, "synsets", **{f: None}),
       f"'BASE/{META}' has no synsets with ILSVRC2012_ID, WNID and num_children")
      for f in ("ILSVRC2012_ID", "WNID", "num_children")),
    ("imagenet", lambda b: change_structs(b / META, "synsets", num_children=2.0),
     f"'BASE/{META}' does not number its synsets without children from 1"),
    *(("imagenet", lambda b, n=n: change_structs(b / META, "synsets", ILSVRC2012_ID={1: n}),
       f"'BASE/{META}' does not number its synsets without children from 1") for n in (7.0, np.zeros(0), "two")),
    # ---- ImageNet's labels and lists
    ("imagenet", lambda b: shutil.rmtree(b / "ILSVRC2012_devkit_t12"),
     "'BASE/val' has no class folders and no labels; wanted val/WNID/*.JPEG, or ILSVRC2012_devkit_t12/data or"
     " LOC_val_solution.csv beside it"),
    ("imagenet", lambda b: (b / TRUTH).unlink(),
     f"cannot read the list 'BASE/{TRUTH}' (no such file or directory)"),
    ("imagenet", lambda b: (b / META).unlink(),
     f"cannot read 'BASE/{META}' (no such file or directory)"),
    ("imagenet", lambda b: paint(b / "val" / TENCH / "1.JPEG"),
     f"'BASE/val' lacks the classes {GOLDFISH}, {TABBY}; HALF"),
    ("imagenet100", lambda b: append(b / "imagenet100.txt", "n00000001 nothing"),
     "'BASE/train' lacks classes of 'BASE/imagenet100.txt': n00000001; HALF"),
    ("imagenet100", lambda b: append(b / "imagenet100.txt", f"{TENCH} again"),
     "'BASE/imagenet100.txt' names a class twice"),
    ("imagenet100", lambda b: write(b / TRUTH, 1, 1, 1, 1),
     f"'BASE/{TRUTH}' leaves a split without images; HALF"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spoil", "text"), SPOILT, ids=[f"{i}-{row[0]}" for i, row in enumerate(SPOILT)])
def test_what_is_wrong_is_named(name, spoil, text, tmp_path):
    base = BUILD[name](tmp_path)
    spoil(base)
    data = section(tmp_path, name=name, allow_size_mismatch=True)
    line = f"data.root: {text}".replace("BASE", str(base)).replace("HALF", HALF)
    spec = DATASETS[name]
    download = f"data.download: 'idmm data download {name} --root {tmp_path}' fetches {name}"
    source = download if spec.archives else f"data.root: {name} cannot be downloaded: {spec.manual}"
    wanted = [line, source] if "not there" in text else [line]  # a download may help
    for labelled in (True, False):
        assert faults(open_splits, data, labelled) == wanted
