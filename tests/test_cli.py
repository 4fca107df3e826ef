"""The command line and the Python interface: what is said, in which words, and what is
understood."""

import errno
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

import pytest
import safetensors.torch
import timm
import yaml
from folders import faults
from helpers import (
    ROOT,
    STAGES,
    call,
    call_ok,
    flags,
    inside,
    inside_ok,
    metrics,
    read,
    refused,
)

import idmm
from idmm.cli import COMMANDS, main
from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.parsing import build, dump, parse
from idmm.config.schema import flags_of

KINDS = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}
BOTH = pytest.mark.parametrize("stage", list(STAGES))
COMMON = """config out seed init resume data.name data.root data.workers model.name model.kwargs
    train.epochs train.batch_size train.lr train.weight_decay train.warmup_epochs train.precision
    train.device""".split()
CONTRACT = {  # flags that must exist under exactly these names
    "pretrain": """method.name method.label_smoothing method.cutmix_alpha method.classifier
        method.classifier_lr_scale
        method.classifier_init views.size views.crops""".split(),
    "finetune": ["stages", "model.freeze", "train.size"],
}
# Loss of each epoch of the runs in helpers.STAGES, on one thread. Where they change on purpose:
# python -c "import json, sys; [print(json.loads(l)['loss']) for l in open(sys.argv[1])]"
# RUN/metrics.jsonl
GOLDEN = {
    "pretrain": [16.126450, 12.410863, 10.789403],
    "finetune": [2.309609, 2.288535, 2.274255, 2.283475],
}


