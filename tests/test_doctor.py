"""The data doctor finds every fault that was planted in a folder of real photographs, and no other."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest
from folders import paint, section, tree, tuned
from PIL import Image, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_image

from idmm.cli import main
from idmm.data import doctor
from idmm.data.doctor import check
from idmm.stages import results


def photos(root, split, name, numbers):
    """Cuts squares of 128 px out of a photograph, no two of them overlapping by much."""
    photo = Image.fromarray(load_sample_image(f"{name}.jpg"))
    for i in numbers:
        left, top = 100 * (i % 5), 98 * (i // 5)
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
    china, flower, val = root / "train/china", root / "train/flower", root / "val"

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


def found_pairs(checkup, group):
    return {(p.kind, p.first.name, p.second.name) for p in checkup.sorted_pairs()[group]}


def test_every_planted_fault_is_found_and_no_other(planted):
    checkup, _ = check(section(planted), tiny=64, near_limit=1000)
    assert not checkup.clean
    assert [(bad["split"], bad["name"], bad["reason"]) for bad in checkup.unreadable] == [
        ("train", "train/china/broken.jpg", "not an image"),
        ("train", "train/china/empty.png", "empty file"),
    ]
    assert checkup.tiny == [{"split": "train", "name": "train/flower/tiny.png", "height": 50, "width": 30}]
    assert checkup.classes["train"] == {"china": 19, "flower": 23}
    assert found_pairs(checkup, "duplicates") == {
        ("same file", "train/flower/01.png", "train/flower/copy.png"),
        ("same pixels", "train/flower/02.png", "train/flower/resaved.bmp"),
        ("same file", "train/china/wrong.png", "train/flower/10.png"),
    }
    assert found_pairs(checkup, "near_duplicates") == {
        ("near", "train/flower/03.png", "train/flower/jpeg.jpg"),
        ("near", "train/flower/04.png", "train/flower/smaller.png"),
        ("near", "train/flower/06.png", "train/flower/brighter.png"),
        ("near", "train/flower/07.png", "train/flower/trimmed.png"),
    }
    assert found_pairs(checkup, "leakage") == {
        ("same file", "train/flower/08.png", "val/flower/leak.png"),
        ("near", "train/flower/09.png", "val/flower/jpeg leak.jpg"),
    }
    assert found_pairs(checkup, "conflicts") == {("same file", "train/china/wrong.png", "train/flower/10.png")}


def test_the_command_says_it_writes_it_and_draws_it(planted, tmp_path, capsys):
    assert main(["data", "check", "folder", "--root", str(planted), "--out", str(tmp_path / "c")]) == 1
    text = capsys.readouterr().out
    for said in (
        "42 train, 10 test images",
        "unreadable: 2 files",
        "train/china/empty.png: empty file",
        "tiny: 1 image with a side under 64 px",
        "duplicates: 3 images",
        "near-duplicates: 4 pairs within a split",
        "leakage: 1 pair of the same image",
        "suspected leakage: 1 pair",
        "train/flower/08.png and test val/flower/leak.png (same file)",
        "conflicting labels: 1 pair",
        "some of this should be mended",
    ):
        assert said in text, said
    report = json.loads((tmp_path / "c/check.json").read_text())
    assert len(report["duplicates"]) == 3 and len(report["leakage"]) == 2 and report["clean"] is False
    assert report["duplicates"][0]["first"]["name"].startswith("train/")
    with Image.open(tmp_path / "c/check.png") as sheet:
        assert sheet.width > 1000 and np.asarray(sheet.convert("L")).std() > 20


def test_a_clean_check_exits_0_and_writes_no_sheet(healthy, tmp_path, capsys):
    assert main(["data", "check", "folder", "--root", str(healthy), "--out", str(tmp_path / "c")]) == 0
    assert "nothing that should be mended" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["check.json", "exclude.txt"]
    found = json.loads((tmp_path / "c/check.json").read_text())
    empty = {"layout": [], "remarks": [], "size_mismatch": {}, "unreadable": [], "tiny": [], "near_skipped": False}
    empty |= dict.fromkeys(("shared_groups", "duplicates", "near_duplicates", "leakage", "conflicts"), [])
    empty |= {"groups": {}, "channels": "", "range": None}
    floor = found.pop("floor")
    assert floor["images"] == 8 and floor["of"] == "test" and floor["largest_class"] == 50
    assert found == {
        **empty, "dataset": "folder", "root": str(healthy), "clean": True, "tiny_below": 64,
        "images": {"train": 32, "test": 8},
        "classes": {"train": {"china": 16, "flower": 16}, "test": {"china": 4, "flower": 4}},
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["lacks", "extra", "empty", "stray"])
def test_all_splits_are_looked_at_whatever_is_wrong_with_the_folders(fault, tmp_path):
    tree(
        tmp_path, train={"a": 2, "b": 2}, val={"a": 2} if fault == "lacks" else {"a": 2, "b": 1}, test={"a": 1, "b": 1}
    )
    if fault == "extra":
        paint(tmp_path / "val/c/0.png", 5)
    elif fault == "empty":
        (tmp_path / "train/c").mkdir()
    elif fault == "stray":
        paint(tmp_path / "train/stray.png", 6)
    shutil.copy(tmp_path / "train/a/0.png", tmp_path / "val/a/leak.png")
    (tmp_path / "val/a/broken.png").write_text("no image")
    checkup, _ = check(section(tmp_path), tiny=0, near_limit=0)
    assert len(checkup.layout_faults) == (3 if fault == "empty" else 1) and not checkup.remarks and not checkup.clean
    assert all("data.root" in line for line in checkup.layout_faults)
    assert checkup.images == {
        "train": 4 + (fault == "stray"), "val": 5 - (fault == "lacks") + (fault == "extra"), "test": 2,
    }  # fmt: skip
    assert found_pairs(checkup, "leakage") == {("same file", "train/a/0.png", "val/a/leak.png")}
    assert not checkup.sorted_pairs()["conflicts"]
    assert [bad["name"] for bad in checkup.unreadable] == ["val/a/broken.png"]
    wanted = {"a": 2, "b": 2, "c": 0} if fault == "empty" else {"a": 2, "b": 2}
    assert checkup.classes["train"] == wanted and checkup.classes["val"]["a"] == 4


@pytest.mark.parametrize("form", ["flat", "train alone", "one class", "flat train"])
def test_what_suffices_for_pretraining_is_a_remark(form, tmp_path, capsys):
    where = {"flat": "", "train alone": "train/a/", "one class": "train/a/", "flat train": "train/"}[form]
    for i in range(2):
        paint(tmp_path / f"{where}{i}.png", i)
    if form == "train alone":
        paint(tmp_path / "train/b/0.png", 2)
    assert main(["data", "check", "folder", "--root", str(tmp_path), "--tiny", "0"]) == 0
    out = capsys.readouterr().out
    assert "layout: fine as it is for pretraining; fine-tuning needs more:\n  data.root: " in out
    assert out.endswith("nothing that should be mended\n")
    assert ("--data.val_fraction" in out) == (form == "train alone")
    tree(tmp_path, val={"x": 1, "y": 1})  # something to evaluate on is meant for fine-tuning
    assert main(["data", "check", "folder", "--root", str(tmp_path), "--tiny", "0"]) == (form != "flat")


def test_near_pairs_are_suspected_and_not_certain(healthy, tmp_path, capsys):
    root, out = tmp_path / "d", tmp_path / "c"
    shutil.copytree(healthy, root)
    sheet = "look at the sheet that --out DIR draws"
    for i in range(6):
        Image.open(root / f"train/flower/{i:02d}.png").save(root / f"train/china/{i}.jpg", quality=70)
    Image.open(root / "train/flower/09.png").save(root / "val/flower/leak.jpg", quality=70)
    assert main(["data", "check", "folder", "--root", str(root)]) == 0
    text = capsys.readouterr().out
    assert f"\nsuspected leakage: 1 pair of nearly the same image in two splits; {sheet}:\n" in text
    assert f"\nsuspected conflicting labels: 6 pairs of nearly the same image in two classes; {sheet}:\n" in text
    assert "is wrong" not in text and "  and 1 more (--out DIR lists all)\n" in text
    assert text.endswith("\nnothing certain was found, but 7 suspected pairs should be looked at\n")
    assert main(["data", "check", "folder", "--root", str(root), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "--out" not in text and "  and 1 more (check.json lists all)\n" in text and (out / "check.png").exists()
    assert main(["data", "check", "folder", "--root", str(healthy), "--out", str(out)]) == 0
    assert not (out / "check.png").exists() and "check.png" not in capsys.readouterr().out


def test_a_missing_folder_is_one_line_and_exit_2(tmp_path, capsys):
    assert main(["data", "check", "folder", "--root", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "file").touch()
    assert main(["data", "check", "digits", "--out", str(tmp_path / "file/x")]) == 2
    assert "out: cannot write" in capsys.readouterr().err


def test_class_balance_is_remarked_on(tmp_path, capsys):
    root = tree(tmp_path, train={"few": 1, "many": 12}, val={"few": 1, "many": 1})
    main(["data", "check", "folder", "--root", str(root), "--tiny", "0"])
    assert "1 ('few') to 12 ('many') images" in capsys.readouterr().out


def test_too_many_images_for_the_slow_search(healthy, monkeypatch):
    monkeypatch.setattr(doctor, "_near_pairs", None)  # it must not be called
    checkup, _ = check(section(healthy), tiny=64, near_limit=39)
    assert checkup.near_skipped and checkup.clean


def test_of_many_alike_a_few_are_named(tmp_path):
    """Twenty near-duplicates of an image in each split: all pairs of thousands would fill memory."""
    spot = np.zeros((32, 32, 3), dtype=np.uint8)
    spot[8:20, 8:24] = (200, 90, 30)
    for split, count in {"train": 26, "test": 23}.items():
        for number in range(count):
            path = tmp_path / split / "ab"[number % 2] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(spot + np.uint8(number + 26 * (split == "test"))).save(path)
    checkup, _ = check(section(tmp_path), tiny=0, near_limit=1000)
    named = Counter((pair.first.split, pair.first.index, pair.second.split) for pair in checkup.pairs)
    assert [named["train", 0, split] for split in ("train", "test")] == [20, 20] and max(named.values()) == 20
    assert (named["train", 10, "train"], named["test", 20, "test"]) == (15, 2), "a pair is named from its earlier image"


def test_one_colour_images_of_different_colours_are_told_apart(tmp_path):
    for name, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200)), ("red2", (202, 20, 20))):
        path = tmp_path / f"{name}.png"
        Image.new("RGB", (80, 80), colour).save(path)
    checkup, _ = check(section(tmp_path), tiny=0, near_limit=100)
    assert {(p.first.name, p.second.name) for p in checkup.pairs} == {("red.png", "red2.png")}
    paint(tmp_path / "noise.png", size=(80, 80))
    assert len(check(section(tmp_path), tiny=0, near_limit=100)[0].pairs) == 1


# ---------------------------------------------------------------------- the floor
def checked(root, out, capsys, *argv):
    """Runs the check; returns what it printed and what check.json holds."""
    assert main(["data", "check", "--root", str(root), "--out", str(out), *argv]) in (0, 1)
    return capsys.readouterr().out, json.loads((out / "check.json").read_text())


def test_the_floor_is_the_pixel_knn_of_a_run(tmp_path, capsys):
    """To the last digit, at the run's size, on images that are larger or smaller than what it keeps of them."""
    train = {"a": 12, "b": 12, "c": 12}
    for side in (24, 160):
        root = tree(tmp_path / f"d{side}", train=train, val={"a": 2, "b": 2, "c": 2}, test={"a": 6, "b": 6, "c": 7})
        for seed, path in enumerate(sorted(root.rglob("*.png"))):
            paint(path, seed, (side, side + 9))
        own = {"stages": [{"size": 32}], "augment__scale": [0.35, 1.0], "train__epochs": 30, "train__eval_every": 30}
        assert tuned(tmp_path / f"run{side}", root, **own) == 0
        wanted = json.loads((tmp_path / f"run{side}/result.json").read_text())["pixel_knn"]
        said, found = checked(root, tmp_path / "c", capsys, "--size", "32")
        floor = found["floor"]
        assert floor["pixel_knn"] == wanted and (floor["images"], floor["of"], floor["size"]) == (19, "test", 32)
        line = f"the floor to beat: kNN of raw pixels {wanted:.1f} % (largest class 36.8 %), on 19 test images at 32 px"
        assert line in said.splitlines()


def test_without_test_images_a_part_of_train_is_held_out(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 10, "b": 10})
    (root / "train/a/0.png").write_text("no image")
    said, found = checked(root, tmp_path / "c", capsys)
    assert found["floor"]["images"] in (3, 4) and found["floor"]["of"] == "train"
    assert "held-out training images at 224 px" in said


@pytest.mark.parametrize("classes", [{"a": 6}, {}])
def test_without_labels_to_compare_there_is_no_floor(classes, tmp_path, capsys):
    root = tree(tmp_path / "d", train=classes)
    if not classes:
        paint(root / "0.png", 1)
        (root / "train").rmdir() if (root / "train").exists() else None
    said, found = checked(root, tmp_path / "c", capsys)
    assert found["floor"] is None and "floor" not in said


def test_many_images_are_thinned_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(results, "PAIRS", 30)  # 4 * 30 pairs with 20 training images
    root = tree(tmp_path / "d", train={"a": 10, "b": 10}, test={"a": 4, "b": 4})
    assert checked(root, tmp_path / "c", capsys)[1]["floor"]["images"] == 6
