"""README and docs: every command, flag, grid and block of Python. `make lint` checks the rest."""

import functools
import importlib
import re
import shlex
import sys

import pytest
from helpers import ROOT, call

from idmm.grid.config import TRAINING

sys.path.append(str(ROOT / ".ci"))
from lint_docs import FENCED, OURS, PAGES, commands_of, prose_of  # noqa: E402

PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
# the grid that docs/compare.md asks to save
(GRID,) = re.findall(
    r"(?s)`grid.yaml`:\n+```yaml\n(.*?)```",
    (ROOT / "docs/compare.md").read_text(),
)
COMMANDS = {}  # words by page and line
for page in PAGES:
    for line in commands_of(page):
        if match := OURS.match(line):
            words = [
                match[1] or match[2],
                *shlex.split(match[3] or "", comments=True),
            ]
            COMMANDS[f"{page.name} {' '.join(words)}"] = words


@pytest.mark.parametrize("words", COMMANDS.values(), ids=[name[:90] for name in COMMANDS])
def test_command_parses(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRID)
    argv = [grid if word == "grid.yaml" else word for word in words]
    if {"drloc/scratch_100", "drloc/finetune"} & {*argv} and "--data.root" not in argv:
        argv += ["--data.root", "DIR"]
    trains = argv[0] in ("pretrain", "finetune", "train", "transfer")
    if trains and not {"--out", "status"} & {*argv}:
        argv += ["--out", "OUT"]
    with pytest.raises(SystemExit, match="0"):
        assert call([*argv, "--print_config"]) == 0, capsys.readouterr().err


@PAGE
def test_python_blocks(page):
    """Python blocks compile, and the attributes of idmm and timm in them exist."""
    text = page.read_text()
    blocks = [block for language, block in FENCED.findall(text) if language == "python"]
    for block in [*blocks, *re.findall(r'python -c "(.*)"', text)]:
        if not re.match(r"# \S+, after ", block):  # a part of a statement, for test_extending.py
            compile(block, page.name, "exec")
        for name in re.findall(r"\b(?:idmm|timm)\.[\w.]+\w(?=\()", block):
            module, *names = name.split(".")
            functools.reduce(getattr, names, importlib.import_module(module))


def test_flags_in_the_text_exist(capsys):
    commands = "pretrain finetune transfer probe fewlabel demo detect segment train predict embed"
    commands += " similar explore report export data_check data_download"
    for command in commands.split():
        with pytest.raises(SystemExit):
            call([*command.split("_"), "--help"])
    flags = set(re.findall(r"--([\w.]+)", capsys.readouterr().out))
    for page in PAGES:
        for flag in re.findall(r"`--([\w.]+\w)(?![\w.*])", prose_of(page)):
            assert flag in flags or flag.partition(".")[0] in (
                *TRAINING,
                "nodes",
            ), (page, flag)
