"""How much memory a process may still use."""

from pathlib import Path

import psutil


def available_memory() -> int:
    """Returns the memory that can be used without swapping, within the control group's limit (bytes)."""
    return min(psutil.virtual_memory().available, _control_group(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))


def _control_group(membership: Path, mount: Path) -> int:
    """Returns what containers and batch systems leave of their limit (control groups v2), else a number past any."""
    left = 2**62
    try:
        group = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return left
    folder = mount / group.strip("/")
    for place in (folder, *folder.parents):
        if place == mount.parent:
            break
        try:
            limit = int((place / "memory.max").read_text())  # 'max' where there is none
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            used = int((place / "memory.current").read_text()) - int(stat["inactive_file"])  # file cache can go
        except (OSError, ValueError, KeyError):
            continue
        left = min(left, max(0, limit - used))
    return left
