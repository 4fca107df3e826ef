"""k-fold results: by the real command line, taken up again, by groups, in probes and grids."""

import shutil
import statistics

import pytest
from folders import TINY, faults, section, tree, tuned
from frozen import a_run
from helpers import call, inside, read, refused, same

from idmm.data.listing import list_images
from idmm.report.stats import group_interval, wilson_interval

pytestmark = pytest.mark.usefixtures("own_cache")
COUNTS = {"cat": 7, "dog": 8}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders alone, as people have them."""
    return tree(
        tmp_path_factory.mktemp("images") / "d",
        **{name: {"": count} for name, count in COUNTS.items()},
    )


@pytest.fixture(scope="module")
def pretrained(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "a"
    assert inside("pretrain", out, **TINY, data__root=str(images)) == 0
    return out


@pytest.fixture(scope="module")
def done(images, pretrained, tmp_path_factory):
    """Three folds from a pretrained backbone; nothing may be written to them."""
    out = tmp_path_factory.mktemp("folds") / "b"
    assert tuned(out, images, data__folds=3, init=str(pretrained)) == 0
    return out


def held(out):
    return [read(run / "last/images.json")["test"]["images"] for run in sorted(out.glob("fold-*"))]


def test_each_image_is_tested_once(done, images):
    folds = [read(done / f"fold-{k}/result.json") for k in (1, 2, 3)]
    result = read(done / "result.json")
    names = [name for fold in held(done) for name in fold]
    assert sorted(names) == list_images(section(images), labelled=False).train.names
    assert len(set(names)) == 15
    shares = [[sum(name.startswith(of) for name in fold) for of in COUNTS] for fold in held(done)]
    assert all(cats in (2, 3) and dogs in (2, 3) for cats, dogs in shares), (
        "equal shares of each class"
    )
    hits = sum(round(fold["top1"] * fold["test_size"] / 100) for fold in folds)
    assert result["top1"] == pytest.approx(100 * hits / 15)
    assert result["top1_interval"] == pytest.approx(wilson_interval(hits, 15))
    assert result["mean"]["top1"] == pytest.approx(statistics.mean(fold["top1"] for fold in folds))
    assert result["std"]["top1"] == pytest.approx(statistics.stdev(fold["top1"] for fold in folds))
    assert [{"fold": k, **fold} for k, fold in enumerate(folds, start=1)] == result["folds"]
    assert result["largest_class"] == pytest.approx(800 / 15)
    assert result["params"] == folds[0]["params"]
    assert (result["test_size"], result["train_size"], result["num_classes"], result["seed"]) == (
        15,
        10,
        2,
        0,
    )
    assert (done / "fold-2/model.safetensors").exists()


def test_all_folds_are_no_backbone(done, tmp_path, capsys):
    line = f"init: '{done}' holds k-fold runs. Give one of them ('{done / 'fold-1'}'), or a run on all images"
    assert refused(capsys, ["finetune", "--init", done, "--out", tmp_path / "o"]) == [line]


def test_taken_up_again(done, images, pretrained, tmp_path, capsys):
    out = shutil.copytree(done, tmp_path / "b")
    # as a kill in the second fold left it
    for name in ("result.json", "fold-3", "fold-2/result.json"):
        shutil.rmtree(out / name) if name == "fold-3" else (out / name).unlink()
    first = (out / "fold-1/result.json").stat().st_mtime_ns
    assert tuned(out, images, data__folds=3, init=str(pretrained), resume="must") == 0
    said = capsys.readouterr().err
    assert f"{out}/fold-1: finished already" in said
    assert f"{out}/fold-2: finished already" not in said
    assert (out / "fold-1/result.json").stat().st_mtime_ns == first
    assert same(out / "fold-3", done / "fold-3")
    assert read(out / "result.json")["top1_interval"] == read(done / "result.json")["top1_interval"]
    capsys.readouterr()
    assert tuned(out, images, data__folds=4, init=str(pretrained)) == 2
    assert "data.folds: the run in " in capsys.readouterr().err
    assert tuned(out, images, data__folds=3, init=str(pretrained), resume="never") == 2
    assert "--resume never expects a new folder" in capsys.readouterr().err


def test_what_cannot_be_dealt_out_is_one_line_and_leaves_no_folder(images, done, tmp_path, capsys):
    argv = [
        "finetune",
        "--data.name",
        "folder",
        "--data.root",
        images,
        "--data.folds",
        8,
        "--out",
        tmp_path / "r",
    ]
    line = refused(capsys, argv)[-1]
    assert line.startswith("data.folds: 8 folds need 8 training images of each class: 'cat' has 7")
    assert not (tmp_path / "r").exists()
    plain = shutil.copytree(done / "fold-1", tmp_path / "plain")
    assert refused(capsys, [*argv[:-3], 3, "--out", plain])[-1].startswith(
        f"out: '{plain}' holds a run without folds"
    )
    wrong = [*argv[:-3], 3, "--data.fold", 4, *argv[-2:]]
    assert refused(capsys, wrong)[-1].startswith("data.fold: got ")


def test_folds_beside_splits_of_the_dataset(tmp_path, caplog):
    caplog.set_level("INFO")
    root = tree(tmp_path / "d", train={"a": 6, "b": 6}, val={"a": 1, "b": 1}, test={"a": 2, "b": 2})
    splits = list_images(section(root, folds=3, fold=2), labelled=True)
    assert {name.split("/")[0] for name in splits.train.names + splits.test.names} == {"train"}
    assert splits.val.names == ["val/a/0.png", "val/b/0.png"]
    assert len(splits.test) == 4
    assert (
        "fold 2 of 3 is tested on 4 of 12 training images. The 4 test images of the dataset are not used"
        in caplog.text
    )


def test_a_group_is_in_one_fold(tmp_path):
    root = tree(
        tmp_path / "d", **{f"{of}/p{p}{of}": {"": 2 + p % 2} for of in "ab" for p in range(4)}
    )
    data = {"folds": 4, "groups": "([^/]+)/[^/]+$"}
    fold = list_images(section(root, fold=2, **data), labelled=True)
    held, left = ({name.split("/")[1] for name in part.names} for part in (fold.test, fold.train))
    assert len(held) == 2
    assert not held & left
    assert len(set(fold.test.labels)) == 2
    line = "data.folds: 5 folds need 5 training groups of each class: 'a' has 4, 'b' has 4"
    assert faults(list_images, section(root, **{**data, "folds": 5}), True) == [line]


def test_a_probe(images, tmp_path, capsys):
    run = a_run(tmp_path / "run")
    argv = [
        "--init",
        run,
        "--data.name",
        "folder",
        "--data.root",
        images,
        "--data.workers",
        0,
        "--data.folds",
        3,
    ]
    assert call(["probe", *argv, "--data.groups", r"(\w+/\d)", "--out", tmp_path / "p"]) == 0
    found = read(tmp_path / "p/result.json")
    out = capsys.readouterr().out
    groups = [fold["per_group"] for fold in found["folds"]]
    correct, counts = (
        [count for fold in groups for count in fold[name]] for name in ("correct", "images")
    )
    assert found["top1_interval"] == pytest.approx(group_interval(correct, counts))
    assert (len(counts), sum(counts)) == (found["test_groups"], 15)
    assert "15 images, each tested once in 3 folds, 2 classes" in out
    assert f"linear probe {found['top1']:.1f}, " in out
    assert len(found["folds"]) == 3
    assert found["test_size"] == 15
    hits = sum(round(fold["knn"] * fold["test_size"] / 100) for fold in found["folds"])
    assert found["knn"] == pytest.approx(100 * hits / 15)
    flags = ["--per_class", 1, "--seeds", 1, "--out", tmp_path / "f"]
    assert refused(capsys, ["fewlabel", *argv, *flags])[-1].startswith("data.folds: this command")
    argv[argv.index(images)] = tree(tmp_path / "d", a={"": 3}, b={"": 4}, c={"": 5})
    # which has an image of the last class in one fold of three
    few = ["--data.subset", "{total: 2, seed: 3}"]
    assert call(["probe", *argv, *few, "--out", tmp_path / "q"]) == 0
    counts = [fold["per_class"] for fold in read(tmp_path / "q/result.json")["folds"]]
    assert {len(of) for fold in counts for of in fold.values()} == {3}