def written(folder, text, name="config.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def parsed(*argv, kind=PretrainConfig):
    return parse(kind, [str(word) for word in argv], "test")


OUTPUTS = {
    "pretrain": """config.yaml metrics.jsonl result.json log.txt last backbone.safetensors
        backbone.json curves.png""",
    "finetune": """config.yaml metrics.jsonl result.json log.txt last backbone.safetensors
        backbone.json curves.png model.safetensors model.json per_class.csv predictions.csv
        confusion.png mistakes.csv mistakes.png split.csv""",
}


@BOTH
def test_golden_losses(stage, whole):
    losses = [record["loss"] for record in metrics(whole[stage])]
    assert losses == pytest.approx(GOLDEN[stage], rel=1e-3)


@BOTH
def test_files_of_a_run(stage, whole):
    """The contract's outputs; timm alone rebuilds the backbone."""
    out = whole[stage]
    assert {path.name for path in out.iterdir()} == set(OUTPUTS[stage].split())
    info = read(out / "backbone.json")
    assert info["kwargs"]["num_classes"] == 0
    assert info["ema"] == (stage == "finetune")
    model = timm.create_model(info["name"], **info["kwargs"])
    model.load_state_dict(safetensors.torch.load_file(out / "backbone.safetensors"), strict=True)
    result = read(out / "result.json")
    assert (result["train_size"], result["seed"]) == (96, 0)
    assert result["seconds"] > 0
    last = metrics(out)[-1]
    assert {"epoch", "stage", "step", "loss", "lr"} <= set(last)
    if stage == "finetune":
        assert (result["top1"], result["top5"]) == (
            last["top1"],
            last["top5"],
        )
        assert read(out / "model.json")["classes"] == [str(n) for n in range(10)]


FAULTS = {
    "flag of other commands": (
        "--augment.flip 0",
        "--augment.flip: unknown flag of this command, it belongs to idmm finetune, idmm "
        "detect, idmm segment",
    ),
    "stray word": (
        ". runs/a",
        "runs/a: unexpected argument. Values follow their --flag.",
    ),
    "an unset variable": (
        "--init ''",
        "init: empty value (unset shell variable?), expected null for none",
    ),
    "a long name": (
        f"--data.root {300 * 'a'} --out /nowhere/run",
        f"data.root: '{300 * 'a'}' does not exist, expected a folder of images",
    ),
    "missing file": ("--config", "--config: expected a FILE"),
    "not finite": (
        "--train.lr nan",
        "train.lr: got 'nan', expected a finite number",
    ),
    "a negative number": (
        "--train.lr -1e-3",
        "train.lr: got -0.001, expected greater than 0",
    ),
    "no such choice": (
        "--resume maybe",
        "resume: got 'maybe', expected 'auto', 'never' or 'must'",
    ),
    "no such method": (
        "--method.name simclr2",
        "method.name: got 'simclr2', expected one of 'idmm', 'simclr', 'supcon', "
        "'mocov2', 'mocov3', 'dino', "
        "'supervised'",
    ),
    "option of another method": (
        "--method.name simclr --method.queue 3",
        "method.queue: got 3, but simclr has no such option. Leave it out.",
    ),
    "not a section": (
        "--data.subset 10",
        "data.subset: got 10, expected a mapping, e.g. '{per_class: 10}'",
    ),
    "another tool's name": (
        "--train.learning_rate 1",
        "--train.learning_rate: unknown flag. Did you mean '--train.lr'?",
    ),
    "a range of one value": (
        "--data.range '[5, 5]'",
        "data.range: got [5, 5], expected auto or [low, high] with low < high",
    ),
    "too short a list": (
        "--data.mean []",
        "data.mean: got [], expected at least 1 item",
    ),
    "flag that is no YAML": (
        "--model.kwargs {a",
        "model.kwargs: got '{a', which is not YAML (expected ',' or '}', but got "
        "'<stream end>', line 1)",
    ),
}
FILES = {
    "wrong range": (
        "views: {crops: [{scale: [0.5, 0.1]}]}",
        "views.crops[0].scale: got [0.5, 0.1], expected [min, max] with 0 < min <= max <= 1",
    ),
    "flow left open": (
        "train:\n  lr: [1\nseed: 2\n",
        "--config: '{path}' is not YAML: expected ',' or ']', but got ':', line 3",
    ),
    "given twice": (
        "train:\n  lr: 1\n  lr: 2\n",
        "--config: '{path}' is not YAML: 'lr' is given twice, line 3",
    ),
    "an alias bomb": (
        "a: &a [x]\n"
        + "".join(f"{b}: &{b} [{', '.join(9 * [f'*{a}'])}]\n" for a, b in pairwise("abcdefghij")),
        "--config: '{path}' is not YAML: it has more than 20 aliases",
    ),
    "an alias of itself": (
        "train: &a {ema: *a}",
        "--config: '{path}' is not YAML: Circular reference detected",
    ),
    "a deep nest": (
        f'{{"train": {"[" * 9000}{"]" * 9000}}}',
        "--config: '{path}' is not YAML: it is nested too deeply",
    ),
    "escape sequences": ('"\\e[31mx": 1', "\\x1b[31mx: unknown key"),
    "a list": (
        "- 1",
        "--config: '{path}' holds a list, expected a mapping of keys",
    ),
    "not UTF-8": (
        b"name: \xff\xfe",
        "--config: cannot read '{path}' (not UTF-8 text), expected a YAML file",
    ),
    "a folder": (
        None,
        "--config: cannot read '{path}' (Is a directory), expected a YAML file",
    ),
}


@pytest.mark.parametrize(("flags", "line"), FAULTS.values(), ids=FAULTS)
def test_one_fault(flags, line, capsys):
    assert refused(capsys, f"pretrain {flags}") == [line]


@pytest.mark.parametrize(("text", "line"), FILES.values(), ids=FILES)
def test_one_fault_in_a_file(text, line, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    if text is None:
        path.mkdir()
    elif isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text)
    assert refused(capsys, f"pretrain --config {path}") == [line.replace("{path}", str(path))]


def test_all_faults_at_once(tmp_path, capsys):
    """Of the files, the flags and the values, a line each, together, and no run begins."""
    path = written(tmp_path, "train: {epoch: 3, lr: fast}\nviews: {crops: [{cont: 1}]}\n")
    out = tmp_path / "run"
    argv = f"pretrain --out {out} --config {path} --config none.yaml --sed 3"
    wrong = "--train.batch_size 0 --method.classifier cosin --train.warmup_epochs"
    lines = refused(capsys, f"{argv} {wrong}")
    assert sorted(lines) == sorted(
        [
            "--config: cannot read 'none.yaml' (No such file or directory), expected a YAML file",
            "--sed: unknown flag. Did you mean '--seed'?",
            "--train.warmup_epochs: expected a value (FLOAT)",
            "train.batch_size: got 0, expected greater than or equal to 1",
            "train.epoch: unknown key. Did you mean 'train.epochs'?",
            "train.lr: got 'fast', expected a number",
            "method.classifier: got 'cosin', expected 'linear' or 'cosine'",
            "views.crops[0].cont: unknown key. Did you mean 'views.crops[0].count'?",
        ]
    )
    assert not out.exists()


def test_commands(capsys):
    (line,) = refused(capsys, "pretran")
    assert line.startswith("pretran: unknown command, expected one of train, pretrain, finetune, ")
    assert line.endswith(", demo. Did you mean 'pretrain'?")
    call_ok([])
    assert capsys.readouterr().out.startswith("usage: idmm COMMAND")
    call_ok("--help")
    assert "finetune" in capsys.readouterr().out
    for word in ("version", "--version"):
        call_ok(word)
        assert capsys.readouterr().out == "idmm 0.1.0\n"


def test_init_contradicts(whole, tmp_path, capsys):
    """The model is the checkpoint's; every field that says otherwise is told, and nothing is
    trained."""
    init = whole["pretrain"]
    out = tmp_path / "run"
    model = dict(model__name="resnet50", model__kwargs={"embed_dim": 64, "depth": 2})
    source = f"'{init}/backbone.safetensors'"
    end = "Leave it out or make it agree"
    assert refused(capsys, ["finetune", *flags("finetune", out, init=init, **model)]) == [
        f"model.name: 'resnet50', but {source} is vit_tiny_patch16_224. {end}",
        f"model.kwargs: embed_dim is 64, but {source} has 32. {end}",
    ]
    assert not (out / "last/state.pt").exists()


def test_every_size_is_tried_before_the_first_step(tmp_path, capsys, monkeypatch):
    """A size or grid of a later stage that the model cannot take does not cost the stage before
    it."""
    monkeypatch.setattr("idmm.training.run.Run.store", None)  # nor is anything decoded
    tail = "vit_tiny_patch16_224 does not accept it: expected a multiple of its patch, 8x8 pixels"
    stages = [{"size": 16}, {"size": 20}, {"size": 8}, {"size": 9}]
    assert inside("finetune", tmp_path / "a", stages=stages, drloc__weight=0.1) == 2
    second, third, fourth = capsys.readouterr().err.splitlines()[-3:]
    assert second == f"stages[1].size: image size 20x20: {tail}"
    assert fourth == f"stages[3].size: image size 9x9: {tail}"
    assert third.startswith("drloc.weight: at 8 px the final grid is 1x1")
    for stage, size in (
        ("finetune", "train.size"),
        ("pretrain", "views.size"),
    ):
        changes = {"stages": None, size: 20}
        assert inside(stage, tmp_path / stage, **changes) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line == f"{size}: image size 20x20: {tail}"
    monkeypatch.undo()
    stages = [{"size": 16}, {"size": 24}]
    inside_ok("finetune", tmp_path / "a", stages=stages, train__epochs=1)


def test_yaml_as_people_expect_it(tmp_path):
    text = "data: {cache: off}\nmethod:\nmodel: {name: no}\n"
    text += "views: {crops: [&one {count: 1}, {<<: *one}]}\n"
    path = written(
        tmp_path,
        text + "train: {ema: .5, weight_decay: 1e-3, epochs: 010}\nout: ~/run\n",
    )
    config = parsed(
        "--config",
        path,
        "--train.lr",
        "1e-3",
        "--train.compile",
        "--data.root",
        "1e3",
        "--train.clip_grad",
        "null",
        "--views.jitter=[0,0,0,0]",
        "--model.kwargs",
        "{embed_dim: 96, act: off}",
        "--data.subset.fraction",
        ".5",
    )
    data = config.data
    train = config.train
    assert (data.cache, data.root, data.subset.fraction) == (
        "off",
        "1e3",
        0.5,
    )
    assert (train.lr, train.ema, train.weight_decay, train.epochs) == (
        1e-3,
        0.5,
        1e-3,
        10,
    )
    assert (train.compile, train.clip_grad) == (True, None)
    assert config.views.jitter == [0, 0, 0, 0]
    assert config.model.name == "no"
    assert config.model.kwargs == {"embed_dim": 96, "act": "off"}
    assert [crop.count for crop in config.views.crops] == [1, 1]
    (tmp_path / "again.yaml").write_text(dump(config))
    assert parsed("--config", tmp_path / "again.yaml") == config, "1e3 is quoted"
    assert config.out == os.path.expanduser("~/run")


WORDS = {
    "all that are left": (
        ["similar", "q", "x", "--init", "a", "y"],
        {"query": "q", "paths": ["x", "y"]},
    ),
    "behind a switch": (
        ["train", "--out", "o", "--compare", "true.png"],
        {"compare": True},
    ),
    "in YAML's letters": (
        ["predict", "--init", "a", "null", "[x]"],
        {"paths": ["null", "[x]"]},
    ),
    "behind the flags": (
        ["data", "check", "--out", "3", "digits"],
        {"name": "digits", "out": "3"},
    ),
}


@pytest.mark.parametrize("argv, expected", WORDS.values(), ids=WORDS)
def test_words_without_a_flag(argv, expected, capsys):
    with pytest.raises(SystemExit):
        call([*argv, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert {key: config[key] for key in expected} == expected


def test_flags_over_files_over_earlier_files(tmp_path):
    first = written(
        tmp_path,
        "seed: 1\ntrain: {lr: 0.1, epochs: 5}\nmodel: {kwargs: {a: 1, b: 2}}\n",
        "first.yaml",
    )
    second = written(
        tmp_path,
        "train: {lr: 0.2, batch_size: 8}\nmodel: {kwargs: {c: 3}}\n",
        "second.yaml",
    )
    files = ["--config", first, "--config", second]
    config = parsed("--train.batch_size", "16", *files, "--seed", "9")
    train = config.train
    assert (config.seed, train.lr, train.epochs, train.batch_size) == (
        9,
        0.2,
        5,
        16,
    )
    assert config.model.kwargs == {"c": 3}, "a model's arguments are replaced as one"
    assert parsed("--config", second, "--config", first).train.lr == 0.1


@BOTH
def test_print_config_feeds_itself(stage, tmp_path, capsys):
    changes = dict(train__lr=1e-5, data__mean=[0.5, 0.5, 0.5], data__root="off")
    argv = flags(stage, tmp_path / "run", **changes)
    with pytest.raises(SystemExit):
        parsed(*argv, "--print_config", kind=KINDS[stage])
    text = capsys.readouterr().out
    again = parsed("--config", written(tmp_path, text), kind=KINDS[stage])
    assert again == parsed(*argv, kind=KINDS[stage])
    assert dump(again) == text
    assert again.train.lr == 1e-5
    assert again.data.root == "off"
    assert not (tmp_path / "run").exists()


@BOTH
def test_help_names_the_flags_of_the_contract(stage, capsys):
    with pytest.raises(SystemExit):
        parsed("--help", kind=KINDS[stage])
    words = capsys.readouterr().out.split()
    assert not {f"--{name}" for name in COMMON + CONTRACT[stage]} - {*words}


@pytest.mark.parametrize("kind", [command.config for command in COMMANDS.values()], ids=COMMANDS)
def test_every_help_text_is_short_and_names_a_default(kind, capsys):
    """What it is, unit, default: 160 characters, no semicolon. --help prints all, --print_config
    needs no flag."""
    for key in flags_of(kind):
        assert 0 < len(key.help) <= 160 and ";" not in key.text, key
        assert key.default or key.required or re.search("Default: |Required", key.help), key
    for word in ("--help", "--print_config"):
        with pytest.raises(SystemExit):
            parsed(word, kind=kind)
    text = "".join(capsys.readouterr().out.split())  # lines are wrapped anywhere
    for key in flags_of(kind):
        assert "".join(key.text.split()) in text.partition(f"--{key.key}")[2]


@pytest.mark.parametrize(
    ("words", "flag"),
    {
        "pretrain": "--method.classifier_lr_scale",
        "transfer": "--ray.address",
        "fewlabel": "--per_class",
        "data check": "--exclude",
    }.items(),
)
def test_help_is_quick_and_imports_no_torch(words, flag):
    call = f"main({[*words.split(), '--help']})"
    code = f"import sys; from idmm.cli import main\ntry: {call}\nexcept SystemExit: pass\n"
    heavy = {
        "torch",
        "timm",
        "torchvision",
        "accelerate",
        "numpy",
        "matplotlib",
        "sklearn",
    }
    begun = time.perf_counter()
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}sys.exit(', '.join(sys.modules.keys() & {heavy}) or 0)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert flag in done.stdout
    assert time.perf_counter() - begun < 5  # a second, on a machine that does nothing else


def nested(stage, out):
    """A tiny run's config as a mapping."""
    config = {"out": str(out)}
    for key, value in STAGES[stage].items():
        *sections, name = key.split(".")
        inner = config
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return config


@BOTH
def test_python_interface(stage, whole, tmp_path):
    """A mapping, a file and a config object name the same run as the flags do."""
    config = nested(stage, whole[stage])
    run = getattr(idmm, stage)
    result = read(whole[stage] / "result.json")
    assert run(config) == result
    assert run(str(written(tmp_path, yaml.safe_dump(config)))) == result
    assert run(build(KINDS[stage], config)) == result


def test_python_interface_reports_all_faults():
    config = {"train": {"epoch": 3, "lr": -1}, "out": "runs/none"}
    assert sorted(faults(idmm.pretrain, config)) == [
        "train.epoch: unknown key. Did you mean 'train.epochs'?",
        "train.lr: got -1, expected greater than 0",
    ]
    assert faults(idmm.finetune, {})[0].startswith("out: missing")


def test_asked_to_stop_before_a_run_listens(monkeypatch, capsys):
    odd = os.fsdecode(b"caf\xe9.png")  # no UTF-8, which a strict stream refuses
    monkeypatch.setattr(
        "idmm.cli._run",
        lambda *_: (print(odd), os.kill(os.getpid(), signal.SIGTERM)),
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["pretrain"], prog="idmm") == 130
        assert capsys.readouterr() == ("caf\\udce9.png\n", "interrupted\n")
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("code", "exit_code"), [(errno.ENOSPC, 1), (errno.EROFS, 2)])
def test_a_disk_that_is_full_or_read_only(code, exit_code, monkeypatch, capsys):
    def fail(*_):
        raise OSError(code, os.strerror(code), "place")

    monkeypatch.setattr("idmm.cli._run", fail)
    (line,) = refused(capsys, "pretrain", exit_code)
    assert "place" in line
    assert os.strerror(code).lower() in line


def test_no_temporary_folder(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr("idmm.cli._run", lambda *_: tempfile.gettempdir())
    (line,) = refused(capsys, "pretrain")
    assert line.startswith(
        "environment: no temporary folder can be written. Set TMPDIR to one that can ("
    )


def test_front_door_knows_its_names():
    calls = {
        "train",
        "suggest",
        "pretrain",
        "finetune",
        "detect",
        "segment",
        "probe",
        "transfer",
        "embed",
    }
    calls |= {"load_backbone", "load_classifier"}
    assert set(idmm.__all__) == calls | {"data", "losses", "models"}
    assert all(f"idmm.{name}(" in idmm.__doc__ for name in calls)
    for name in [
        *idmm.__all__,
        *re.findall(r"``idmm\.([\w.]+)``", idmm.__doc__),
    ]:
        assert functools.reduce(getattr, name.split("."), idmm) is not None
    with pytest.raises(AttributeError, match="module 'idmm' has no attribute 'pretrian'"):
        _ = idmm.pretrian
