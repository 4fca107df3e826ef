"""From a folder to a classifier in a given time, by the real command line."""

import os
import re
import shutil
import time

import numpy as np
import pytest
import tifffile
import torch
import yaml
from clocks import FakeClock
from folders import tree
from frozen import a_run
from helpers import VIT, Forked, Together, as_flags, call, call_ok, column, read, refused
from PIL import Image
from pytest import approx
from test_resume import stop_at

import idmm
from idmm.auto import configs as train_configs
from idmm.auto import features as train_features
from idmm.auto import plan as train_plan
from idmm.auto import trial
from idmm.auto.plan import Counts, make_plan
from idmm.config import parsing
from idmm.config.commands import TrainCommand
from idmm.errors import Interrupted, UserError
from idmm.files import read_csv
from idmm.methods.base import Method
from idmm.models import hog_conv

pytestmark = pytest.mark.usefixtures("own_cache", "fake_clock")
MINUTES = 2
NETWORK = "linear classifier and network"
LINEAR = "linear classifier"
FLAGS = {
    "minutes": MINUTES,
    "size": 16,
    "data.workers": 0,
    "device": "cpu",
}
MODEL = {
    "model.name": "vit_tiny_patch16_224",
    "model.kwargs": yaml.safe_dump(VIT, default_flow_style=True).strip(),
}


@pytest.fixture(autouse=True, scope="module")
def fast():
    """Mixtures are fitted to few patches, and a trial has one fold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hog_conv, "PATCHES", 2000)
        patch.setattr(trial, "ENOUGH", 1)
        patch.setattr(trial, "FEW", 1)  # labels per class that a trial needs
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images with labels and without."""
    root = tmp_path_factory.mktemp("images") / "d"
    tree(root, train={"cat": 4, "dog": 4}, test={"cat": 5, "dog": 6})
    return tree(root, unlabelled={"": 8})


def command_line(root, out, **flags):
    """``idmm train`` with a tiny network; None leaves a flag out."""
    argv = ["train", root, "--out", out]
    for name, value in {
        **FLAGS,
        **MODEL,
        **flags,
    }.items():
        if value is not None:
            argv += [f"--{name}", value]
    return argv


