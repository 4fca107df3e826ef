"""idmm data: the check finds every planted fault and no other; what is listed and known of each
dataset."""

import shutil

import numpy as np
import pytest
import tifffile
from folders import paint, section, tiles, tree
from helpers import call, call_ok, read, refused
from PIL import Image, ImageEnhance, ImageOps

from idmm.data.listing import list_images
from idmm.data.registry import DATASETS
from idmm.evaluation import baseline


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    root = tmp_path_factory.mktemp("healthy")
    for name in ("china", "flower"):
        tiles(root / "train" / name, range(16), 100, 98, 128)
        tiles(root / "val" / name, range(16, 20), 100, 98, 128)
    return root


@pytest.fixture(scope="module")
def planted(healthy, tmp_path_factory):
    root = tmp_path_factory.mktemp("planted") / "d"
    shutil.copytree(healthy, root)
    china = root / "train/china"
    flower = root / "train/flower"
    val = root / "val"

    def opened(number):
        return Image.open(flower / f"{number:02d}.png")

    (china / "empty.png").touch()
    (china / "broken.jpg").write_bytes(b"\xff\xd8\xff and then nothing")
    shutil.copy(flower / "01.png", flower / "copy.png")
    opened(2).save(flower / "resaved.bmp")
    opened(3).save(flower / "jpeg.jpg", quality=60)
    opened(4).resize((90, 90)).save(flower / "smaller.png")
    ImageEnhance.Brightness(opened(6)).enhance(1.3).save(flower / "brighter.png")
    ImageOps.crop(opened(7), 4).save(flower / "trimmed.png")
    shutil.copy(flower / "08.png", val / "flower/leak.png")
    opened(9).save(val / "flower/jpeg leak.jpg", quality=70)
    shutil.copy(flower / "10.png", china / "wrong.png")
    opened(11).rotate(90).resize((30, 50)).save(flower / "tiny.png")
    return root


def checked(root, out, capsys):
    """Runs the check; returns its exit code, what it printed and what check.json holds."""
    code = call(f"data check --root {root} --out {out}")
    return code, capsys.readouterr().out, read(out / "check.json")


def test_every_planted_fault_is_found_and_no_other(planted, tmp_path, capsys):
    code, text, report = checked(planted, tmp_path / "c", capsys)
    assert code == 1
    assert not report["clean"]
    assert report["unreadable"] == [
        {
            "split": "train",
            "name": "train/china/broken.jpg",
            "reason": "not an image",
        },
        {
            "split": "train",
            "name": "train/china/empty.png",
            "reason": "empty file",
        },
    ]
    assert report["sides"]["train"] == [30, 128, 128]
    assert report["classes"]["train"] == {"china": 19, "flower": 23}
    pairs = {(p["kind"], p["first"]["name"], p["second"]["name"]): p for p in report["pairs"]}
    leaks = {
        ("same file", "train/flower/08.png", "val/flower/leak.png"),
        ("near", "train/flower/09.png", "val/flower/jpeg leak.jpg"),
    }
    conflicts = {("same file", "train/china/wrong.png", "train/flower/10.png")}
    assert {names for names, pair in pairs.items() if pair["leaks"]} == leaks
    assert {names for names, pair in pairs.items() if pair["labels_differ"]} == conflicts
    assert pairs.keys() - leaks - conflicts == {
        ("same file", "train/flower/01.png", "train/flower/copy.png"),
        ("same pixels", "train/flower/02.png", "train/flower/resaved.bmp"),
        ("near", "train/flower/03.png", "train/flower/jpeg.jpg"),
        ("near", "train/flower/04.png", "train/flower/smaller.png"),
        ("near", "train/flower/06.png", "train/flower/brighter.png"),
        ("near", "train/flower/07.png", "train/flower/trimmed.png"),
    }
    for part in (
        "42 train, 10 test images",
        "unreadable: 2 files (train/china/broken.jpg: not an image, "
        "train/china/empty.png: empty file). Most",
        "sizes of train: short sides of 30 to 128 px, median 128",
        "\nduplicates: 3 pairs (",
        "near-duplicates: 4 pairs (",
        "\nleakage: 1 pair (train/flower/08.png and test val/flower/leak.png: same "
        "file). The same image",
        "\nsuspected leakage: 1 pair (",
        "train/china/wrong.png and train/flower/10.png: same file, labels differ",
        "\nFix: unreadable, duplicates, leakage. Look at: near-duplicates, suspected leakage.\n",
    ):
        assert part in text, part
    with Image.open(tmp_path / "c/check.png") as sheet:
        assert sheet.width > 1000
        assert np.asarray(sheet.convert("L")).std() > 20


