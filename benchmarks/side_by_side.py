"""Shared by the benchmarks: measurements in turns, ratios within a round, device and versions,
tables, JSON."""

import argparse
import itertools
import json
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield each round's number, from 0, with each name, in rotating order: each is first equally
    often."""
    for number in range(rounds):
        first = number % len(names)
        for name in itertools.chain(names[first:], names[:first]):
            yield number, name


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, the smallest and the largest."""

    median: float
    low: float
    high: float

    def __truediv__(self, number: float) -> "Spread":
        return Spread(self.median / number, self.low / number, self.high / number)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratios(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Return the ratio of the values to the others, round by round."""
    each = [value / other for value, other in zip(values, others, strict=True)]
    return Spread(statistics.median(each), min(each), max(each))


def wait(device: str) -> None:
    """Wait until a device has finished its work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def now(device: str) -> float:
    """Return wall time on a GPU, after its work is done, and this process's processor time on a CPU
    (seconds)."""
    wait(device)
    return time.process_time() if device == "cpu" else time.perf_counter()


def where(
    device: str = "cpu", threads: int | None = None, packages: Sequence[str] = ("torch", "timm")
) -> str:
    """Return device, cores or ``threads`` of the processor, versions and date."""
    import torch

    from idmm.data.parallel import cores

    count = cores() if threads is None else threads
    processor = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[1]
    what = f"{count} {'core' if threads is None else 'thread'}{'s' * (count > 1)} of {processor}"
    gpus = [torch.cuda.get_device_name()] if device == "cuda" else []
    versions = [f"{name} {version(name)}" for name in packages]
    return ", ".join([*gpus, what, *versions, datetime.now(UTC).date().isoformat()])


def commit() -> str:
    """Return the commit of the idmm that is imported."""
    import idmm

    folder = Path(idmm.__file__).parent
    git = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean, with the standard deviation if there are several values, and an empty text
    for none."""
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" if values else ""


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def head(*cells: str) -> str:
    """Return the first two lines of a Markdown table."""
    return f"{row(*cells)}\n{'|---' * len(cells)}|"


def fill_page(page: Path, mark: str, tables: str) -> None:
    """Replace what is between two marks of a page."""
    first, _, rest = page.read_text().partition(mark)
    page.write_text(f"{first}{mark}\n\n{tables.strip()}\n\n{mark}{rest.partition(mark)[2]}")


def runs_parser(text: str | None, results: str) -> argparse.ArgumentParser:
    """Return a parser of the flags of scripts that make runs and write tables of them.

    ``results``: The file or folder of their figures in benchmarks/results.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    file = Path(__file__).parent / "results" / results
    parser.add_argument("--sets", type=Path, default=Path("sets"), help="folder of the sets")
    parser.add_argument("--out", type=Path, default=Path("runs") / file.stem, help="of the runs")
    parser.add_argument("--results", type=Path, default=file, help="JSON")
    parser.add_argument("--table", action="store_true", help="write the tables into the docs")
    return parser


def read_runs(path: Path) -> list[dict]:
    """Return the runs made so far, none if there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def write_runs(path: Path, runs: list[dict]) -> None:
    """Write a JSON list with a line for each run."""
    path.write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")


def write(path: Path | None, **found: object) -> None:
    """Write the values as JSON, unless there is no path."""
    if path is not None:
        found.pop("out", None)
        path.write_text(json.dumps(found, indent=1, default=str) + "\n")