def begin(argv):
    """Runs a command up to its first step; returns what it saved of its plan."""

    def interrupt(*_):
        raise Interrupted("stopped by the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Method, "before_step", interrupt)
        assert call(argv) == 130
    return read(argv[argv.index("--out") + 1] / "train.json")


def names_of(run, split):
    """The names of the images of a run."""
    return [*read(run / "last/images.json")[split]["images"]]


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    """Pretraining, fine-tuning and the comparison; nothing may be written to it."""
    out = tmp_path_factory.mktemp("done") / "x"
    with FakeClock().ticking():
        call_ok(command_line(images, out, way="pretrain", compare="true"))
    return out


def test_what_is_written(done, images, capsys):
    saved = read(done / "train.json")
    result = read(done / "result.json")
    assert saved["result"] == result
    assert (done / "model.safetensors").exists()
    assert saved["counts"] == {
        "images": 16,
        "labelled": 8,
        "classes": 2,
        "side": 9,
        "untrained": [],
        "crop_mode": "crop",
    }
    assert saved["plan"]["way"] == "pretrain"
    assert saved["plan"]["size"] == 16
    stage1, scratch, tuned = (
        read(done / name / "config.yaml") for name in ("stage1", "scratch", "")
    )
    with np.load(done / "features/rows.npz") as features:
        assert len(features["rows"]) == 16, "all training images"
    kept = "network" if saved["best"] == NETWORK else "features"
    assert tuned["init"] == str(done / kept)
    joined = idmm.load_backbone(done / "network")
    pretrained = idmm.load_backbone(done / "stage1").state_dict()
    learned = joined.learned.network.state_dict()
    assert all(torch.equal(learned[key], pretrained[key]) for key in pretrained)
    frozen = joined.frozen.network.state_dict()
    counts = {key for key in pretrained if key.endswith("num_batches_tracked")}
    assert frozen.keys() == pretrained.keys() - counts, "frozen norms count nothing"
    assert all(torch.equal(frozen[key], pretrained[key]) for key in frozen)
    assert scratch["init"] is None
    assert stage1["views"]["crops"] == [{"count": 2, "scale": [0.35, 1.0]}]
    assert stage1["views"]["jitter"] == [0.4, 0.4, 0, 0]
    assert stage1["model"]["start"] == scratch["model"]["start"] == "auto"
    assert scratch["train"]["minutes"] == MINUTES, "as long again"
    assert stage1["train"]["minutes"] == approx(0.4 * MINUTES)
    assert tuned["train"]["classifier_init"] == "features"
    assert result["start_top1"] > 0
    first = read(done / "stage1/result.json")
    assert first["train_size"] == 16
    assert result["train_size"] == 8
    tried = read(done / "trial/1/result.json")["seconds"]
    assert first["seconds"] + tried + result["seconds"] <= 60 * MINUTES + 12

    call_ok(command_line(images, done, way="pretrain", compare="true"))
    printed = capsys.readouterr().out
    low, high = result["top1_interval"]
    gain = result["top1"] - read(done / "scratch/result.json")["top1"]
    assert saved["gain"]["points"] == approx(gain)
    for text in (
        f"top-1 {result['top1']:.1f} % ({low:.1f} to {high:.1f}) on 11 test images",
        f"the largest class every time: {result['largest_class']:.1f} %",
        f"{gain:+.1f} points",
        "(p = ",
        f"from scratch at 16 px, in {saved['scratch']['seconds']:.0f} s",
        "finished already",
    ):
        assert text in printed


def test_from_python(done, images):
    config = {
        "data": {"root": str(images), "workers": 0},
        "model": {"name": MODEL["model.name"], "kwargs": VIT},
        "minutes": MINUTES,
        "size": 16,
        "device": "cpu",
        "out": str(done),
        "way": "pretrain",
        "compare": True,
    }
    assert idmm.train(config) == read(done / "train.json")
    with pytest.raises(UserError, match="minutes: "):
        idmm.train({**config, "minutes": 0})


def test_processes_go_by_the_first_ones_plan(tmp_path):
    code = "import os; from idmm.auto.train import _of_first_process as first"
    code += "; print(first({'plan': os.environ['RANK']}, 'cpu'))"
    (tmp_path / "agree.py").write_text(code)
    with Together([tmp_path / "agree.py"], tmp_path / "said") as both:
        assert both.wait() == 0, both.said()
        assert both.said().count("{'plan': '0'}") == 2, both.said()


def test_processes_share_the_features_and_the_trial(images, tmp_path):
    out = tmp_path / "x"
    argv = command_line(images, out, minutes=0.6)
    code = f"""
import sys
from idmm.auto import trial
from idmm.cli import main
from idmm.models import hog_conv
hog_conv.PATCHES = 2000
trial.ENOUGH = 1
trial.FEW = 1
sys.exit(main({list(map(str, argv))}))
"""
    (tmp_path / "train.py").write_text(code)
    with Together([tmp_path / "train.py"], tmp_path / "said") as both:
        assert both.wait() == 0, both.said()
    with np.load(out / "features/rows.npz") as features:
        assert len(features["rows"]) == 16
    saved = read(out / "train.json")
    assert saved["candidates"].keys() == {LINEAR, NETWORK}
    assert saved["result"] == read(out / "result.json")


def test_another_command_is_refused(done, images, capsys):
    before = (done / "train.json").read_bytes()
    *lines, last = refused(
        capsys,
        command_line(
            images,
            done,
            way="pretrain",
            minutes=3,
            seed=1,
        ),
    )
    assert f"minutes: the run in '{done}' has {MINUTES}.0, this command has 3.0" in lines
    assert f"seed: the run in '{done}' has 0, this command has 1" in lines
    assert last.startswith(f"out: '{done}' belongs to another config. Use a new --out")
    assert (done / "train.json").read_bytes() == before


def test_taken_up_again(images, tmp_path, fake_clock):
    """Each step has the minutes that it began with; what the others leave is the last one's."""
    out = tmp_path / "x"
    argv = command_line(images, out, way="pretrain")
    fake_clock.start = 6.0
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert call(argv) == 130
    first = read(out / "train.json")["minutes"]
    assert first.keys() == {"before", "stage1"}
    assert first["before"] == approx(0.1, abs=0.01)
    fake_clock.start = 6.0
    call_ok([*argv, "--data.workers", 1])
    minutes = read(out / "train.json")["minutes"]
    assert minutes["before"] == approx(0.2, abs=0.01), "the second start takes time, too"
    assert minutes["stage1"] == first["stage1"] == approx(0.4 * 1.9, abs=0.02)
    steps = [path.relative_to(out).parent for path in out.rglob("result.json")]
    seconds = sum(read(out / step / "result.json")["seconds"] for step in steps if step.name)
    least = 0.1 * MINUTES
    left = MINUTES - minutes["before"] - minutes["features"] - seconds / 60
    assert minutes["last"] == approx(max(least, left), abs=0.02)
    for part in ("stage1", "trial/1"):
        train = read(out / part / "config.yaml")["train"]
        assert train["minutes"] == minutes[part]
        assert train["save_minutes"] == approx(minutes[part] / 10), "what a kill can cost"


@pytest.mark.parametrize("nested", [False, True])
def test_stage_1_sees_no_test_image(nested, tmp_path):
    """Nor if training without labels has no classes to hold images out by."""
    flags = {}
    if nested:
        root = tree(tmp_path / "d", **{f"{name}/a": {"": 10} for name in ("cat", "dog")})
    else:
        root = tree(tmp_path / "d", **{"": {"": 30}})
        rows = ["path,class"]
        for number in range(20):
            rows.append(f"{number}.png,{('dog', 'cat')[number % 2]}")
        (tmp_path / "l.csv").write_text("\n".join(rows))
        flags["data.labels"] = tmp_path / "l.csv"
    out = tmp_path / "x"
    call_ok(
        command_line(
            root,
            out,
            way="pretrain",
            compare="true",
            **flags,
        )
    )
    tested = names_of(out, "test")
    trained = names_of(out, "train")
    assert len(tested) == 4
    assert len(trained) == 16
    assert names_of(out / "scratch", "test") == tested
    assert sorted(names_of(out / "scratch", "train")) == sorted(trained)
    first = {*names_of(out / "stage1", "train")}
    assert len(first) == read(out / "train.json")["counts"]["images"] == (16 if nested else 26)
    assert not first & {*tested}
    assert {*trained} <= first


def test_some_labels_and_no_test_images(tmp_path, capsys):
    root = tree(tmp_path / "d", **{name: {"": 10} for name in ("cat", "dog")})
    out = tmp_path / "x"
    call_ok(command_line(root, out, **{"data.labelled": "{per_class: 2}"}))
    saved = read(out / "train.json")
    assert saved["counts"]["images"] == 16
    assert saved["result"]["train_size"] == saved["counts"]["labelled"] == 4
    assert saved["result"]["test_size"] == 4, "a fifth is held out"
    assert "gain" not in saved
    assert not (out / "stage1").exists()
    assert read(out / "config.yaml")["stages"][0]["batch_size"] == 8, "for so few images"
    errors = capsys.readouterr().err
    step = rf"the classifier \({saved['best']}\): .*\. Details: {out}/log.txt"
    head = rf" 4 of them labelled .*\n{MINUTES} min at most, until about \d\d:\d\d\n"
    assert re.search(head + ".*" + step, errors, re.DOTALL)
    assert "images without a label get no guessed one: similar images agree on" in errors
    assert " training on cpu" not in errors
    assert " training on cpu" in (out / "trial/1/log.txt").read_text()


def test_what_is_wrong(images, tmp_path, capsys, fake_clock):
    root = "data.root: missing, expected --data.root or --data.name"
    out = "out: missing, expected folder for the classifier and all other files"
    assert refused(capsys, ["train"]) == [root, out]
    assert refused(capsys, ["train", "--out", tmp_path / "x"]) == [root]
    plain = tree(tmp_path / "plain", **{"": {"": 4}})
    draws = {"data.subset": "{per_class: 3}", "data.labelled": "{per_class: 2}"}
    for folder, flags, line in (
        (plain, {}, "data.root: "),
        (images, {"data.folds": 2}, "--data.folds: unknown flag of this command"),
        (images, draws, "data.labelled: "),
    ):
        assert refused(capsys, command_line(folder, tmp_path / "x", **flags))[-1].startswith(line)
        assert not (tmp_path / "x").exists()
    fake_clock.start = 6.0
    *_, line = refused(
        capsys,
        command_line(
            images,
            tmp_path / "x",
            minutes=0.05,
        ),
    )
    assert line.startswith("minutes: got 0.05, but 6 s were gone before the first stage")
    assert not (tmp_path / "x").exists()
    (tmp_path / "y").mkdir()
    for text in ("{", "[]"):
        (tmp_path / "y/train.json").write_text(text)
        (line,) = refused(capsys, command_line(images, tmp_path / "y"))
        assert line.startswith(f"{tmp_path / 'y/train.json'}: is damaged (")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").touch()
    line = f"out: '{tmp_path}/other' has other files. Name a new folder"
    assert refused(capsys, ["train", images, "--out", tmp_path / "other"]) == [line]


def test_from_weights(done, images, tmp_path):
    """Of a run: their features, and a network that starts from them, also adapted before. The
    comparison has the same model without them."""
    weights = done / "stage1"
    flags = {"init": weights, "model.name": None, "model.kwargs": None}
    out = tmp_path / "x"
    call_ok(command_line(images, out, compare="true", **flags))
    saved = read(out / "train.json")
    assert saved["plan"]["frozen_sizes"] == [16]
    tried = read(out / "trial/1/config.yaml")
    scratch = read(out / "scratch/config.yaml")
    assert tried["init"] == str(out / "network")
    assert tried["train"]["layer_decay"] == 0.7, "by the recipe 'fast'"
    assert scratch["init"] is None
    assert scratch["model"]["kwargs"] == VIT
    assert scratch["train"]["minutes"] == MINUTES
    start = idmm.load_backbone(weights).state_dict()
    network = idmm.load_backbone(out / "network")
    for part in (network.frozen.network, network.learned.network):
        state = part.state_dict()
        assert all(torch.equal(state[key], start[key]) for key in start)

    out = tmp_path / "y"
    flags |= {"way": "pretrain", "model.drop_path": 0.05}
    call_ok(command_line(images, out, **flags))
    adapted = read(out / "stage1/config.yaml")
    assert adapted["init"] == str(weights)
    assert adapted["train"]["lr"] == 5e-4, "by the recipe 'adapt'"
    assert adapted["model"]["drop_path"] == 0.05
    assert adapted["views"]["jitter"] == [0.4, 0.4, 0, 0]
    start = idmm.load_backbone(out / "stage1").state_dict()
    state = idmm.load_backbone(out / "features").frozen.network.state_dict()
    assert all(torch.equal(state[key], start[key]) for key in start)


def test_weights_that_are_refused(done, images, tmp_path, capsys):
    weights = done / "stage1"
    for flags, line in (
        (["--init", tmp_path / "none"], f"init: '{tmp_path / 'none'}'"),
        (["--init", weights, "--model.name", "resnet18"], "model.name: "),
    ):
        errors = refused(capsys, ["train", images, "--out", tmp_path / "z", "--size", 16, *flags])
        assert errors[0].startswith(line)
        assert not (tmp_path / "z").exists()


PHOTOS = Counts(768, 768, 12, 32)
STAMPS = Counts(465, 465, 10, 96)
SPEECH = Counts(2000, 50, 10, 64)
FEW_DIGITS = Counts(1437, 50, 10, 8)

CONVNET = {"model": {"name": "resnet18", "kwargs": {}}}
VIT_16 = {"model": {"name": "vit_tiny_patch16_224", "kwargs": {}}}


@pytest.mark.parametrize(
    "minutes, counts, flags, weights, sizes",
    [
        (1, FEW_DIGITS, {}, None, (32, [], 32)),
        (3, PHOTOS, {}, None, (32, [], 32)),
        (3, STAMPS, {}, None, (96, [], 96)),
        (0.7, STAMPS, {}, None, (32, [], 32)),
        # the comparison has a size of its own
        (3, STAMPS, {"way": "pretrain"}, None, (48, [48], 96)),
        (1, SPEECH, {}, None, (64, [], 64)),
        (1, SPEECH, {"size": 48}, None, (48, [], 48)),
        # weights: half of their size at least, also of small images
        (30, STAMPS, {"init": "x", **CONVNET}, 224, (128, [112, 224], 96)),
        (0.5, PHOTOS, {"init": "x", **CONVNET}, 224, (112, [112, 224], 32)),
        # built for one size
        (3, PHOTOS, {"init": "x", **VIT_16}, 224, (224, [224], 224)),
        (3, PHOTOS, {"init": "x", "size": 96, **VIT_16}, 224, (96, [96], 96)),
    ],
)
def test_the_sizes_that_there_is_time_for(minutes, counts, flags, weights, sizes):
    """On a CPU, as runs of these sets were measured; nothing is timed. Of the network, of weights
    whose features are used, and of the comparison."""
    keys = {"out": "x", "data": {"root": "x"}, "device": "cpu", "minutes": minutes}
    command = parsing.build(TrainCommand, keys | flags)
    plan = make_plan(command, counts, weights)
    assert (plan.size, plan.frozen_sizes, plan.scratch_size) == sizes
    assert sum(line.startswith("size: ") for line in plan.why) == 1


@pytest.mark.parametrize(
    "minutes, labels, alpha",
    [
        (0.9, 4, 1.0),
        (0.7, 4, 0.0),
        (0.9, 5, 0.0),
    ],
)
def test_mixup_and_cutmix_from_scratch_if_there_is_time(
    minutes, labels, alpha, images, tmp_path, monkeypatch
):
    """8 labelled images at 16 px, 4 per class: 67 or 52 passes, or too few labels."""
    monkeypatch.setattr(train_plan, "PIXELS_PER_SECOND", {"cpu": 4 * 8 * 16**2 / 0.8})
    monkeypatch.setattr(train_configs, "MANY_LABELS", labels)
    flags = {"way": "pretrain", "minutes": minutes, "compare": "true"}
    call_ok(command_line(images, tmp_path / "x", **flags))
    augment = read(tmp_path / "x/scratch/config.yaml")["augment"]
    assert augment["cutmix_alpha"] == alpha
    assert augment["mixup_alpha"] == 0.2 * alpha


@pytest.mark.parametrize(
    "minutes, name, alpha",
    [
        (3.8, "vit_tiny_patch16_224", 0.0),
        (4.2, "vit_tiny_patch16_224", 1.0),
        (4.2, "other", 0.0),
    ],
)
def test_cutmix_in_pretraining_if_there_is_time(
    minutes, name, alpha, images, tmp_path, monkeypatch
):
    """40 % of the time: 28 or 31 passes over two crops of 16 images. One network was measured."""
    monkeypatch.setattr(train_plan, "PIXELS_PER_SECOND", {"cpu": 4 * 8 * 16**2 / 0.8})
    monkeypatch.setattr(train_configs, "CONVNET", {"name": name})
    begin(command_line(images, tmp_path / "x", way="pretrain", minutes=minutes))
    assert read(tmp_path / "x/stage1/config.yaml")["method"]["cutmix_alpha"] == alpha


def test_copies_are_left_out_with_a_warning(tmp_path, caplog):
    root = tree(tmp_path / "d", train={"cat": 4, "dog": 4}, test={"cat": 2, "dog": 2})
    odd = os.fsdecode(b"train/cat/caf\xe9.png")  # no UTF-8
    shutil.copy(root / "train/cat/0.png", root / odd)
    shutil.copy(root / "test/dog/0.png", root / "train/dog/held.png")
    call_ok(command_line(root, tmp_path / "x"))
    names = names_of(tmp_path / "x", "train")
    assert len(names) == 8
    assert not {odd, "train/dog/held.png"} & {*names}
    excluded = (tmp_path / "x/exclude.txt").read_bytes()
    assert excluded == b"train/cat/caf\xe9.png\ntrain/dog/held.png\n"
    line = "2 training images left out, the same as another training image or a test image"
    assert line in caplog.text


def test_broken_images_are_skipped_and_listed(tmp_path, capsys):
    """Up to 5 %, in all splits, also after a list of the user's own and after a resume."""
    root = tree(tmp_path / "d", train={"cat": 20, "dog": 20}, test={"cat": 10, "dog": 10})
    broken = ["test/cat/1.png", "train/cat/#1.png", "train/dog/3.png"]
    for name in broken:
        (root / name).write_bytes(b"no image")
    (tmp_path / "own.txt").write_text("train/cat/0.png\n")
    flags = {"data.exclude": tmp_path / "own.txt"}
    out = tmp_path / "x"
    begin(command_line(root, out, **flags))
    assert "skipped 3 broken images (" in capsys.readouterr().err
    rows = read_csv(out / "skipped.csv")
    assert sorted(column(rows, "path")) == broken
    assert {*column(rows, "reason")} == {"not an image"}
    lines = (out / "exclude.txt").read_text().splitlines()
    assert lines[0] == "train/cat/0.png"
    assert {*lines} == {"train/cat/0.png", "", *broken}
    assert call(command_line(root, out, **flags)) == 0, "a resumed command skips the same ones"
    assert len(names_of(out, "train")) == 38
    assert len(names_of(out, "test")) == 19
    (root / "train/dog/4.png").write_bytes(b"no image")
    capsys.readouterr()
    *lines, last = refused(capsys, command_line(root, tmp_path / "y", **flags))
    assert last == "data.root: 4 of 60 images are broken. idmm train skips at most 5 %"
    for name in broken:
        assert any(f"{name}: " in line for line in lines)
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize("labelled", [None, "{per_class: 2}"])
def test_no_copy_is_in_two_splits(labelled, tmp_path):
    """Every image is there twice and a fifth is held out."""
    root = tree(tmp_path / "d", train={name: 10 for name in "abc"})
    for path in list(root.rglob("*.png")):
        shutil.copy(path, path.with_name(f"{path.stem}copy.png"))
    out = tmp_path / "x"
    flags = {"way": "pretrain", "data.labelled": labelled}
    call_ok(command_line(root, out, **flags))
    names = names_of(out / "stage1", "train") + names_of(out, "test")
    contents = {(root / name).read_bytes() for name in names}
    assert len(contents) == len(names) == 30


def test_a_class_whose_images_are_copies_of_test_images(tmp_path, caplog):
    root = tree(tmp_path / "e", train={"a": 4, "b": 4}, test={"a": 4, "b": 4})
    for name, count in (
        ("a", 4),
        ("b", 2),
    ):
        for number in range(count):
            image = f"{name}/{number}.png"
            shutil.copy(root / "train" / image, root / "test" / image)
    begin(command_line(root, tmp_path / "x"))
    assert "all training images of a are copies of other images" in caplog.text
    counts = read(tmp_path / "x/train.json")["counts"]
    assert counts["images"] == 6


def test_changed_images_are_noticed_after_a_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = tree(tmp_path / "d", train={"cat": 10, "dog": 10})
    a_run(tmp_path / "w")
    out = tmp_path / "x"
    flags = {"model.name": None, "model.kwargs": None}
    begin(command_line(root, out, init="w", **flags))
    monkeypatch.chdir(root)
    argv = command_line(root, out, init="../w", **flags)
    begin(argv)
    assert read(out / "train.json")["command"]["init"] == "w"
    tree(root, train={"cat": 11})
    assert "0 with another label, 1 new, 0 gone" in refused(capsys, argv)[-1]
    (root / "train/cat/10.png").unlink()
    call_ok(argv)
    capsys.readouterr()
    tree(root, train={"cat": 11})
    assert "0 with another label, 1 new, 0 gone" in refused(capsys, argv)[-1]
    shutil.rmtree(root)
    monkeypatch.chdir(tmp_path)
    argv = command_line(root, out, init="w", **flags)
    call_ok(argv)
    capsys.readouterr()
    assert refused(capsys, [*argv, "--compare", "true"]), "the comparison needs the images"


def test_images_in_an_array(tmp_path):
    """There is no trial of them."""
    flags = {"data.name": "digits", "data.subset": "{per_class: 5}", "size": 16, "minutes": 0.2}
    call_ok(["train", *as_flags(flags | {"out": tmp_path / "x", "device": "cpu"}, {})])
    saved = read(tmp_path / "x/train.json")
    assert saved["counts"]["side"] == 8
    assert saved["best"] == LINEAR
    assert saved["result"]["top1"] > 70


def test_a_draw_that_pretraining_cannot_make(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"cat": 9, "dog": 9})
    rows = ["path,class"]
    for name in ("cat", "dog"):
        rows += [f"train/{name}/0.png,{name}", f"train/{name}/1.png,{name}"]
    (tmp_path / "some.csv").write_text("\n".join(rows))
    flags = {"data.labels": tmp_path / "some.csv", "data.subset": "{total: 2}"}
    errors = refused(
        capsys,
        command_line(
            root,
            tmp_path / "y",
            way="pretrain",
            **flags,
        ),
    )
    assert errors[-1].startswith("data.subset: some training")


