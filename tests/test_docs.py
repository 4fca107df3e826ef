"""README and docs: every command in them parses against the real flags, and every link leads somewhere."""

import contextlib
import io
import re
import shlex

import pytest
from helpers import ROOT, call

from idmm.transfer.config import TRAINING

FENCED = re.compile(r"(?ms)^```(\S*)\n(.*?)^```$")  # language, none where it is a shell's, and lines
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "EXTENDING.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
OURS = re.compile(r"^(?:python (pretrain|finetune|transfer)\.py|idmm (\w+)) (.*)$")


def lines(text):
    """Shell lines of a page's code blocks: continued ones joined, loops over words unrolled."""
    defaults = re.findall(r"(?m)^(\w+)=\$\{\1:-(\w+)\}$", text)  # 'EPOCHS=${EPOCHS:-20}', of all blocks that follow
    for name, value in defaults:
        text = re.sub(rf"\${name}\b", value, text)
    for block in (block for language, block in FENCED.findall(text) if not language):
        words = dict.fromkeys(["_"], [""])
        for line in block.replace("\\\n", " ").splitlines():
            loop = re.match(r"for (\w+) in (.*); do$", line.strip())
            if loop:
                words = {loop[1]: loop[2].split()}
            for name, values in words.items():
                yield from dict.fromkeys(line.strip().replace(f"${name}", value) for value in values)


def commands():
    """Our own commands as (page, argv)."""
    for page in PAGES:
        for line in lines(page.read_text()):
            found = OURS.match(line)
            if found:
                yield page.name, [found[1] or found[2], *shlex.split(found[3])]


COMMANDS = [(page, argv) for page, argv in commands() if argv[1:2] != ["status"] and "..." not in argv]


@pytest.mark.parametrize("page, argv", COMMANDS, ids=lambda value: " ".join(value)[:70] if value is not str else value)
def test_command_parses(page, argv, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as ended:
        assert call([*argv, "--print_config"]) == 0, capsys.readouterr().err
    assert ended.value.code == 0


@pytest.fixture(scope="module")
def known():
    """The flags of all commands, from their help."""
    kinds = "pretrain finetune transfer probe fewlabel demo detect segment train predict embed similar explore report"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for argv in (*map(str.split, kinds.split()), ["export"], ["data", "check"], ["data", "download"]):
            with pytest.raises(SystemExit):
                call([*argv, "--help"])
    return set(re.findall(r"--[\w.]+", said.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_in_the_text_exist(page, known):
    """Flags named in a sentence are flags of some command; links and paths of the repository lead somewhere."""
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:configs|benchmarks|docs|idmm|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists() or re.search("NAME|METHOD", path), path
    for flag in re.findall(r"`--([\w.]+\w)(?![\w.*])", text):
        assert f"--{flag}" in known or flag.partition(".")[0] in (*TRAINING, "nodes"), flag
