"""k-fold results: by the real command line, taken up again, by groups, in probes and grids."""

import shutil
import statistics

import pytest
from folders import TINY, faults, section, tree, tuned, tuned_ok
from frozen import a_run
from helpers import call_ok, inside_ok, read, refused, same

from idmm.data.listing import list_images
from idmm.report.stats import group_interval, wilson_interval

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Class folders alone, as people have them."""
    return tree(
        tmp_path_factory.mktemp("images") / "d",
        cat={"": 7},
        dog={"": 8},
    )


@pytest.fixture(scope="module")
def pretrained(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("pretrained") / "a"
    inside_ok("pretrain", out, **TINY, data__root=images)
    return out


@pytest.fixture(scope="module")
def done(images, pretrained, tmp_path_factory):
    """Three folds from a pretrained backbone; nothing may be written to them."""
    out = tmp_path_factory.mktemp("folds") / "b"
    tuned_ok(out, images, data__folds=3, init=pretrained)
    return out


def held(out):
    return [read(run / "last/images.json")["test"]["images"] for run in sorted(out.glob("fold-*"))]


def test_each_image_is_tested_once(done, images):
    folds = [read(done / f"fold-{k}/result.json") for k in (1, 2, 3)]
    result = read(done / "result.json")
    names = [name for fold in held(done) for name in fold]
    assert sorted(names) == list_images(section(images), labelled=False).train.names
    assert len(set(names)) == 15
    for fold in held(done):  # equal shares of each class
        assert sum(name.startswith("cat") for name in fold) in (2, 3)
        assert sum(name.startswith("dog") for name in fold) in (2, 3)
    hits = sum(round(fold["top1"] * fold["test_size"] / 100) for fold in folds)
    assert result["top1"] == pytest.approx(100 * hits / 15)
    assert result["top1_interval"] == pytest.approx(wilson_interval(hits, 15))
    scores = [fold["top1"] for fold in folds]
    assert result["mean"]["top1"] == pytest.approx(statistics.mean(scores))
    assert result["std"]["top1"] == pytest.approx(statistics.stdev(scores))
    assert [{"fold": k, **fold} for k, fold in enumerate(folds, start=1)] == result["folds"]
    assert result["largest_class"] == pytest.approx(800 / 15)
    sizes = {"test_size": 15, "train_size": 10, "num_classes": 2, "seed": 0}
    assert sizes.items() <= result.items()
    assert (done / "fold-2/model.safetensors").exists()


def test_all_folds_are_no_backbone(done, tmp_path, capsys):
    line = (
        f"init: '{done}' holds k-fold runs. Give one of them ('{done / 'fold-1'}'), or a "
        "run on all images"
    )
    assert refused(capsys, f"finetune --init {done} --out {tmp_path}/o") == [line]


def test_taken_up_again(done, images, pretrained, tmp_path, capsys):
    out = shutil.copytree(done, tmp_path / "b")
    # as a kill in the second fold left it
    shutil.rmtree(out / "fold-3")
    for name in ("result.json", "fold-2/result.json"):
        (out / name).unlink()
    first = (out / "fold-1/result.json").stat().st_mtime_ns
    tuned_ok(out, images, data__folds=3, init=pretrained, resume="must")
    log = capsys.readouterr().err
    assert f"{out}/fold-1: finished already" in log
    assert f"{out}/fold-2: finished already" not in log
    assert (out / "fold-1/result.json").stat().st_mtime_ns == first
    assert same(out / "fold-3", done / "fold-3")
    assert read(out / "result.json")["top1_interval"] == read(done / "result.json")["top1_interval"]
    capsys.readouterr()
    assert tuned(out, images, data__folds=4, init=pretrained) == 2
    assert "data.folds: the run in " in capsys.readouterr().err
    assert tuned(out, images, data__folds=3, init=pretrained, resume="never") == 2
    assert "--resume never expects a new folder" in capsys.readouterr().err


def test_folds_that_cannot_be_dealt_out_are_refused(images, done, tmp_path, capsys):
    new = tmp_path / "r"
    plain = shutil.copytree(done / "fold-1", tmp_path / "plain")
    need = "8 folds need 8 training images of each class: 'cat' has 7"
    for out, flags, fault in (
        (new, [8], f"data.folds: {need}"),
        (plain, [3], f"out: '{plain}' holds a run without folds"),
        (new, [3, "--data.fold", 4], "data.fold: got "),
    ):
        argv = [
            "finetune",
            "--data.root",
            images,
            "--out",
            out,
            "--data.folds",
            *flags,
        ]
        assert refused(capsys, argv)[-1].startswith(fault)
    assert not new.exists()


def test_folds_beside_splits_of_the_dataset(tmp_path, caplog):
    caplog.set_level("INFO")
    root = tree(
        tmp_path / "d",
        train={"a": 6, "b": 6},
        val={"a": 1, "b": 1},
        test={"a": 2, "b": 2},
    )
    splits = list_images(section(root, folds=3, fold=2), labelled=True)
    assert {name.split("/")[0] for name in splits.train.names + splits.test.names} == {"train"}
    assert splits.val.names == ["val/a/0.png", "val/b/0.png"]
    assert len(splits.test) == 4
    counts = "4 of 12 training images. The 4 test images of the dataset are not used"
    assert f"fold 2 of 3 is tested on {counts}" in caplog.text


def test_a_group_is_in_one_fold(tmp_path):
    people = {f"p{number}": 2 + number % 2 for number in range(4)}
    root = tree(tmp_path / "d", **{f"{name}/{name}": people for name in "ab"})

    def data(**fields):
        return section(root, groups=r"(\w/\w/p\d)", **fields)

    fold = list_images(data(folds=4, fold=2), labelled=True)
    tested = set(fold.test.groups)
    assert len(tested) == 2
    assert not tested & set(fold.train.groups)
    assert len(set(fold.test.labels)) == 2
    line = "data.folds: 5 folds need 5 training groups of each class: 'a' has 4, 'b' has 4"
    assert faults(list_images, data(folds=5), True) == [line]


def test_a_probe(images, tmp_path, capsys):
    run = a_run(tmp_path / "run")
    argv = [
        "--init",
        run,
        "--data.root",
        images,
        "--data.workers",
        0,
        "--data.folds",
        3,
    ]
    call_ok(
        [
            "probe",
            *argv,
            "--data.groups",
            r"(\w+/\d)",
            "--out",
            tmp_path / "p",
        ]
    )
    result = read(tmp_path / "p/result.json")
    out = capsys.readouterr().out
    groups = [fold["per_group"] for fold in result["folds"]]
    correct, counts = (
        [count for fold in groups for count in fold[name]] for name in ("correct", "images")
    )
    assert result["top1_interval"] == pytest.approx(group_interval(correct, counts))
    assert (len(counts), sum(counts)) == (result["test_groups"], 15)
    assert "15 images, each tested once in 3 folds, 2 classes" in out
    assert f"linear probe {result['top1']:.1f}, " in out
    assert len(result["folds"]) == 3
    hits = sum(round(fold["knn"] * fold["test_size"] / 100) for fold in result["folds"])
    assert result["knn"] == pytest.approx(100 * hits / 15)
    flags = ["--per_class", 1, "--seeds", 1, "--out", tmp_path / "f"]
    assert refused(capsys, ["fewlabel", *argv, *flags])[-1].startswith("data.folds: this command")
    argv[argv.index(images)] = tree(tmp_path / "d", a={"": 3}, b={"": 4}, c={"": 5})
    # which has an image of the last class in one fold of three
    few = ["--data.subset", "{total: 2, seed: 3}"]
    call_ok(["probe", *argv, *few, "--out", tmp_path / "q"])
    counts = [fold["per_class"] for fold in read(tmp_path / "q/result.json")["folds"]]
    assert {len(of) for fold in counts for of in fold.values()} == {3}