@pytest.mark.parametrize(
    "groups, trial",
    [
        ("(t.*)/", False),
        ("^(.)", False),
        ("(t.*)$", True),
    ],
)
def test_no_trial_if_groups_cannot_be_divided(groups, trial, tmp_path):
    """A video per class, or one for all."""
    root = tree(tmp_path / "d", train={"cat": 10, "dog": 10}, test={"cat": 3, "dog": 3})
    call_ok(command_line(root, tmp_path / "x", **{"data.groups": groups}))
    saved = read(tmp_path / "x/train.json")
    assert ("candidates" in saved) == trial
    assert trial or saved["best"] == LINEAR


def test_classes_in_nested_folders_can_be_drawn_in_pretraining(tmp_path):
    root = tmp_path / "d"
    tree(
        root,
        train={
            "cat/1": 4,
            "cat/2": 4,
            "dog/1": 8,
        },
        test={"cat/1": 3, "dog/1": 3},
    )
    flags = {"way": "pretrain", "data.subset": "{per_class: 5}"}
    begin(command_line(root, tmp_path / "x", **flags))
    assert "images: 10 train" in (tmp_path / "x/stage1/log.txt").read_text()


@pytest.mark.parametrize(
    "bits, bands, fits",
    [(8, 3, True), (8, 1, True), (16, 1, False), (8, 5, False), (16, 5, False)],
)
def test_weights_for_other_images(bits, bands, fits, tmp_path):
    """Features of weights of pictures are used for pictures, also grey ones; not for images whose
    range or channels they do not know. The network starts from them all the same."""
    a_run(tmp_path / "w")
    root = tmp_path / "d"
    for part, count in (("train", 9), ("test", 3)):
        for number in range(2 * count):
            path = root / part / "ab"[number % 2] / f"{number}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            seed = 100 * count + number
            noise = np.random.default_rng(seed).integers(0, 2**bits, (bands, 16, 16))
            pixels = noise.squeeze().astype(f"uint{bits}")
            if bands == 3:
                Image.fromarray(pixels.transpose(1, 2, 0)).save(path)
            else:
                tifffile.imwrite(path, pixels, photometric="minisblack")
    flags = {"data.labelled": "{per_class: 2}"}
    flags |= {"init": tmp_path / "w", "model.name": None, "model.kwargs": None, "size": None}
    if bands == 5:
        flags["data.bands"] = "[0, 1, 2, 3, 4]"
    out = tmp_path / "x"
    call_ok(command_line(root, out, **flags))
    saved = read(out / "train.json")
    assert saved["plan"]["frozen_sizes"] == ([16] if fits else [])
    assert saved["plan"]["size"] == 16
    files = sorted((root / "test").rglob("*.tif"))
    answers = tmp_path / "answers.csv"
    call_ok(["predict", "--init", out, *files, "--out", answers])
    expected = {f"test/{file.parent.name}/{file.name}": file for file in files}
    said = {row["path"]: row["class"] for row in read_csv(answers)}
    for row in read_csv(out / "predictions.csv"):
        assert said[str(expected[row["path"]])] == row["predicted"]


