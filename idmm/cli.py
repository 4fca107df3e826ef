"""The command line: ``idmm COMMAND``, and the three scripts, which are one subcommand each."""

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.commands import (
    DataCacheConfig,
    DataCheckConfig,
    DataDownloadConfig,
    DataInfoConfig,
    DataListConfig,
    DemoConfig,
    FewLabelConfig,
    ProbeCommand,
)
from idmm.config.parsing import parse
from idmm.errors import Interrupted, RunError, UserError, nearest
from idmm.stages import STAGES

USAGE = """usage: idmm COMMAND [--config FILE] [--KEY VALUE ...]

commands:
  pretrain   stage 1: learn a backbone from images alone
  finetune   stage 2: train a classifier on labels, from a backbone or from scratch
  transfer   stage 3: a grid of sources, methods, backbones and targets; 'transfer status OUT' tells where it stands
  probe      how good the frozen features of a run are: kNN and a linear probe, in minutes
  fewlabel   accuracy over the labelled images a class, of several runs, as a table and a picture
  data       datasets: list them, show, download or check one, show and clear the cache
  demo       both on scikit-learn's digits, against training from scratch, with pictures

'idmm COMMAND --help' explains every flag; 'idmm --version' tells the version."""


DATA_USAGE = """usage: idmm data list
       idmm data info NAME
       idmm data check NAME --root DIR [--out DIR]
       idmm data download NAME --root DIR
       idmm data cache [--clear]

  list       all datasets with their sizes
  info       figures, licence, citation and files of one
  check      look at every image: unreadable, tiny, duplicates, leakage; exits 1 if something should be mended
  download   fetch one, checked; goes on where it was interrupted
  cache      the decoded images that are kept on the disk

'idmm data COMMAND --help' explains every flag."""


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Runs a subcommand; returns the exit code: 0, 1 (a run failed), 2 (a user's mistake) or 130 (interrupted).

    Args:
        argv: Subcommand and flags; None takes the process's.
        prog: What the user typed, for the help of the scripts.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv, prog)
    except (UserError, RunError, Interrupted) as error:
        if os.environ.get("RANK", "0") == "0" or not getattr(error, "shared", True):
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:  # 'idmm pretrain --help | head'
        sys.stdout = open(os.devnull, "w")
        return 0


def _run(argv: list[str], prog: str | None) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name == "--version":
        print(f"idmm {version('idmm')}")
        return 0
    if name not in COMMANDS:
        raise UserError(f"{name}: unknown command{nearest(name, COMMANDS)}; wanted one of {', '.join(COMMANDS)}")
    return COMMANDS[name](argv[1:], prog or f"idmm {name}")


def _command(kind: type, run: Callable[[Any], Any], logged: bool = True) -> Callable[[list[str], str], int]:
    """Returns a command: reads flags, calls ``run`` with them, returns its exit code where it gives one, else 0.

    What ``run`` needs it imports when it is called: torch takes seconds, ``--help`` must not.
    """

    def command(argv: list[str], prog: str) -> int:
        given = parse(kind, argv, prog)
        with _log_on_stderr() if logged else contextlib.nullcontext():
            code = run(given)
        return code if type(code) is int else 0

    return command


def _in(name: str) -> Any:
    """A module of ``idmm.commands``."""
    return importlib.import_module(f"idmm.commands.{name}")


def _transfer(argv: list[str], prog: str) -> int:
    if argv[:1] == ["status"]:
        return _transfer_status(argv[1:])
    if argv and not argv[0].startswith("-"):
        raise UserError(f"transfer: got {argv[0]!r}, wanted 'status' or flags{nearest(argv[0], ['status'])}")
    from idmm.transfer.config import parse_grid

    config = parse_grid(argv, prog)
    from idmm.transfer.grid import transfer

    cells = transfer(config)["cells"]
    return 1 if not config.plan and any(cell["status"] == "failed" for cell in cells) else 0


def _transfer_status(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print("usage: idmm transfer status OUT\n\nTells of the grid in OUT: cells done, running, failed, time left.")
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        raise UserError(f"transfer status: got {' '.join(argv) or 'nothing'}, wanted the folder of a grid")
    from idmm.transfer.status import status

    print(status(argv[0]))
    return 0


def _data(argv: list[str], prog: str) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        print(DATA_USAGE)
        return 0
    if name not in DATA_COMMANDS:
        wanted = ", ".join(DATA_COMMANDS)
        raise UserError(f"data {name}: unknown command{nearest(name, DATA_COMMANDS)}; wanted one of {wanted}")
    kind, run = DATA_COMMANDS[name]
    prog = f"{prog} {name}"
    if "name" in kind.__dataclass_fields__:
        prog += " NAME"
        rest = ["--name", *rest] if rest and not rest[0].startswith("-") else rest
    try:
        return _command(kind, run)(rest, prog)
    except UserError as error:
        missing = "NAME: missing; wanted is a dataset, 'idmm data list' shows them"
        raise UserError(*(missing if fault.startswith("name: missing") else fault for fault in error.faults)) from None


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Shows what is logged inside the block."""
    log, shown = logging.getLogger("idmm"), logging.StreamHandler(sys.stderr)
    level = log.level
    log.addHandler(shown)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(shown)
        log.setLevel(level)


DATA_COMMANDS = {
    "list": (DataListConfig, lambda given: print(_in("catalogue").table())),
    "info": (DataInfoConfig, lambda given: print((at := _in("catalogue")).info(at.spec_of(given.name)))),
    "check": (DataCheckConfig, lambda given: int(not _in("datasets").checkup(given).clean)),
    "download": (DataDownloadConfig, lambda given: print(_in("datasets").download(given.name, given.root))),
    "cache": (DataCacheConfig, lambda given: print(_in("datasets").cache(given.dir, given.clear))),
}
COMMANDS = {
    "pretrain": _command(PretrainConfig, STAGES["pretrain"].run, logged=False),  # stages have logs of their own
    "finetune": _command(FinetuneConfig, STAGES["finetune"].run, logged=False),
    "transfer": _transfer,
    "probe": _command(ProbeCommand, lambda given: _in("probe").probe(given)),
    "fewlabel": _command(FewLabelConfig, lambda given: _in("fewlabel").fewlabel(given)),
    "data": _data,
    "demo": _command(DemoConfig, lambda given: _in("demo").demo(given), logged=False),
}
