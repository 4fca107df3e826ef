"""What `make types` checks in CONTRIBUTING's blocks and the examples of extensions: their types.

It copies the code to `build/contributing`, puts each block where its first line says, and runs mypy
there. `tests/test_extending.py` trains with the same copy.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build/contributing"
BLOCK = re.compile(r"(?ms)^```(?:python|yaml)\n(.*?)^```$")
PLACE = re.compile(r"# (\S+?)(?:, (before|after|at the end) ?(.*))?\n")
EXAMPLES = ("own_backbone.py", "own_method.py", "train_predict_compare.py")


def copy_with_blocks(folder: Path) -> list[str]:
    """Copy the package to a folder and put CONTRIBUTING's blocks there. Return their files."""
    for name in ("idmm", "configs"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return [put(block, folder) for block in BLOCK.findall(page)]


def put(code: str, folder: Path) -> str:
    """Put a block of the page where its first line says, and return the file."""
    place = PLACE.match(code)
    if not place:
        raise SystemExit(f"CONTRIBUTING.md: expected a comment with the file before {code[:60]!r}")
    file, where, anchor = place.groups()
    block = code.partition("\n")[2]
    path = folder / file
    if where is None:
        path.write_text(block)
    elif where == "at the end":
        path.write_text(f"{path.read_text()}\n\n{block}")
    else:
        lines = path.read_text().splitlines(keepends=True)
        starts = [n for n, line in enumerate(lines) if line.strip().startswith(anchor)]
        if len(starts) != 1:
            raise SystemExit(f"CONTRIBUTING.md: {len(starts)} lines of {file} begin with {anchor}")
        lines.insert(starts[0] + (where == "after"), block)
        path.write_text("".join(lines))
    return file


def main() -> int:
    COPY.mkdir(parents=True, exist_ok=True)
    files = [file for file in copy_with_blocks(COPY) if file.endswith(".py")]
    for name in EXAMPLES:
        shutil.copy(ROOT / "examples" / name, COPY)
    words = [sys.executable, "-m", "mypy", "--config-file", ROOT / "setup.cfg"]
    words += ["--follow-imports", "silent", *dict.fromkeys(files), *EXAMPLES]
    return subprocess.run(words, cwd=COPY).returncode


if __name__ == "__main__":
    sys.exit(main())