def coloured(root, **counts):
    """Two classes that hand-made features tell apart."""
    draw = np.random.default_rng(0)
    for split, count in counts.items():
        for name, colour in (("blue", (30, 40, 200)), ("red", (200, 40, 30))):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.normal(colour, 30, (16, 16, 3)).clip(0, 255)
                path = root / split / name / f"{number}.png"
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    return root


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_a_trial_chooses_what_is_kept(is_spoiled, tmp_path, monkeypatch, capsys):
    """By what both get right of the images of as many folds as hold out eight."""

    def spoil(method, _):
        with torch.no_grad():
            method.backbone.get_classifier().weight.zero_()

    if is_spoiled:
        monkeypatch.setattr(Method, "after_step", spoil)
    monkeypatch.setattr(trial, "ENOUGH", 8)
    root = coloured(tmp_path / "d", train=10, test=2)
    out = tmp_path / "x"
    call_ok(command_line(root, out))
    saved = read(out / "train.json")
    held_out = []
    hits = 0
    for number in (1, 2):
        parts = {"train": set(), "test": set()}
        for row in read_csv(out / f"trial/{number}.csv"):
            parts[row["split"]].add(row["path"])
        assert not parts["train"] & parts["test"]
        assert len(parts["train"]) == 16
        held_out += parts["test"]
        for row in read_csv(out / f"trial/{number}/predictions.csv"):
            assert row["path"] in parts["test"]
            hits += row["class"] == row["predicted"]
    assert len(held_out) == len({*held_out}) == 8
    assert not any(path.startswith("test/") for path in held_out)
    accuracy = saved["candidates"]
    assert accuracy[NETWORK] == approx(100 * hits / 8)
    assert accuracy[LINEAR] > 90
    assert accuracy[NETWORK] < 60 or not is_spoiled
    assert saved["best"] == LINEAR, "also if both are as good"
    config = read(out / "config.yaml")
    assert config["train"]["epochs"] == 0
    assert config["init"] == str(out / "features")
    printed = capsys.readouterr().out
    assert f"  {LINEAR}: {accuracy[LINEAR]:.1f} % (kept)\n" in printed
    assert f"  {NETWORK}: {accuracy[NETWORK]:.1f} %\n" in printed


