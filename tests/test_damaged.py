"""Damaged files of a run, and models that load or lack something: one sentence, exit code 2,
nothing is lost."""

import json
import resource
import shutil
import sys

import pytest
import timm
import torch
from folders import tree, tuned, tuned_ok
from helpers import inside, metrics, read, refused, same
from timm.models import register_model

from idmm.data.loaders import worker_count
from idmm.files import read_metrics

REWRITE = "Delete it and repeat the command of its run, which writes it again"
SPOILED = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "list": lambda text: "[1]",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run and its images; nothing may be written to it."""
    folder = tmp_path_factory.mktemp("damaged")
    root = tree(folder / "d", train={"a": 4, "b": 4}, test={"a": 2, "b": 2})
    tuned_ok(folder / "run", root, train__epochs=2)
    return folder / "run", root


@pytest.mark.parametrize("kind", SPOILED)
def test_a_damaged_file_is_named_with_the_remedy(finished, kind, tmp_path, capsys):
    whole, root = finished
    for name, command, remedy in [
        ("result.json", "report", REWRITE),
        ("result.json", "export", REWRITE),
        ("result.json", "again", REWRITE),
        ("model.json", "predict", "Fetch the file again"),
        ("last/images.json", "resume", "Delete it to go on without it"),
        ("last/start.json", "resume", "Delete it to go on without it"),
        ("last/state.pt", "resume", "Delete it to start over"),
    ]:
        run = shutil.copytree(whole, tmp_path / "run")
        file = run / name
        file.write_text(SPOILED[kind]('{"a": 1}'))
        argv = {
            "report": f"report {run}",
            "export": f"export --init {run} --format timm --out {tmp_path}/out",
            "predict": f"predict --init {run} {root}/test",
        }
        capsys.readouterr()
        if command in argv:
            (line,) = refused(capsys, argv[command])
        else:
            if command == "resume":
                (run / "result.json").unlink()
            assert tuned(run, root, train__epochs=2) == 2
            line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"{file}: is damaged (")
        assert remedy in line
        assert not (tmp_path / "out").exists()
        shutil.rmtree(run)


def test_a_torn_last_line_of_metrics_does_not_end_a_resume(finished, tmp_path, capsys):
    whole, root = finished
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "result.json").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')
    tuned_ok(run, root, train__epochs=2)
    assert "metrics.jsonl: the last line is cut and left out" in capsys.readouterr().err
    assert same(run, whole)
    assert metrics(run) == metrics(whole)
    file = run / "metrics.jsonl"
    file.write_text("{\n" + file.read_text())
    (run / "result.json").unlink()
    assert tuned(run, root, train__epochs=2) == 2
    assert f"{file}: is damaged (" in capsys.readouterr().err
    assert read_metrics(tmp_path / "none") == []


@pytest.mark.parametrize("where", ["itself", "inside"])
def test_a_model_that_loads_weights_by_itself_is_refused(finished, where, tmp_path, capsys):
    run = shutil.copytree(finished[0], tmp_path / "run")
    info = read(run / "model.json")
    loads = {"pretrained": True}
    info["kwargs"] |= loads
    if where == "inside":
        network = {"name": "resnet10t", "kwargs": loads, "sizes": [32]}
        info |= {
            "name": "hog_conv",
            "kwargs": {"num_classes": 2, "frozen": network},
        }
    (run / "model.json").write_text(json.dumps(info))
    (line,) = refused(capsys, ["predict", "--init", run, finished[1] / "test"])
    assert line.endswith(" has pretrained, but weights come from --init. Leave it out")


def test_a_model_without_timms_interface_is_refused(tmp_path, capsys):
    class Bare(torch.nn.Module):
        num_features = 4

        def __init__(self, num_classes=0, **kwargs):
            super().__init__()

        def forward(self, x):
            return x.mean((2, 3))

    @register_model
    def bare_model(pretrained=False, **kwargs):
        return Bare()

    bare_model.__module__ = sys.modules[__name__].__name__
    assert (
        inside(
            "finetune",
            tmp_path / "run",
            model__name="bare_model",
            model__kwargs=None,
        )
        == 2
    )
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(
        "model.name: 'bare_model' has no method forward_features, forward_head, "
    )
    assert not (tmp_path / "run").exists()
    assert timm.is_model("bare_model")


def test_fewer_workers_if_few_files_may_be_open():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        workers, why = worker_count(8, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert workers == 2
    assert "192 open files (100 by 'ulimit -n'): 2 used instead" in why


BOOLS = {
    "train.knn_every": "true",
    "data.mean[1]": "[0.5, true, 0.5]",
    "data.subset.total": "{total: true}",
    "views.crops[0].scale[0]": "[{count: 1, scale: [true, 1.0]}]",
}


@pytest.mark.parametrize("key", BOOLS)
def test_true_is_no_number(key, capsys):
    flag = key.partition("[")[0].removesuffix(".total")
    (line,) = refused(capsys, ["pretrain", "--out", "x", f"--{flag}", BOOLS[key]])
    kind = "a number" if key.endswith("]") else "an integer"
    assert line == f"{key}: got True, expected {kind}"
