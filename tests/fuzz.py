"""Malformed inputs by the thousand: each costs exit code 0 or 2 and one sentence per fault.

A traceback, a crash, a hang and a half-written output are faults of ours.

``make fuzz`` runs all families. ``python tests/fuzz.py coco:17`` runs one case and prints it,
``coco`` a whole family, ``--count 50`` so many cases of each. ``tests/test_fuzz.py`` runs a few.

A family is a function with :func:`family`. It gets an empty folder and a generator of its own,
writes a malformed input there and returns the :class:`Case`. Everything follows from the family's
name and the number of the case. To add one, write it in a module ``fuzz_NAME.py`` and name that in
:data:`MODULES`. The mutators below are for all families.
"""

import argparse
import collections
import contextlib
import copy
import faulthandler
import importlib
import io
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forks
import numpy as np

MODULES = ["fuzz_dense", "fuzz_lists", "fuzz_runs"]
PATIENCE = 20.0  # seconds until a case counts as stuck
LONGEST = 1000  # characters of a line


@dataclass
class Case:
    """A malformed input and the command that reads it."""

    argv: list[Any]
    absent: list[Path] = field(default_factory=list)  # paths that a refused command must not leave
    # entered around the command
    inside: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


class Done(Exception):
    """Raised to stop a command that has read its input: exit code 0."""


@dataclass(frozen=True)
class Family:
    """Cases of a kind.

    Attributes:
        make: Writes case ``number`` into an empty folder, given a generator.
        count: Cases of ``make fuzz``.
    """

    name: str
    make: Callable[[Path, np.random.Generator], Case]
    count: int


FAMILIES: dict[str, Family] = {}


def family(count):
    """Register a function as the family of its name, with ``count`` cases in a full run."""

    def register(make):
        FAMILIES[make.__name__] = Family(make.__name__, make, count)
        return make

    return register


def load_families():
    """Import all families."""
    for name in MODULES:
        importlib.import_module(name)


# ---------------------------------------------------------------------- mutators
# texts that end lines, leave folders, clear terminals, are no UTF-8 or have meaning elsewhere
TEXTS = [
    "",
    " ",
    "a\nb",
    "a\0b",
    "\x1b[2J",
    "../../x.png",
    "/etc/hostname",
    "C:\\x.png",
    "a\\b.png",
    "\ud800",
    "é" * 300,
    "x" * 70_000,
    "{}",
    "%s %d",
    "null",
    "NaN",
    "-1",
    "1",
    "1.5",
    "true",
    "\u202egnp.x",
    "~",
    "$HOME",
    "<b>&",
]
NUMBERS = [
    0,
    1,
    -1,
    2,
    255,
    256,
    65536,
    2**31,
    2**63,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    -1e30,
    float("nan"),
    float("inf"),
    -float("inf"),
]
OTHERS = [
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    [1, 2, 3],
    {"a": 1},
    [[0, 0, 1, 1, 2, 2]],
]


def pick(rng, values):
    """Return one of several values, or a word of a text."""
    if isinstance(values, str):
        values = values.split()
    return values[int(rng.integers(len(values)))]


def strange(rng):
    """Return a value that hardly any field expects."""
    return pick(rng, pick(rng, [TEXTS, NUMBERS, OTHERS]))


def damaged(content, rng):
    """Return bytes after one to three of these: cut, overwritten, inserted, removed, repeated,
    flipped."""
    for _ in range(int(rng.integers(1, 4))):
        kind = pick(rng, "cut flip overwrite insert remove repeat zero swap")
        length = max(1, len(content))
        start = int(rng.integers(length))
        stop = min(length, start + 1 + int(rng.integers(min(64, length))))
        head = content[:start]
        middle = content[start:stop]
        tail = content[stop:]
        noise = rng.bytes(stop - start)
        content = {
            "cut": head,
            "flip": head + bytes(byte ^ (1 << int(rng.integers(8))) for byte in middle) + tail,
            "overwrite": head + noise + tail,
            "insert": head + noise + middle + tail,
            "remove": head + tail,
            "repeat": head + middle * 3 + tail,
            "zero": head + bytes(len(middle)) + tail,
            "swap": tail + middle + head,
        }[kind]
    return content


