"""``idmm data``: what there is, what is known of it, what is kept of it; the doctor has a file of its own."""

import subprocess
import sys

import pytest

from idmm.cli import main
from idmm.data.registry import DATASETS


def say(capsys, *argv):
    code = main(["data", *argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_list_names_every_dataset_with_its_figures(capsys):
    code, out, _ = say(capsys, "list")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and set(DATASETS) <= set(lines)
    for spec in DATASETS.values():
        for figure in (spec.num_classes, spec.train_size, spec.test_size):
            assert figure is None or f" {figure:,} " in lines[spec.name]
        assert spec.title in lines[spec.name]


@pytest.mark.parametrize("name", ["flowers", "cars", "domainnet-real", "digits", "folder"])
def test_info_tells_what_is_known(name, capsys):
    spec = DATASETS[name]
    code, out, _ = say(capsys, "info", name)
    text = " ".join(out.split())
    assert code == 0 and spec.title in text and spec.citation in text and spec.licence in text and spec.source in text
    for part in (*spec.layout, *spec.archives):
        assert part in text
    assert " ".join(spec.manual.split()) in text
    assert ("mean_per_class" in text) == (name in ("flowers", "pets", "aircraft"))


def test_list_and_info_need_no_torch():
    code = "import sys; from idmm.cli import main; main(['data', 'list']); main(['data', 'info', 'cars']);"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_mistakes_are_a_line_each_and_exit_2(capsys):
    assert say(capsys, "chekc", "flowers")[0] == 2
    assert say(capsys, "info", "flower")[2].strip().endswith("Did you mean 'flowers'?")
    code, _, err = say(capsys, "check", "flowers", "--rot", "x")
    assert code == 2 and "--rot: unknown flag. Did you mean '--root'?" in err
    assert say(capsys, "check", "flowers")[0] == 2
    assert main(["data"]) == 0 and "idmm data check [NAME] --root DIR" in capsys.readouterr().out
