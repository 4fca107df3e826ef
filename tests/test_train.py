"""From a folder to a classifier in a given time, by the real command line."""

import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from folders import faults, tree
from frozen import a_run
from helpers import VIT, Together, call, read, refused
from PIL import Image

import idmm
from idmm.auto import configs as train_configs
from idmm.auto import data as train_data
from idmm.auto import plan as train_plan
from idmm.auto import train
from idmm.auto.plan import Counts, make_plan
from idmm.config import Data, FinetuneConfig, PretrainConfig, Subset, parsing
from idmm.config.commands import TrainCommand, TrainData
from idmm.data.listing import list_images
from idmm.errors import Interrupted, UserError
from idmm.files import read_csv
from idmm.runs.images import list_run_images
from idmm.runs.resolve import fill_data_name, fill_pretrain_names

pytestmark = pytest.mark.usefixtures("own_cache")
MINUTES = 0.25  # which leaves stage 2 four seconds
RESULT = {"top1": 60.0, "top1_interval": [40.0, 90.0], "baseline_top1": 40.0, "largest_class": 50.0}
RESULT |= {"baseline_train_size": 16}
RESULT |= {"test_size": 4, "seconds": 1.0}
MODEL = [
    "--model.name",
    "vit_tiny_patch16_224",
    "--model.kwargs",
    yaml.safe_dump(VIT, default_flow_style=True).strip(),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two labelled images a class to train on, more without labels."""
    root = tree(
        tmp_path_factory.mktemp("images") / "d",
        train={"cat": 4, "dog": 4},
        test={"cat": 5, "dog": 6},
    )
    return tree(root, unlabelled={"": 8})


@pytest.fixture(scope="module", autouse=True)
def own_clock():
    """The processor's, which does not count what else the machine does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", time.process_time)
        yield


def given(images, out, **flags):
    flags = {"minutes": MINUTES, "size": 16, "data.workers": 0, "device": "cpu", **flags}
    return [
        "train",
        images,
        *MODEL,
        "--out",
        out,
        *(w for name, value in flags.items() for w in (f"--{name}", value)),
    ]


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    """Pretraining, fine-tuning and the comparison; nothing may be written to it."""
    out = tmp_path_factory.mktemp("done") / "x"
    assert call(given(images, out, way="pretrain", compare="true")) == 0
    return out


def test_what_is_written(done, images, capsys):
    kept = read(done / "train.json")
    result = read(done / "result.json")
    assert kept["result"] == result
    assert (done / "model.safetensors").exists()
    counts = {
        "images": 16,
        "labelled": 8,
        "classes": 2,
        "side": 9,
        "without": 0,
        "divisible": True,
        "foreign": False,
    }
    assert kept["counts"] == counts
    assert kept["plan"]["way"] == "pretrain"
    assert kept["plan"]["size"] == 16
    stage1, scratch, tuned = (
        read(done / name / "config.yaml") for name in ("stage1", "scratch", "")
    )
    assert tuned["init"] == str(done / "stage1")
    assert scratch["init"] is None
    assert stage1["views"]["crops"] == [{"count": 2, "scale": [0.35, 1.0]}]
    assert stage1["views"]["jitter"] == [0.4, 0.4, 0, 0]
    assert stage1["model"]["start"] == scratch["model"]["start"] == "auto", (
        "a fresh ViT's, as in the recipes"
    )
    assert scratch["train"]["minutes"] == MINUTES, "as long again"
    assert 0 < stage1["train"]["minutes"] < MINUTES
    assert 0 < tuned["train"]["minutes"] < MINUTES
    assert read(done / "stage1/result.json")["train_size"] == 16
    assert result["train_size"] == 8
    spent = sum(read(done / name / "result.json")["seconds"] for name in ("stage1", ""))
    assert spent < 60 * MINUTES * 1.3, "both stages together"
    assert tuned["train"]["classifier_init"] == "random"
    assert "start_top1" not in result
    assert call(given(images, done, way="pretrain", compare="true")) == 0
    said = capsys.readouterr().out
    low, high = result["top1_interval"]
    assert f"top-1 {result['top1']:.1f} % ({low:.1f} to {high:.1f}) on 11 test images" in said
    assert f"the largest class every time: {result['largest_class']:.1f} %" in said
    gain = result["top1"] - read(done / "scratch/result.json")["top1"]
    assert kept["gain"]["points"] == pytest.approx(gain)
    assert f"{gain:+.1f} points" in said
    assert "(p = " in said
    assert f"from scratch at 16 px, in {kept['scratch']['seconds']:.0f} s" in said
    assert "finished already" in said


def test_from_python(done, images):
    data = {"root": str(images), "workers": 0}
    model = {"name": MODEL[1], "kwargs": VIT}
    config = {
        "data": data,
        "model": model,
        "minutes": MINUTES,
        "size": 16,
        "device": "cpu",
        "out": str(done),
    }
    config |= {"way": "pretrain", "compare": True}
    assert idmm.train(config) == read(done / "train.json")
    with pytest.raises(UserError, match="minutes: "):
        idmm.train({**config, "minutes": 0})


def test_processes_go_by_the_first_ones_plan(tmp_path):
    code = "import os; from idmm.auto.train import _of_first_process as first"
    code += "; print(first({'plan': os.environ['RANK']}, 'cpu'))"
    (tmp_path / "agree.py").write_text(code)
    with Together([tmp_path / "agree.py"], tmp_path / "said") as both:
        assert both.wait() == 0
        assert both.said().count("{'plan': '0'}") == 2, both.said()


def test_another_command_is_refused(done, images, capsys):
    before = (done / "train.json").read_bytes()
    lines = refused(capsys, given(images, done, way="pretrain", minutes=3, seed=1))
    assert any(line.startswith(f"minutes: the run in '{done}' has {MINUTES}, ") for line in lines)
    assert any(
        line.startswith("seed: ") and line.endswith("has 0, this command has 1") for line in lines
    )
    assert lines[-1].startswith(f"out: '{done}' belongs to another config. Use a new --out")
    assert (done / "train.json").read_bytes() == before


def test_taken_up_again(images, tmp_path, monkeypatch):
    """Each stage has the minutes that it began with; what stage 1 leaves is stage 2's."""
    ran = []

    def stage(given, state, part, minutes):
        config = train_configs.stage_config(given, state, part, minutes)
        assert config["train"]["save_minutes"] == pytest.approx(minutes / 10), (
            "what a kill can cost"
        )
        ran.append((part, minutes, config.get("init"), config["data"]["workers"]))
        if len(ran) == 2:
            raise Interrupted("interrupted")
        return {**RESULT, "seconds": 120}

    monkeypatch.setattr(train, "_stage", stage)
    argv = given(images, tmp_path / "x", way="pretrain", minutes=10)
    assert call(argv) == 130
    before = read(tmp_path / "x/train.json")["minutes"]["before"]
    assert call([*argv, "--data.workers", 2]) == 0
    assert read(tmp_path / "x/train.json")["minutes"]["before"] > before > 0, (
        "the second start takes its time, too"
    )
    assert [run[:3] for run in ran[:2]] == [run[:3] for run in ran[2:]]
    assert [run[3] for run in ran] == [0, 0, 2, 2]
    (first, whole, *_), (second, rest, init, _) = ran[:2]
    assert (first, second, init) == ("stage1", "last", str(tmp_path / "x/stage1"))
    assert whole == pytest.approx(0.4 * 10, abs=0.2)
    assert rest == pytest.approx(10 - 2, abs=0.2)


def stages_run(monkeypatch, argv):
    """Runs a command whose stages do nothing; returns the images that each would have had, and its
    config."""
    ran = []

    def run_pretrain(config):
        config, _ = fill_pretrain_names(parsing.build(PretrainConfig, config))
        ran.append((list_run_images(config), config))
        return RESULT

    def run_finetune(config):
        config, _ = fill_data_name(parsing.build(FinetuneConfig, config))
        ran.append((list_run_images(config), config))
        return RESULT

    with monkeypatch.context() as patched:
        patched.setattr(train, "pretrain", run_pretrain)
        patched.setattr(train, "finetune", run_finetune)
        patched.setattr(train, "compared", lambda *_: {"points": 0.0, "p": 1.0})
        assert call(argv) == 0
    return ran


@pytest.mark.parametrize("nested", [False, True])
def test_stage_1_sees_no_test_image(nested, tmp_path, monkeypatch):
    """Nor where training without labels has no classes to hold images out by."""
    more = {}
    if nested:
        root = tree(tmp_path / "d", **{f"{name}/a": {"": 10} for name in ("cat", "dog")})
    else:
        root = tree(tmp_path / "d", **{"": {"": 30}})
        rows = [f"{i}.png,{'cat' if i % 2 else 'dog'}" for i in range(20)]
        (tmp_path / "l.csv").write_text("\n".join(["path,class", *rows]))
        more = {"data.labels": tmp_path / "l.csv"}
    argv = given(root, tmp_path / "x", way="pretrain", minutes=10, compare="true", **more)
    (first, _), (tuned, _), (scratch, _) = stages_run(monkeypatch, argv)
    assert len(tuned.test) == 4
    assert tuned.test.names == scratch.test.names
    assert sorted(tuned.train.names) == sorted(scratch.train.names)
    assert len(tuned.train) == 16
    assert len(first.train) == (16 if nested else 26)
    assert not {*first.train.names} & {*tuned.test.names}
    assert {*tuned.train.names} <= {*first.train.names}
    assert read(tmp_path / "x/train.json")["counts"]["images"] == len(first.train)


def test_from_scratch_with_some_of_the_labels_and_no_test_images(tmp_path, capsys):
    root = tree(tmp_path / "d", **{name: {"": 10} for name in ("cat", "dog")})
    some = {"minutes": 0.15, "data.labelled": "{per_class: 2}", "pseudolabel": "false"}
    assert call(given(root, tmp_path / "x", way="scratch", **some)) == 0
    kept = read(tmp_path / "x/train.json")
    assert kept["result"]["train_size"] == kept["counts"]["labelled"] == 4
    assert kept["result"]["test_size"] == 4, "a fifth is held out"
    assert "gain" not in kept
    assert not (tmp_path / "x/stage1").exists()
    assert read(tmp_path / "x/config.yaml")["stages"][0]["batch_size"] == 8, "for so few images"
    said = capsys.readouterr().err
    step = rf"step 1 of 1: the classifier \({MODEL[1]}\), \d s. Details: {tmp_path}/x/log.txt"
    assert re.search(
        rf" 4 of them labelled .*\n0.15 min at most, until about \d\d:\d\d\n{step}", said, re.DOTALL
    )
    assert " training on cpu" not in said
    assert " training on cpu" in (tmp_path / "x/log.txt").read_text()
    (line,) = refused(capsys, given(root, tmp_path / "x", way="scratch", compare="true", **some))
    assert line.startswith("compare: there is no pretraining")
    assert (tmp_path / "x/train.json").exists()


def test_what_is_wrong(images, tmp_path, capsys, monkeypatch):
    plain = tree(tmp_path / "plain", **{"": {"": 4}})
    lines = refused(capsys, given(plain, tmp_path / "x"))
    assert lines[0].startswith("data.root: ")
    assert not (tmp_path / "x").exists()
    *_, line = refused(capsys, given(images, tmp_path / "x", compare="true"))
    assert line.startswith("compare: there is no pretraining")
    where = "data.root: missing, expected --data.root or --data.name"
    out = "out: missing, expected folder for the classifier and all other files"
    assert refused(capsys, ["train"]) == [where, out]
    assert refused(capsys, ["train", "--out", tmp_path / "x"]) == [where]
    *_, line = refused(capsys, given(images, tmp_path / "x", way="scratch", minutes=1e-4))
    assert line.startswith("minutes: got 0.0001, but ")
    assert "before the first stage" in line
    (line,) = refused(capsys, given(images, tmp_path / "x", **{"data.folds": 2}))
    assert line.startswith("--data.folds: unknown flag of this command")
    assert not (tmp_path / "x").exists()
    broken = tree(tmp_path / "broken", train={"cat": 4, "dog": 4}, test={"cat": 2, "dog": 2})
    (broken / "test/cat/0.png").write_bytes(b"no image")
    (broken / "train/dog/1.png").write_bytes(b"none, too")
    said = "".join(refused(capsys, given(broken, tmp_path / "x")))
    assert "test/cat/0.png: " in said
    assert "train/dog/1.png: " in said
    assert "step 1" not in said
    (tmp_path / "y").mkdir()
    for text in ("{", "[]"):
        (tmp_path / "y/train.json").write_text(text)
        (line,) = refused(capsys, given(images, tmp_path / "y"))
        assert line.startswith(f"{tmp_path / 'y/train.json'}: is damaged (")
    some = {"data.subset": "{per_class: 3}", "data.labelled": "{per_class: 2}"}
    (line,) = refused(capsys, given(images, tmp_path / "x", **some))
    assert line.startswith("data.labelled: ")
    nested = tree(tmp_path / "nested", **{f"{name}/a": {"": 4} for name in ("cat", "dog")})
    refused(capsys, given(nested, tmp_path / "x", minutes=1e-4))
    assert not (tmp_path / "x").exists()


def asked(**changes):
    return TrainCommand(**{"out": "x", "size": 32, "model": {"name": "resnet10t"}, **changes})


def test_from_weights(done, images, tmp_path, monkeypatch, capsys):
    """Fine-tuned as they are, or adapted first; the comparison has the same model without them."""
    weights = done / "stage1"
    plain = given(images, tmp_path / "x", minutes=10, init=weights)
    argv = [word for word in plain if word not in MODEL]
    (_, tuned), (_, scratch) = stages_run(monkeypatch, [*argv, "--compare", "true"])
    assert tuned.init == str(weights)
    assert tuned.train.layer_decay == 0.7, "by the recipe 'fast'"
    assert scratch.init is None
    assert scratch.model.kwargs == VIT
    assert scratch.train.minutes == 10 >= tuned.train.minutes > 9
    kept = read(tmp_path / "x/train.json")
    assert kept["plan"]["way"] == "finetune"
    assert "--way pretrain adapts them" in kept["plan"]["why"][0]

    argv[argv.index(tmp_path / "x")] = tmp_path / "y"
    (_, adapted), (_, tuned) = stages_run(
        monkeypatch, [*argv, "--way", "pretrain", "--model.drop_path", 0.05]
    )
    assert adapted.init == str(weights)
    assert adapted.train.lr == 5e-4, "by the recipe 'adapt'"
    assert adapted.model.drop_path == 0.05
    assert adapted.views.jitter == [0.4, 0.4, 0, 0]
    assert tuned.init == str(tmp_path / "y/stage1")

    capsys.readouterr()
    for more, line in (
        (["--way", "finetune"], "way: finetune starts from weights. Add --init WEIGHTS"),
        (
            ["--way", "scratch", "--init", weights],
            "way: scratch starts from no weights. Leave --init out, or take",
        ),
        (["--init", tmp_path / "none"], f"init: '{tmp_path / 'none'}'"),
        (["--init", weights, "--model.name", "resnet18"], "model.name: "),
    ):
        said = refused(capsys, ["train", images, "--out", tmp_path / "z", "--size", 16, *more])
        assert said[0].startswith(line)
        assert not (tmp_path / "z").exists()


PHOTOS = Counts(768, 768, 12, 32)
STAMPS = Counts(465, 465, 10, 96)
SPEECH = Counts(2000, 50, 10, 64)
SIGNS = Counts(500, 50, 10, 96)
FEW_DIGITS = Counts(1437, 50, 10, 8)


@pytest.mark.parametrize(
    ("minutes", "counts", "flags", "way", "sizes"),
    [
        (1, FEW_DIGITS, {}, "pretrain", (32, 32, 32)),
        (3, PHOTOS, {}, "scratch", (32, 32, 32)),
        (3, STAMPS, {}, "scratch", (96, 96, 96)),
        (0.7, STAMPS, {}, "scratch", (32, 32, 32)),
        # the comparison has a size of its own
        (3, STAMPS, {"way": "pretrain"}, "pretrain", (48, 48, 96)),
        (1, SPEECH, {}, "pretrain", (32, 64, 64)),  # few labels have time for larger images
        (30, SPEECH, {}, "pretrain", (64, 64, 64)),
        (90, SIGNS, {}, "pretrain", (96, 96, 96)),
    ],
)
def test_the_table_gives_way_and_size(minutes, counts, flags, way, sizes):
    """On a CPU, as runs of these sets were measured; nothing is timed."""
    plan = make_plan(asked(size=None, minutes=minutes, model={}, device="cpu", **flags), counts)
    assert (plan.way, plan.size, plan.label_size, plan.scratch_size) == (way, *sizes)
    assert sum(line.startswith("size: ") for line in plan.why) == 1


FEW, SOME, EVERY = (Counts(2000, labelled, 10, 32) for labelled in (50, 1000, 2000))
HALF = Counts(2000, 50, 10, 32, without=2)
DIGITS = {"data": TrainData(name="digits")}


@pytest.mark.parametrize(
    ("flags", "counts", "way", "pseudolabel", "reason"),
    [
        ({}, FEW, "pretrain", True, "as its features help"),
        ({"way": "scratch"}, FEW, "scratch", False, "as asked"),
        ({}, SOME, "scratch", False, "as there are under 3 images per label"),
        ({}, EVERY, "scratch", False, "as every training image has a label"),
        ({}, HALF, "scratch", False, "as 2 of the classes have no label"),
        (
            DIGITS,
            FEW,
            "scratch",
            False,
            "as pseudo-labels are for a folder of images, not for digits",
        ),
        ({"pseudolabel": False}, FEW, "scratch", False, "as --pseudolabel is false"),
        ({"pseudolabel": True}, SOME, "pretrain", True, "as --pseudolabel is true"),
        ({"way": "pretrain"}, EVERY, "pretrain", False, "as asked"),
        ({"init": "x"}, FEW, "finetune", True, "as --init has weights"),
    ],
)
def test_what_is_chosen(flags, counts, way, pseudolabel, reason):
    plan = make_plan(asked(**flags), counts)
    assert (plan.way, plan.pseudolabel) == (
        way,
        pseudolabel,
    )
    assert f". --way {way}, {reason}" in plan.why[0]


@pytest.mark.parametrize(
    ("flags", "counts", "line"),
    [
        ({"pseudolabel": True}, HALF, "pseudolabel: got true, but 2 of the classes have no label"),
        (
            {"pseudolabel": True},
            EVERY,
            "pseudolabel: got true, but every training image has a label",
        ),
        (
            {"pseudolabel": True, "way": "scratch"},
            FEW,
            "pseudolabel: got true, but --way scratch uses",
        ),
        ({"compare": True}, EVERY, "compare: there is no pretraining"),
    ],
)
def test_what_cannot_be_chosen(flags, counts, line):
    with pytest.raises(UserError, match=f"^{line}"):
        make_plan(asked(**flags), counts)


def test_mixup_and_cutmix_where_there_is_time_for_many_passes(images, tmp_path, monkeypatch):
    """Of 8 labelled images at 16 px, 4 a class."""
    # a pass over them takes 0.8 s
    monkeypatch.setattr(train_plan, "PIXELS_PER_SECOND", {"cpu": 4 * 8 * 16**2 / 0.8})
    # 67 and 52 passes; too few labels
    for minutes, labels, alpha in ((0.9, 4, 1.0), (0.7, 4, 0.0), (0.9, 5, 0.0)):
        monkeypatch.setattr(train_configs, "MANY_LABELS", labels)
        ((_, config),) = stages_run(
            monkeypatch,
            given(images, tmp_path / f"{minutes}{labels}", way="scratch", minutes=minutes),
        )
        assert config.augment.cutmix_alpha == alpha
        assert config.augment.mixup_alpha == 0.2 * alpha
    monkeypatch.setattr(train_configs, "MANY_LABELS", 4)
    monkeypatch.setattr(train, "count", lambda *_: Counts(10, 8, 2, 16))
    for minutes, name, alpha in ((2.4, MODEL[1], 0.0), (2.6, MODEL[1], 1.0), (2.6, "other", 0.0)):
        monkeypatch.setattr(train_configs, "CONVNET", {"name": name})  # of which it was measured
        # 40 % of the time: 29 and 31 passes over two crops of 10 images
        argv = given(images, tmp_path / f"p{minutes}{name}", way="pretrain", minutes=minutes)
        (_, first), (_, last) = stages_run(monkeypatch, argv)
        assert first.method.cutmix_alpha == alpha
        assert last.augment.cutmix_alpha == 1.0


def test_copies_are_left_out_with_a_warning(images, tmp_path, monkeypatch, caplog):
    root = tree(tmp_path / "d", train={"cat": 4, "dog": 4}, test={"cat": 2, "dog": 2})
    odd = os.fsdecode(b"train/cat/caf\xe9.png")  # no UTF-8
    (root / odd).write_bytes((root / "train/cat/0.png").read_bytes())
    (root / "train/dog/held.png").write_bytes((root / "test/dog/0.png").read_bytes())
    ((listing, _),) = stages_run(monkeypatch, given(root, tmp_path / "x", way="scratch"))
    assert not {odd, "train/dog/held.png"} & {*listing.train.names}
    assert len(listing.train) == 8
    assert (
        tmp_path / "x/exclude.txt"
    ).read_bytes() == b"train/cat/caf\xe9.png\ntrain/dog/held.png\n"
    line = "2 training images left out, the same as another training image or a test image"
    assert any(line in message for message in caplog.messages)


def test_broken_images_are_skipped_and_listed(tmp_path, monkeypatch, capsys):
    """Up to 5 %, in all splits, also after a list of the user's own and when the command is
    repeated."""
    root = tree(tmp_path / "d", train={"cat": 20, "dog": 20}, test={"cat": 10, "dog": 10})
    broken = ["test/cat/1.png", "train/cat/#1.png", "train/dog/3.png"]
    for name in broken:
        (root / name).write_bytes(b"no image")
    (tmp_path / "own.txt").write_text("train/cat/0.png\n")
    more = {"way": "scratch", "data.exclude": tmp_path / "own.txt"}
    runs = stages_run(monkeypatch, given(root, tmp_path / "x", **more))
    assert "skipped 3 broken images (" in capsys.readouterr().err
    rows = read_csv(tmp_path / "x/skipped.csv")
    assert sorted((row["path"], row["reason"]) for row in rows) == [
        (name, "not an image") for name in broken
    ]
    lines = (tmp_path / "x/exclude.txt").read_text().splitlines()
    assert lines[0] == "train/cat/0.png"
    assert {*lines} == {"train/cat/0.png", "", *broken}
    assert (len(runs[0][0].train), len(runs[0][0].test)) == (38, 19)
    command, _ = planned(
        root, tmp_path / "z", way="scratch", data={"exclude": str(tmp_path / "own.txt")}
    )
    again = list_images(
        train_data.data_of(command, train._load(command, tmp_path / "z")), labelled=True
    )
    assert again.train.names == runs[0][0].train.names, "a resumed command skips the same ones"
    (root / "train/dog/4.png").write_bytes(b"no image")
    *_, line = refused(capsys, given(root, tmp_path / "y", **more))
    assert line == "data.root: 4 of 60 images are broken. idmm train skips at most 5 %"
    assert not (tmp_path / "y").exists()


def test_no_copy_is_in_two_splits(tmp_path, caplog):
    """Every image is there twice and a fifth is held out. Then a class whose images are all copies
    of test images."""
    root = tree(tmp_path / "d", train={name: 10 for name in "abc"})
    for path in list(root.rglob("*.png")):
        path.with_name(f"{path.stem}copy.png").write_bytes(path.read_bytes())
    for number, more in enumerate(({}, {"labelled": {"per_class": 2}})):
        data = TrainData(name="folder", root=str(root), **more)
        _, listing = train_data.chosen_images(data, tmp_path / f"x{number}")
        contents = [
            Path(path).read_bytes() for split in listing.parts.values() for path in split.items
        ]
        assert len(contents) == len(set(contents)) == 30
    root = tree(tmp_path / "e", train={"a": 4, "b": 4}, test={"a": 4, "b": 4})
    for name, count in (("a", 4), ("b", 2)):
        for number in range(count):
            (root / f"test/{name}/{number}.png").write_bytes(
                (root / f"train/{name}/{number}.png").read_bytes()
            )
    _, listing = train_data.chosen_images(TrainData(name="folder", root=str(root)), tmp_path / "y")
    assert np.bincount(listing.train.labels).tolist() == [4, 2]
    assert any(
        "all training images of a are copies of other images" in line for line in caplog.messages
    )


def planned(root, out, **flags):
    """Returns a command and the state that it has when it begins; with the flags of ``data`` under
    data."""
    data = TrainData(name="folder", root=str(root), **flags.pop("data", {}))
    command = TrainCommand(out=str(out), device="cpu", data=data, **flags)
    state = train._planned(command, out)
    state.save(out)
    return command, state


def test_images_that_changed_are_noticed_when_a_command_is_repeated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tree(tmp_path / "d", train={"cat": 10, "dog": 10})
    a_run(tmp_path / "w")
    command, _ = planned(root, tmp_path / "x", init="w", pseudolabel=False)
    monkeypatch.chdir(root)
    command = replace(command, init="../w")
    state = train._load(command, tmp_path / "x")
    train._check_images(command, state)
    assert train_configs.stage_config(command, state, "last", 1.0)["init"] == "../w"
    tree(root, train={"cat": 11})
    assert "0 with another label, 1 new, 0 gone" in faults(train._check_images, command, state)[0]
    state.result = {"top1": 50.0}
    assert faults(train._check_images, command, state), "also if it is finished"
    shutil.rmtree(root)
    train._check_images(command, state)
    assert faults(train._check_images, replace(command, compare=True), state), (
        "scratch needs the images"
    )


def test_images_in_an_array_and_a_draw_that_pretraining_cannot_make(tmp_path):
    command = TrainCommand(out="x", device="cpu", data=TrainData(name="digits"))
    assert train._planned(command, tmp_path / "x").counts.side == 8
    root = tree(tmp_path / "d", train={"cat": 9, "dog": 9})
    rows = [
        "path,class",
        "train/cat/0.png,cat",
        "train/cat/1.png,cat",
        "train/dog/0.png,dog",
        "train/dog/1.png,dog",
    ]
    (tmp_path / "some.csv").write_text("\n".join(rows))
    data = {"labels": str(tmp_path / "some.csv"), "subset": Subset(total=2)}
    assert faults(planned, root, tmp_path / "y", data=data, way="pretrain")[0].startswith(
        "data.subset: some training"
    )


def test_no_trial_if_groups_cannot_be_divided(tmp_path):
    """A video per class, or one for all: hog_conv is trained without one."""
    root = tree(tmp_path / "d", train={"cat": 10, "dog": 10}, test={"cat": 3, "dog": 3})
    for number, (groups, trial) in enumerate(
        (("(t.*)/", False), ("^(.)", False), ("(t.*)$", True))
    ):
        _, state = planned(root, tmp_path / f"x{number}", data={"groups": groups})
        assert (state.plan.joined, state.plan.trial) == (True, trial)


def test_classes_in_nested_folders_can_be_drawn_in_pretraining(tmp_path):
    root = tree(
        tmp_path / "d", train={"cat/1": 4, "cat/2": 4, "dog/1": 8}, test={"cat/1": 3, "dog/1": 3}
    )
    command, state = planned(
        root, tmp_path / "x", way="pretrain", data={"subset": {"per_class": 5}}
    )
    config = train_configs.stage_config(command, state, "stage1", 1.0)
    assert len(list_images(Data(**config["data"]), labelled=False).train) == 10


def test_no_pseudo_labels_by_weights_for_other_values(tmp_path):
    """Weights of pictures and images of 16 bits, whose range they do not know."""
    a_run(tmp_path / "w")
    for bits, depth in ((8, np.uint8), (16, np.uint16)):
        root = tmp_path / f"d{bits}"
        for part, count in (("train", 9), ("test", 3)):
            for number in range(2 * count):
                path = root / part / "ab"[number % 2] / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(number).integers(0, 2**bits, (16, 16)).astype(depth)
                Image.fromarray(noise).save(path)
        data = {"labelled": {"per_class": 2}}
        _, state = planned(root, tmp_path / f"x{bits}", init=str(tmp_path / "w"), data=data)
        assert state.plan.pseudolabel == (bits == 8)
        assert state.counts.foreign == (bits == 16)


def test_a_trial_chooses_what_is_kept(tmp_path, monkeypatch, capsys):
    """On a fifth of the labelled training images."""
    root = tree(tmp_path / "d", train={"cat": 10, "dog": 10}, test={"cat": 2, "dog": 2})
    ran = []

    def stage(given, state, part, minutes):
        config = train_configs.stage_config(given, state, part, minutes)
        ran.append(
            (
                part,
                config["model"]["name"],
                config["train"].get("max_epochs"),
                config["model"].get("freeze"),
            )
        )
        return RESULT | {"start_top1": linear, "whole_epochs": epochs}

    monkeypatch.setattr(train, "_stage", stage)
    frozen = ("last", "hog_conv", 1, True)
    for linear, epochs, last in (
        (62.0, 1, ("last", "hog_conv", None, None)),  # the network has more time in the end
        # the trial was too short, but there is time in the end
        (62.0, 0, ("last", "hog_conv", None, None)),
        (99.0, 1, frozen),
    ):
        out = tmp_path / f"x{linear}{epochs}"
        assert call(["train", root, "--out", out, "--minutes", 10, "--device", "cpu"]) == 0
        assert [part for part, *_ in ran[-2:]] == ["trial", "last"]
        assert ran[-1] == last
        printed = capsys.readouterr().out
        assert f"  linear classifier on hog_conv: {linear:.1f} %" in printed
        assert (
            "  hog_conv: kept by a rule and not measured, as the trial was too short" in printed
        ) == (epochs == 0)
    monkeypatch.setattr(train_plan, "PIXELS_PER_SECOND", {"cpu": 1000.0})
    linear = 62.0
    epochs = 0
    assert (
        call(["train", root, "--out", tmp_path / "slow", "--minutes", 10, "--device", "cpu"]) == 0
    )
    assert ran[-1] == frozen, "no time for enough passes"
    capsys.readouterr()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").touch()
    line = f"out: '{tmp_path}/other' has other files. Name a new folder"
    assert refused(capsys, ["train", root, "--out", tmp_path / "other"]) == [line]
    rows = (out / "trial.csv").read_text().splitlines()
    assert sum(",test" in row for row in rows) == 4
    assert len(rows) == 21
    for row in rows:
        assert "test/" not in row