@pytest.mark.parametrize("lead, best", [(1, LINEAR), (2, NETWORK)])
def test_a_network_is_kept_by_more_than_a_standard_error(lead, best, tmp_path, monkeypatch):
    """Where the linear classifier is wrong on some held-out images and the network on none. One
    image more has a standard error of one, and two of the root of two."""

    def wrong_on_some(head, features):
        hits = np.ones(len(features.rows), dtype=bool)
        hits[: lead - len(wrong)] = False
        wrong.extend(hits[~hits])
        return hits

    wrong = []
    root = coloured(tmp_path / "d", train=10, test=2)
    out = tmp_path / "x"
    monkeypatch.setattr(trial, "ENOUGH", 8)
    monkeypatch.setattr(trial, "correct", wrong_on_some)
    monkeypatch.setattr(trial, "_answers", lambda _, listing: [True] * len(listing.test))
    call_ok(command_line(root, out))
    saved = read(out / "train.json")
    assert saved["candidates"] == {LINEAR: approx(100 - 12.5 * lead), NETWORK: 100}
    assert saved["best"] == best
    assert read(out / "config.yaml")["train"]["epochs"] > 0 or best == LINEAR
    kept = "network" if best == NETWORK else "features"
    assert read(out / "config.yaml")["init"] == str(out / kept)
    assert read(out / "model.json")["name"] == "hog_conv"