def test_a_clean_check_exits_0_and_writes_no_sheet(healthy, tmp_path, capsys):
    (tmp_path / "check.png").touch()  # of an earlier check
    code, text, report = checked(healthy, tmp_path, capsys)
    assert code == 0
    assert "\nNothing to fix.\n" in text
    assert "exclude.txt: nothing to leave out" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "check.json",
        "exclude.txt",
    ]
    floor = report.pop("floor")
    assert {
        "images": 8,
        "of": "test",
        "largest_class": 50,
    }.items() <= floor.items()
    assert report == {
        "layout": [],
        "unreadable": [],
        "pairs": [],
        "bands": None,
        "range": None,
        "clean": True,
        "one_colour": [],
        "dark": [],
        "enough_to_pretrain": True,
        "dataset": "folder",
        "root": str(healthy),
        "images": {"train": 32, "test": 8},
        "classes": {
            "train": {"china": 16, "flower": 16},
            "test": {"china": 4, "flower": 4},
        },
        "sides": {"train": [128, 128, 128], "test": [128, 128, 128]},
    }
    for number in (1, 2):  # a list that was edited stays
        (tmp_path / "exclude.txt").write_text(f"# my {number}")
        checked(healthy, tmp_path, capsys)
        assert (tmp_path / f"exclude.old{number}.txt").read_text() == f"# my {number}"


@pytest.mark.parametrize("form", ["flat", "train alone", "one class"])
def test_what_suffices_for_pretraining_is_no_fault(form, tmp_path, capsys):
    where = {"flat": "", "train alone": "train/a/", "one class": "train/a/"}[form]
    for i in range(2):
        paint(tmp_path / f"{where}{i}.png", i)
    use = "pretraining can use all"
    verdict = "Nothing to fix."
    is_labelled = form == "train alone"
    if is_labelled:
        paint(tmp_path / "train/b/0.png", 2)
        use = "idmm train tests on a fifth"
        verdict = "Look at: small classes."
    call_ok(f"data check folder --root {tmp_path}")
    out = capsys.readouterr().out
    assert f"layout: {use} of these images, fine-tuning needs more:\n  data.root: " in out
    assert out.endswith(f"\n{verdict}\n")
    assert ("baseline: " in out) == ("--data.val_fraction" in out) == is_labelled


def test_images_of_one_colour_are_listed_and_stay(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 4, "b": 4}, val={"a": 2, "b": 2})
    for name, colour in (("white", (255, 255, 255)), ("red", (200, 10, 10))):
        Image.new("RGB", (40, 40), colour).save(root / f"train/b/{name}.png")
    code, text, report = checked(root, tmp_path / "c", capsys)
    assert code == 0
    assert report["clean"]
    assert "\nLook at: one colour.\n" in text
    assert "\none colour: 2 images (train/b/red.png, train/b/white.png)" in text
    assert "# of one colour\n#train/b/red.png\n" in (tmp_path / "c/exclude.txt").read_text()


