"""Shared by the benchmarks: measurements in turns, ratios within a round, device and versions,
tables, JSON."""

import itertools
import json
import re
import statistics
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


def write(path: Path | None, **found: object) -> None:
    """Write the values as JSON, unless there is no path."""
    if path is not None:
        found.pop("out", None)
        path.write_text(json.dumps(found, indent=1, default=str) + "\n")
