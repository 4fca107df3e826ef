"""README and docs: sizes, words, results, and every command and link."""

import contextlib
import io
import json
import re
import shlex
import statistics

import pytest
from helpers import ROOT, call

from idmm.transfer.config import TRAINING

FENCED = re.compile(r"(?ms)^```(\S*)\n(.*?)^```$")  # language, none for shell commands, and lines
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md"]
OURS = re.compile(r"^(?:python (pretrain|finetune|transfer)\.py|idmm (\w+)) (.*)$")
OTHERS = re.compile(r"(?:python|sbatch|FOLDER=\S+ python) ((?:benchmarks|examples|configs)/\S+)|make ([\w-]+)")


def shell_lines(text):
    """Shell lines of a page's code blocks: continued ones joined, loops over words unrolled."""
    for block in (block for language, block in FENCED.findall(text) if not language):
        words = dict.fromkeys(["_"], [""])
        for line in block.replace("\\\n", " ").splitlines():
            loop = re.match(r"for (\w+) in (.*); do$", line.strip())
            if loop:
                words = {loop[1]: loop[2].split()}
            for name, values in words.items():
                yield from dict.fromkeys(line.strip().replace(f"${name}", value) for value in values)


def commands():
    """Our own commands, in code blocks and in tables, as (page, argv)."""
    for page in PAGES:
        text = page.read_text()
        for line in [*shell_lines(text), *re.findall(r"\| `(idmm \w+ [^`]+)`", text)]:
            match = OURS.match(line)
            if match and ("--" in line or "data" in line):
                yield page.name, [match[1] or match[2], *shlex.split(match[3], comments=True)]


COMMANDS = [
    (page, argv)
    for page, argv in dict.fromkeys((page, tuple(argv)) for page, argv in commands())
    if "status" not in argv and "grid.yaml" not in argv
]


@pytest.mark.parametrize(
    "page, argv", COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value)[:70]
)
def test_command_parses(page, argv, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    argv = [*argv, "--data.root", "DIR"] if {"drloc/scratch_100", "drloc/finetune"} & {*argv} else [*argv]
    needs_out = argv[0] in ("pretrain", "finetune", "train", "transfer") and "--out" not in argv
    with pytest.raises(SystemExit) as ended:
        assert call([*argv, *(["--out", "OUT"] * needs_out), "--print_config"]) == 0, capsys.readouterr().err
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "block", [b for lang, b in FENCED.findall((ROOT / "docs/reproduce.md").read_text()) if lang == "yaml"]
)
def test_grids_parse(block, tmp_path, capsys):
    (tmp_path / "grid.yaml").write_text(block)
    with pytest.raises(SystemExit) as ended:
        call(["transfer", "--config", tmp_path / "grid.yaml", "--out", tmp_path / "o", "--print_config"])
    assert ended.value.code == 0, capsys.readouterr().err


@pytest.fixture(scope="module")
def flags():
    """The flags of all commands, from their help."""
    kinds = "pretrain finetune transfer probe fewlabel demo detect segment train predict embed similar explore report"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for argv in (*map(str.split, kinds.split()), ["export"], ["data", "check"], ["data", "download"]):
            with pytest.raises(SystemExit):
                call([*argv, "--help"])
    return set(re.findall(r"--[\w.]+", printed.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_in_the_text_exist(page, flags):
    """Flags named in a sentence are flags of some command. Links, paths, scripts and targets of make exist."""
    text = FENCED.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:configs|benchmarks|docs|idmm|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists() or re.search("NAME|METHOD", path), path
    for flag in re.findall(r"`--([\w.]+\w)(?![\w.*])", text):
        assert f"--{flag}" in flags or flag.partition(".")[0] in (*TRAINING, "nodes"), flag
    for script, target in (match for line in shell_lines(page.read_text()) for match in OTHERS.findall(line)):
        assert (ROOT / script).exists() if script else f"\n{target}:" in (ROOT / "Makefile").read_text(), (
            script or target
        )


def test_sizes():
    """The budgets: README 1,100 words, 16 pages of at most 2,600 words, 24,000 words in all."""
    words = {page.name: len(page.read_text().split()) for page in DOCS}
    assert words["README.md"] <= 1100 and len(words) - 1 <= 16 and sum(words.values()) <= 24_000, words
    assert max(words.values()) <= 2600, words
    assert len((ROOT / "CHANGELOG.md").read_text().partition("## [0.1.0]")[2].split()) <= 250


def test_plain_words():
    """The rules of CONTRIBUTING that can be counted, per 1,000 words of prose."""
    lines = [line for page in DOCS for line in FENCED.sub("", page.read_text()).splitlines()]
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$", "X", "\n".join(line for line in lines if not line.startswith("#")))
    per_thousand = len(text.split()) / 1000
    for pattern, limit in {
        ";": 1.0,
        r"\bwhere\b": 1.0,
        r"\b(says|said|told|tells|wants|wanted|alone|beside|anew|by heart|goes on)\b": 0.3,
    }.items():
        assert len(re.findall(pattern, text)) <= limit * per_thousand, (pattern, re.findall(f".*{pattern}.*", text)[:5])
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?:|])\s", text)]
    assert sum(len(words) > 25 for words in sentences) <= 0.08 * sum(len(words) > 2 for words in sentences)


SETS = {"digits": "digits", "fashion": "Fashion-MNIST", "photos": "tiles of 16 photos"}


@pytest.mark.parametrize("labels", [5, None])
def test_results_are_those_of_the_runs(labels):
    """docs/train.md has the means and spreads of benchmarks/results/over_time."""
    folder = ROOT / "benchmarks/results/over_time"
    runs = [run for run in json.loads((folder / "results.json").read_text()) if run["minutes"] == 10]
    runs += [{**run, "way": "baseline"} for run in json.loads((folder / "baseline.json").read_text())["runs"]]
    text = (ROOT / "docs/train.md").read_text().replace("*", "")
    for name, label in SETS.items():
        figures = []
        for way in ("baseline", "scratch", "pretrain"):
            key = {"set": name, "labels": labels, "way": way}
            top1 = [run["top1"] for run in runs if key.items() <= run.items()]
            figures.append(f"{statistics.mean(top1):.1f}" + (f" ± {statistics.stdev(top1):.1f}" if top1[1:] else ""))
        assert re.search(rf"\| {label} \|(.*\|)? {' . '.join(figures)} \|", text), (name, figures)


def test_demo_figures():
    """README's table of the demo has the first run and the range of all that were not on an overloaded machine."""
    runs = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["runs"]
    text = (ROOT / "README.md").read_text()
    for key in ("baseline_top1", "scratch_top1", "idmm_top1"):
        values = [value for run in runs if "overloaded" not in run for value in run.get(key, [])]
        mean, spread = statistics.mean(runs[0][key]), statistics.stdev(runs[0][key])
        assert f"| {mean:.1f} ± {spread:.1f} | {min(values):.1f} to {max(values):.1f}" in text, key
    assert f"once {min(runs[-1]['idmm_top1']):.1f} on an overloaded machine" in text
