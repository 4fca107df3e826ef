"""Where a grid stands: cells done and failed, jobs under way."""

import json
from pathlib import Path

from idmm.errors import UserError


def line(out: Path) -> str:
    """Returns one line: cells done and failed, of the grid that was started last in a folder."""
    failed = {str(Path(record["log"]).parent) for record in _failures(out)}
    cells = json.loads((out / "cells.json").read_text())  # of each the folders of its job and of its pretraining
    left = [folders for folders in cells if not (out / folders[0] / "result.json").exists()]
    lost = sum(not failed.isdisjoint(folders) for folders in left)
    return f"grid: {len(cells) - len(left)} of {len(cells)} cells" + (f", {lost} failed" if lost else "")


def _failures(out: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("jobs/*.failed.json"))]


def status(out: str) -> str:
    """Returns what ``idmm transfer status`` prints; raises UserError if the folder holds no grid."""
    folder = Path(out)
    if not (folder / "cells.json").exists():
        raise UserError(f"{out}: there is no grid in it; expected the folder of a transfer run")
    lines = [line(folder)]
    for path in sorted(folder.glob("jobs/*.started")):
        run = next(folder.glob(f"runs/*/*-{path.stem}"), path).name
        lines.append(f"  under way, or killed: {run}, start {path.read_text()}")
    for record in _failures(folder):
        lines.append(f"  failed: {record['title']}: {record['error']} ({folder / record['log']})")
    report = folder / "grid.md"
    return "\n".join([*lines, *([f"  results so far: {report}"] if report.exists() else [])])
