"""What is said at once to mistakes: data that would be the wrong one, values of another type,
folders that clash."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from folders import tree
from frozen import a_run
from helpers import ENVIRONMENT, ROOT, flags, inside_ok, logged, read, refused

NO_OUT = "out: missing. Name a folder for all that the run writes (--out runs/a)"
LITTLE = dict(data__subset=None, train__epochs=1, train__save_minutes=60)
DIGITS = "data.name: scikit-learn's digits, as neither --data.name nor --data.root was given"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return tree(tmp_path_factory.mktemp("own") / "d", train={"a": 3, "b": 3}, val={"a": 1, "b": 1})


def test_a_root_without_a_name_is_a_folder(pictures, tmp_path, capsys):
    inside_ok("pretrain", tmp_path / "run", **LITTLE, data__root=str(pictures))
    assert "images: 6 train" in capsys.readouterr().err
    assert read(tmp_path / "run" / "config.yaml")["data"]["name"] == "folder"
    inside_ok(
        "pretrain",
        tmp_path / "run",
        **LITTLE,
        data__root=str(pictures),
        data__name="folder",
    )
    assert "finished already" in capsys.readouterr().err, "the same run"


def test_files_of_others_stay(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("# mine")
    line = f"out: '{tmp_path}' has files that no run wrote (config.yaml). Name a new folder"
    assert refused(capsys, ["pretrain", *flags("pretrain", tmp_path, **LITTLE)]) == [line]
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_digits_are_said_to_be_digits_early(whole):
    assert DIGITS in logged(whole["finetune"]).splitlines()[1]
    assert read(whole["finetune"] / "config.yaml")["data"]["name"] == "digits"


def test_a_root_of_images_that_a_package_ships_is_an_error(pictures, tmp_path, capsys):
    name = "digits"
    line = f"data.root: '{pictures}', but data.name '{name}' comes with a package and takes none. "
    line += "Leave it out, or the name, which is then 'folder'"
    where = f"--data.name {name} --data.root {pictures}"
    assert refused(capsys, f"pretrain {where} --out {tmp_path}/o") == [line]
    assert refused(capsys, f"data check {name} --root {pictures}")[-1] == line
    assert not (tmp_path / "o").exists()


INIT = "init: 'a' does not exist, expected a run folder, or a "
FLOWER = "data.name: 'flower' is not known"
MISTAKES = [  # command line, how each line of the answer begins
    ("finetune --config paper", [NO_OUT]),
    ("pretrain --method.name simclr --method.queue 3 --out o", ["method.queue: got 3"]),
    ("train nowhere --out o", ["data.root: 'nowhere' does not exist, expected a folder of images"]),
    ("pretrain --data.name flower --out o", [FLOWER]),
    ("finetune --init a --out o", [INIT]),
    (
        "finetune --out o --data.labelled '{per_class: 2}'",
        ["data.labelled: is for pretraining, data.subset draws"],
    ),
    ("data info", ["name: missing, expected dataset, one of 'idmm data list'"]),
    ("data check", ["name: missing, expected --name or --root"]),
    (
        "finetune --stages '[{sise: 224}]'",
        ["stages[0].sise: unknown key. Did you mean 'stages[0].size'?"],
    ),
]
LOOP = (
    "import json, sys; from idmm.cli import main; [print(main(argv), file=sys.stderr) for "
    "argv in json.load(sys.stdin)]"
)


def test_a_mistake_is_a_line_each_and_exit_code_2_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    env = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    argvs = json.dumps([shlex.split(command) for command, _ in MISTAKES])
    command = [sys.executable, "-c", LOOP]
    done = subprocess.run(
        command, input=argvs, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    answers = iter(done.stderr.splitlines())
    for command, lines in MISTAKES:
        for line in lines:
            assert (answer := next(answers)).startswith(line), (command, answer)
        assert next(answers) == "2", command
    assert not list(answers)


def test_out_may_not_be_init(tmp_path, capsys):
    a_run(tmp_path / "run")
    line = f"out: '{tmp_path}/run' is where init is. Name a new folder for all that this run writes"
    for init in (tmp_path / "run", tmp_path / "run" / "backbone.safetensors"):
        assert refused(
            capsys, ["finetune", *flags("finetune", tmp_path / "run", init=str(init))]
        ) == [line]


@pytest.mark.parametrize(
    "root, below, allowed",
    [
        ("", "runs/a", True),
        ("", "train/runs/a", False),
        ("", "train", False),
        ("train", "out", False),
    ],
)
def test_out_may_not_be_among_the_images(root, below, allowed, pictures, capsys):
    """A later run would take its pictures for a class."""
    root = pictures / root
    argv = f"pretrain --data.root {root} --out {root}/{below} --init {pictures}/none"
    line = (
        f"out: '{root / below}' lies among the images of '{pictures / 'train'}' and would become "
    )
    line += "one of their classes. Name another place"
    lines = refused(capsys, argv)
    assert (line in lines) != allowed
    assert any("does not exist" in one for one in lines)
    if not allowed:
        assert refused(capsys, f"train {root} --out {root}/{below}") == [line]
        assert refused(capsys, f"data check --root {root} --out {root}/{below}") == [line]
