"""idmm data: the check finds every planted fault and no other; what is listed and known of each
dataset."""

import shutil

import numpy as np
import pytest
import tifffile
from folders import paint, section, tree
from helpers import read
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_image

from idmm.cli import COMMANDS, main
from idmm.config.schema import keys_of
from idmm.data.listing import list_images
from idmm.data.registry import DATASETS
from idmm.evaluation import baseline


def photos(root, split, name, numbers):
    """Cuts squares of 128 px out of a photograph, no two of them overlapping by much."""
    photo = Image.fromarray(load_sample_image(f"{name}.jpg"))
    for i in numbers:
        left = 100 * (i % 5)
        top = 98 * (i // 5)
        path = root / split / name / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        photo.crop((left, top, left + 128, top + 128)).save(path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    root = tmp_path_factory.mktemp("healthy")
    for name in ("china", "flower"):
        photos(root, "train", name, range(16))
        photos(root, "val", name, range(16, 20))
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


def checked(root, out, capsys, *argv):
    """Runs the check; returns its exit code, what it printed and what check.json holds."""
    code = main(["data", "check", "--root", str(root), "--out", str(out), *argv])
    return code, capsys.readouterr().out, read(out / "check.json")


def test_every_planted_fault_is_found_and_no_other(planted, tmp_path, capsys):
    code, text, found = checked(planted, tmp_path / "c", capsys)
    assert code == 1
    assert not found["clean"]
    assert found["unreadable"] == [
        {"split": "train", "name": "train/china/broken.jpg", "reason": "not an image"},
        {"split": "train", "name": "train/china/empty.png", "reason": "empty file"},
    ]
    assert found["sides"]["train"] == [30, 128, 128]
    assert found["classes"]["train"] == {
        "china": 19,
        "flower": 23,
    }
    pairs = {(p["kind"], p["first"]["name"], p["second"]["name"]): p for p in found["pairs"]}
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
    for said in (
        "42 train, 10 test images",
        "unreadable: 2 files (train/china/broken.jpg: not an image, train/china/empty.png: empty file). Most",
        "sizes of train: short sides of 30 to 128 px, median 128",
        "\nduplicates: 3 pairs (",
        "near-duplicates: 4 pairs (",
        "\nleakage: 1 pair (train/flower/08.png and test val/flower/leak.png: same file). The same image",
        "\nsuspected leakage: 1 pair (",
        "train/china/wrong.png and train/flower/10.png: same file, labels differ",
        "\nFix: unreadable, duplicates, leakage. Look at: near-duplicates, suspected leakage.\n",
    ):
        assert said in text, said
    for number in (1, 2):
        (tmp_path / "c/exclude.txt").write_text(f"# my {number}")
        checked(planted, tmp_path / "c", capsys)
        assert (tmp_path / f"c/exclude.old{number}.txt").read_text() == f"# my {number}"
    with Image.open(tmp_path / "c/check.png") as sheet:
        assert sheet.width > 1000
        assert np.asarray(sheet.convert("L")).std() > 20


def test_a_clean_check_exits_0_and_writes_no_sheet(healthy, tmp_path, capsys):
    (tmp_path / "check.png").touch()  # of an earlier check
    code, text, found = checked(healthy, tmp_path, capsys)
    assert code == 0
    assert "\nNothing to fix.\n" in text
    assert "exclude.txt: nothing to leave out" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.json", "exclude.txt"]
    floor = found.pop("floor")
    assert floor["images"] == 8
    assert floor["of"] == "test"
    assert floor["largest_class"] == 50
    assert found == {
        "layout": [], "unreadable": [], "pairs": [], "bands": None, "range": None, "clean": True,
        "one_colour": [], "dark": [], "enough_to_pretrain": True,
        "dataset": "folder", "root": str(healthy), "images": {"train": 32, "test": 8},
        "classes": {"train": {"china": 16, "flower": 16}, "test": {"china": 4, "flower": 4}},
        "sides": {"train": [128, 128, 128], "test": [128, 128, 128]},
    }  # fmt: skip


@pytest.mark.parametrize("form", ["flat", "train alone", "one class"])
def test_what_suffices_for_pretraining_is_no_fault(form, tmp_path, capsys):
    where = {"flat": "", "train alone": "train/a/", "one class": "train/a/"}[form]
    for i in range(2):
        paint(tmp_path / f"{where}{i}.png", i)
    if form == "train alone":
        paint(tmp_path / "train/b/0.png", 2)
    assert main(["data", "check", "folder", "--root", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    use = "idmm train tests on a fifth" if form == "train alone" else "pretraining can use all"
    assert f"layout: {use} of these images, fine-tuning needs more:\n  data.root: " in out
    verdict = "Look at: small classes." if form == "train alone" else "Nothing to fix."
    assert out.endswith(f"\n{verdict}\n")
    assert ("baseline: " in out) == (form == "train alone")
    assert ("--data.val_fraction" in out) == (form == "train alone")


def test_images_of_one_colour_are_listed_and_stay(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 4, "b": 4}, val={"a": 2, "b": 2})
    for name, colour in (("white", (255, 255, 255)), ("red", (200, 10, 10))):
        Image.new("RGB", (40, 40), colour).save(root / f"train/b/{name}.png")
    code, text, found = checked(root, tmp_path / "c", capsys)
    assert code == 0
    assert found["clean"]
    assert "\nLook at: one colour.\n" in text
    names = [f"train/b/{name}.png" for name in ("red", "white")]
    assert f"\none colour: 2 images ({', '.join(names)})" in text
    lines = (tmp_path / "c/exclude.txt").read_text().splitlines()
    assert lines[lines.index("#train/b/red.png") - 1] == "# of one colour"


def test_an_out_that_cannot_be_written(healthy, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["data", "check", str(healthy), "--out", str(tmp_path / "file/x")]) == 2
    assert "out: cannot write" in capsys.readouterr().err


def test_every_command_takes_a_folder_without_its_flag(healthy, tmp_path, capsys):
    """As the flag does, and together with the same flag. Two folders are refused."""
    for name, command in COMMANDS.items():
        if "data.root" in {key.key for key in keys_of(command.config)} and not hasattr(
            command.config, "STAGES"
        ):
            out = ["--out", str(tmp_path / "r")] if name != "probe" else []
            for argv in (["DIR"], ["--data.root", "DIR"], ["DIR", "--data.root", "DIR"]):
                with pytest.raises(SystemExit, match="0"):
                    main([name, *argv, *out, "--print_config"])
                assert "root: DIR" in capsys.readouterr().out
    assert (
        main(["data", "check", str(healthy)])
        == main(["data", "check", str(healthy), "--root", str(healthy)])
        == 0
    )
    assert f"folder in {healthy}: 32 train, 8 test images" in capsys.readouterr().out
    assert main(["data", "check", "nowhere"]) == 2
    assert (
        capsys.readouterr().err
        == "data.root: 'nowhere' does not exist, expected a folder of images\n"
    )
    assert main(["data", "check", str(healthy), "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"data.name: '{healthy}' is a folder, expected the name of a dataset"
    )


def test_a_class_of_few_images_is_named_with_what_becomes_of_it(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 8, "b": 8, "one": 1, "three": 3})
    code, text, _ = checked(root, tmp_path / "c", capsys)
    small = "small classes: 2 of at most 3 images (one: 1, three: 3). If no folder is test, one image of each is"
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
    code, text, found = checked(root, tmp_path / "c", capsys)
    assert code == 0
    assert sorted(found["dark"]) == ["test/a/4.tif", "train/a/6.tif", "train/b/1.tif"]
    assert (
        "values of images of more than 8 bits: [0.0, 65280.0] is 0 to 1. Pass --data.range '[LOW, HIGH]'"
        in text
    )
    assert "\ndark: 3 images (" in text
    assert "Scale these files." in text
    assert "Look at: dark" in text
    assert main(["train", str(root), "--minutes", "0.01", "--out", str(tmp_path / "r")]) in (0, 2)
    wanted = "data.range: [0.0, 65280.0] is 0 to 1, 2 of 15 images stay in its lowest eighth. Set it by --data.range"
    assert wanted in capsys.readouterr().err


def test_without_test_images_a_part_of_train_is_held_out(tmp_path, capsys, monkeypatch):
    root = tree(tmp_path / "d", train={"a": 10, "b": 10})
    (root / "train/a/0.png").write_text("no image")
    _, said, found = checked(root, tmp_path / "c", capsys)
    assert found["floor"]["images"] in (3, 4)
    assert found["floor"]["of"] == "train"
    assert "held-out training images at 64 px" in said
    monkeypatch.setattr(baseline, "MOST", 10)  # of many images a part is used
    assert checked(root, tmp_path / "c", capsys)[2]["floor"]["train_images"] <= 10


def say(capsys, *argv):
    code = main(["data", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_list_names_every_dataset_with_its_figures(capsys):
    code, out, _ = say(capsys, "list")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert set(DATASETS) <= set(lines)
    for spec in DATASETS.values():
        for figure in (spec.num_classes, spec.train_size, spec.test_size):
            assert figure is None or f" {figure:,} " in lines[spec.name]
        assert spec.title in lines[spec.name]


@pytest.mark.parametrize("name", ["flowers", "cars", "folder"])
def test_info_tells_what_is_known(name, capsys):
    spec = DATASETS[name]
    code, out, _ = say(capsys, "info", name)
    text = " ".join(out.split())
    assert code == 0
    assert spec.title in text
    assert spec.citation in text
    assert spec.licence in text
    assert spec.source in text
    for part in (*spec.layout, *spec.archives, " ".join(spec.manual.split())):
        assert part in text
    assert ("mean_per_class" in text) == (name in ("flowers", "pets", "aircraft"))