def places(value, path=()):
    """Yield the path of each value inside of nested lists and mappings."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield (*path, key)
            yield from places(inner, (*path, key))


def spoil(value, rng):
    """Replace, remove, double or retype one value inside of nested lists and mappings, in place."""
    paths = list(places(value))
    if not paths:
        return
    depth = pick(rng, sorted({len(path) for path in paths}))  # most values are coordinates
    *path, last = pick(rng, [path for path in paths if len(path) == depth])
    holder = value
    for key in path:
        holder = holder[key]
    old = holder[last]
    kind = pick(rng, "strange strange remove double text wrap negative other")
    if kind == "remove":
        del holder[last]
    elif kind == "double" and isinstance(holder, list):
        holder.insert(last, old)
    elif kind == "text":
        holder[last] = str(old)
    elif kind == "wrap":
        holder[last] = [old]
    elif kind == "negative" and isinstance(old, int | float):
        holder[last] = -old
    elif kind == "other":
        other = value
        for key in pick(rng, paths):
            other = other[key]
        holder[last] = copy.deepcopy(other)  # else it may hold itself
    else:
        holder[last] = strange(rng)


def replace(path, content):
    """Write a file in the place of another one, which may be a link."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def strange_place(path, rng):
    """Remove a file or folder, or put something else in its place."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = pick(rng, "gone folder itself empty locked device pipe")
    if kind == "folder":
        path.mkdir()
    elif kind == "itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        path.touch(0 if kind == "locked" else 0o600)


# ---------------------------------------------------------------------- running
@dataclass
class Outcome:
    """What a case led to. ``faults`` is empty if that is right."""

    family: str
    number: int
    argv: list[str] = field(default_factory=list)
    code: int | None = None
    text: str = ""  # standard output and error
    faults: list[str] = field(default_factory=list)

    def __str__(self):
        verdict = ", ".join(self.faults) or "right"
        head = f"{self.family}:{self.number}: {verdict}, exit code {self.code}"
        return f"{head}\n{textwrap.indent(self.text, '    ')}"


def complaints(code, text, case):
    """Return what is wrong with the end of a command."""
    faults = []
    lines = text.split("\n")[:-1]
    if code not in (0, 2):
        faults.append("neither exit code 0 nor 2")
    if "Traceback (" in text:
        faults.append("a traceback")
    if names := re.findall(r"\b[A-Z]\w*(?:Error|Exception|Warning)\b", text):
        faults.append(f"the name of a Python class ({names[0]})")
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text):
        faults.append("control characters")
    if any(len(line) > LONGEST for line in lines):
        faults.append(f"a line of more than {LONGEST} characters")
    if code == 2:
        if not any(len(line.split()) > 3 for line in lines):
            faults.append("no sentence")
        faults += [f"left {path.name} behind" for path in case.absent if path.exists()]
    return faults


def run_case(family, number, folder):
    """Make a case in an empty folder and run it in this process."""
    from idmm.cli import main
    from idmm.data.loaders import one_thread

    rng = np.random.default_rng([zlib.crc32(family.name.encode()), number])
    case = family.make(folder, rng)
    outcome = Outcome(family.name, number, [str(word) for word in case.argv])
    with captured() as printed, one_thread(), case.inside():
        try:
            outcome.code = main(outcome.argv)
        except Done:
            outcome.code = 0
        except SystemExit as error:
            outcome.code = error.code
        except Exception:
            import traceback

            traceback.print_exc()
    outcome.text = printed.getvalue()
    outcome.faults = complaints(outcome.code, outcome.text, case)
    return outcome


@contextlib.contextmanager
def captured():
    """Catch all that this process prints inside the block, also from C, on standard output and
    error."""
    printed = io.StringIO()
    with tempfile.TemporaryFile() as file, contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            number = stream.fileno()
            saved = os.dup(number)
            os.dup2(file.fileno(), number)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, number)
            stack.callback(stream.flush)
        try:
            yield printed
        finally:
            stack.close()
            file.seek(0)
            printed.write(file.read().decode("utf-8", "replace"))


def _work(jobs, pipe, crash, parent):
    """Run cases in this process, and send the number of each one before it and its outcome after
    it."""
    import idmm.cli  # noqa: F401 (before the clock starts)

    with open(crash, "w") as file:
        faulthandler.enable(file)
        for place, (family, number) in enumerate(jobs):
            pipe.send(place)
            folder = Path(parent, "case")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            pipe.send(run_case(family, number, folder))


def run(jobs, patience=PATIENCE):
    """Yield the outcome of each case, in order. A process that crashes or is stuck is replaced by
    another one."""
    with tempfile.TemporaryDirectory(prefix="idmm-fuzz-") as parent:
        crash = os.path.join(parent, "crash")
        while jobs:
            pipe, end = forks.SERVER.Pipe()
            process = forks.SERVER.Process(target=_work, args=(jobs, end, crash, parent))
            process.start()
            end.close()
            place = -1
            fault = None
            try:
                deadline = time.monotonic() + 120.0  # of the start
                while place < len(jobs):
                    if not pipe.poll(max(0.0, deadline - time.monotonic())):
                        fault = f"stuck for {patience:g} s"
                        break
                    message = pipe.recv()
                    if isinstance(message, Outcome):
                        yield message
                        place += place == len(jobs) - 1
                    else:
                        place = message
                    deadline = time.monotonic() + patience
            except EOFError:
                process.join()
                fault = f"the process died with {process.exitcode}: {Path(crash).read_text()}"
            finally:
                process.kill()
                process.join()
            if place < 0:
                raise RuntimeError(f"no process can be started: {fault}")
            if fault is not None:
                family, number = jobs[place]
                yield Outcome(family.name, number, faults=[fault])
            jobs = jobs[place + 1 :]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cases",
        nargs="*",
        help="family, or family:number. Default: all families",
    )
    parser.add_argument(
        "--count",
        type=int,
        help="cases of each family. Default: its own number",
    )
    options = parser.parse_args()
    load_families()
    jobs = []
    for name in options.cases or FAMILIES:
        name, _, number = name.partition(":")
        family = FAMILIES[name]
        numbers = [int(number)] if number else range(options.count or family.count)
        jobs += [(family, number) for number in numbers]
    counts = collections.Counter()
    wrong = 0
    started_at = time.monotonic()
    for outcome in run(jobs):
        counts[f"{outcome.family}: exit code {outcome.code}"] += 1
        wrong += bool(outcome.faults)
        if outcome.faults or len(jobs) == 1:
            print(outcome, flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name}, {count} cases")
    print(f"{wrong} of {len(jobs)} cases are wrong, {time.monotonic() - started_at:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    from fuzz import main  # families import this module by its name

    sys.exit(main())