def fast_process():
    """What :func:`fast` sets, in another process, where steps of the network are slow."""
    hog_conv.PATCHES = 2000
    trial.ENOUGH = 1
    trial.FEW = 1
    step = Method.before_step

    def slow(*args):
        time.sleep(0.2)
        return step(*args)

    Method.before_step = slow


@pytest.mark.parametrize(
    "file", ["network/backbone.json", "trial/1/metrics.jsonl", "last/images.json"]
)
def test_a_kill_costs_no_features(file, images, tmp_path):
    """During the features, in a trial and in the last step."""
    out = tmp_path / "x"
    argv = command_line(images, out, minutes=0.5)
    with Forked(argv, tmp_path / "said", fast_process) as process:
        assert process.until((out / file).exists), process.said()
        process.send()
        process.wait()
    rows = out / "features/rows.npz"
    written_at = rows.stat().st_mtime_ns if rows.exists() else None
    assert (written_at is None) == file.startswith("network")
    call_ok(argv)
    assert read(out / "train.json")["result"] == read(out / "result.json")
    if written_at is not None:
        assert rows.stat().st_mtime_ns == written_at


def test_images_beyond_the_time_get_no_features(images, tmp_path, monkeypatch, capsys):
    """One image of each class is used first."""
    monkeypatch.setattr(train_features, "TIME_SHARE", 0.0)
    monkeypatch.setattr(train_features, "BATCH", 3)
    call_ok(command_line(images, tmp_path / "x"))
    said = capsys.readouterr().err
    assert "there was time for 3 of 16 images. Try more --minutes" in said
    with np.load(tmp_path / "x/features/rows.npz") as saved:
        used = saved["images"]
        assert len(saved["rows"]) == 3
    assert {"cat", "dog"} == {"cat" if i < 4 else "dog" for i in used if i < 8}
    assert "top1" in read(tmp_path / "x/result.json")
