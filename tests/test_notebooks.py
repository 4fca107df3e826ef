"""What shells and notebooks show: completion, versions, messages without frames, predictions and
results."""

import json
import re
import shutil
import subprocess

import pytest
from folders import paint, tree, tuned
from helpers import call_ok, read
from IPython.core.interactiveshell import InteractiveShell

import idmm


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a classifier, and an image."""
    folder = tmp_path_factory.mktemp("finished")
    classes = {"cat": 3, "<b>dog": 3}
    assert tuned(folder / "run", tree(folder / "images", train=classes, test=classes)) == 0
    paint(folder / "photo.png", 1)
    return folder


@pytest.mark.parametrize(
    "words, completed",
    [
        (["da"], ["data"]),
        (["data", "li"], ["list"]),
        (["transfer", "st"], ["status"]),
        (["finetune", "--train.ep"], ["--train.epochs"]),
        (["transfer", "--eng"], ["--engine"]),
        (["report", "fi"], ["file"]),
        (["predict", "--init", "fi"], ["file"]),
    ],
)
def test_bash_completes(words, completed, tmp_path, capsys):
    call_ok("completion bash")
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "file").touch()
    line = (
        'source ./script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_idmm; echo '
        '"${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", line, "bash", "idmm", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == completed, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_all_flags(shell, capsys):
    call_ok(f"completion {shell}")
    script = capsys.readouterr().out
    assert "method.classifier_lr_scale" in script
    assert "Train a classifier on a folder of images" in script
    if shutil.which(shell):
        subprocess.run(
            [shell, "-n", "/dev/stdin"],
            input=script,
            text=True,
            check=True,
        )


def test_a_notebook_shows_only_the_message(capsys):
    shell = InteractiveShell.instance()
    shell.run_cell('import idmm; idmm.train({"minute": 1})')
    output = capsys.readouterr()
    assert output.out.startswith("minute: unknown key. Did you mean 'minutes'?"), output
    assert "idmm/" not in output.out
    assert ".py" not in output.out


def test_predictions_and_results_as_tables(run):
    classifier = idmm.load_classifier(run / "run")
    photo = str(run / "photo.png")
    one = classifier.predict(photo, 2)
    several = classifier.predict([photo] * 30)
    assert "&lt;b&gt;dog" in one._repr_html_()
    assert one._repr_html_().count(photo) == 2
    assert "30 in all" in several._repr_html_()
    assert several._repr_html_().count(photo) == 20
    result = idmm.finetune(str(run / "run/config.yaml"))
    assert json.loads(json.dumps(result)) == result == read(run / "run/result.json")
    assert re.search(rf"top1 +{result['top1']}", result._repr_html_())
