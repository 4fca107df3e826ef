"""``environment.json``: the machine of a run, its libraries, its command and its times.

Reading the file needs no torch.
"""

import json
import platform
import re
import shlex
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from idmm.files import write_json
from idmm.progress import drawing

FILE = "environment.json"
PACKAGES = ("idmm", "torch", "torchvision", "timm", "accelerate", "numpy", "pillow")


def now() -> str:
    """Return the time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def describe(device: str) -> dict[str, Any]:
    """Return the environment of a run on ``device`` (auto, cpu, cuda or mps).

    ``command``, ``python``, ``platform``, ``cpu`` (its model), ``cores`` (that this process may use), ``threads`` (that
    torch computes on), ``memory`` (bytes), ``gpus`` (names of those it can use; none on a CPU), ``processes`` and the
    ``versions`` of packages.
    """
    import torch

    from idmm import distributed
    from idmm.data.parallel import cores

    on_gpu = device in ("auto", "cuda") and torch.cuda.is_available()  # else their library is not woken
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if on_gpu else [],
        "processes": distributed.world(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def started(folder: Path, device: str, when: str) -> None:
    """Write the environment of a start at ``when``. A resumed run keeps the time of its first start."""
    first = read(folder).get("started", when)
    with drawing(FILE, "written"):
        write_json(folder / FILE, {"started": first, **describe(device)})


def read(folder: Path) -> dict[str, Any]:
    """Return what the file holds; an empty dict if there is none."""
    with suppress(OSError, ValueError):
        content = json.loads((Path(folder) / FILE).read_text())
        return content if isinstance(content, dict) else {}
    return {}


def processor() -> str:
    """Return the processor's model as the system calls it."""
    with suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.machine()