def test_an_out_that_cannot_be_written(healthy, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert call(f"data check {healthy} --out {tmp_path}/file/x") == 2
    assert "out: cannot write" in capsys.readouterr().err


def test_every_command_takes_a_folder_without_its_flag(healthy, tmp_path, capsys):
    """As the flag does, and together with the same flag. Two folders are refused."""
    for name in (
        "train",
        "pretrain",
        "finetune",
        "detect",
        "segment",
        "probe",
        "fewlabel",
    ):
        out = "" if name == "probe" else f"--out {tmp_path}/r"
        for folder in ("DIR", "--data.root DIR", "DIR --data.root DIR"):
            with pytest.raises(SystemExit, match="0"):
                call(f"{name} {folder} {out} --print_config")
            assert "root: DIR" in capsys.readouterr().out
    for folder in (healthy, f"{healthy} --root {healthy}"):
        call_ok(f"data check {folder}")
        assert f"folder in {healthy}: 32 train, 8 test images" in capsys.readouterr().out
    for folder, fault in (
        ("nowhere", "data.root: 'nowhere' does not exist, expected a folder of images"),
        (
            f"{healthy} --root {tmp_path}",
            f"data.name: '{healthy}' is a folder, expected the name of a dataset",
        ),
    ):
        (line,) = refused(capsys, f"data check {folder}")
        assert line.startswith(fault)


def test_a_class_of_few_images_is_named_with_what_becomes_of_it(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 8, "b": 8, "one": 1, "three": 3})
    code, text, _ = checked(root, tmp_path / "c", capsys)
    small = (
        "small classes: 2 of at most 3 images (one: 1, three: 3). If no folder is test, "
        "one image of each is"
    )
    assert code == 0
    assert f"{small} tested, and none of a class of one image. Add images." in text
    assert text.partition("written")[0].endswith("\nLook at: small classes.\n")
    tested = list_images(section(root, val_fraction=0.2), labelled=True).test
    assert np.bincount(tested.labels).tolist() == [2, 2, 0, 1], "as it says"


def test_12_bits_among_16_are_found_before_training(tmp_path, capsys):
    """By the check and by train, each with the range and the flag."""
    root = tmp_path / "d"
    for i in range(20):
        path = root / f"{'train' if i % 4 else 'test'}/{'ab'[i % 2]}/{i}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16), dtype=np.uint16)
        tifffile.imwrite(path, pixels * (16 if i in (1, 4, 6) else 256))
    (root / "test/b").mkdir()
    (root / "test/a/16.tif").rename(root / "test/b/16.tif")
    code, text, report = checked(root, tmp_path / "c", capsys)
    assert code == 0
    assert sorted(report["dark"]) == [
        "test/a/4.tif",
        "train/a/6.tif",
        "train/b/1.tif",
    ]
    span = "[0.0, 65280.0] is 0 to 1"
    for part in (
        f"values of images of more than 8 bits: {span}. Pass --data.range '[LOW, HIGH]'",
        "\ndark: 3 images (",
        "Scale these files.",
        "Look at: dark",
    ):
        assert part in text
    assert call(f"train {root} --minutes 0.01 --out {tmp_path}/r") in (0, 2)
    line = f"data.range: {span}, 2 of 15 images stay in its lowest eighth. Set it by --data.range"
    assert line in capsys.readouterr().err


def test_without_test_images_a_part_of_train_is_held_out(tmp_path, capsys, monkeypatch):
    root = tree(tmp_path / "d", train={"a": 10, "b": 10})
    (root / "train/a/0.png").write_text("no image")
    _, text, report = checked(root, tmp_path / "c", capsys)
    assert report["floor"]["of"] == "train"
    assert "held-out training images at 64 px" in text
    monkeypatch.setattr(baseline, "MOST", 10)  # of many images a part is used
    assert checked(root, tmp_path / "c", capsys)[2]["floor"]["train_images"] <= 10


def test_list_names_every_dataset_with_its_figures(capsys):
    call_ok("data list")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for spec in DATASETS.values():
        for figure in (spec.num_classes, spec.train_size, spec.test_size):
            assert figure is None or f" {figure:,} " in lines[spec.name]
        assert spec.title in lines[spec.name]


@pytest.mark.parametrize("name", ["flowers", "cars", "folder"])
def test_info_tells_what_is_known(name, capsys):
    spec = DATASETS[name]
    call_ok(f"data info {name}")
    text = " ".join(capsys.readouterr().out.split())
    about = (
        spec.title,
        spec.citation,
        spec.licence,
        spec.source,
        " ".join(spec.manual.split()),
    )
    for part in (*about, *spec.layout, *spec.archives):
        assert part in text
    assert ("mean_per_class" in text) == (name in ("flowers", "pets", "aircraft"))
