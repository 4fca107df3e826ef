"""The command line: ``idmm pretrain|finetune|demo``, and the three scripts, which are one subcommand each."""

import os
import sys
from importlib.metadata import version

from idmm.config import DemoConfig, FinetuneConfig, PretrainConfig
from idmm.errors import Interrupted, RunError, UserError, nearest
from idmm.options import parse

USAGE = """usage: idmm COMMAND [--config FILE] [--KEY VALUE ...]

commands:
  pretrain   stage 1: learn a backbone from images alone
  finetune   stage 2: train a classifier on labels, from a backbone or from scratch
  demo       both on scikit-learn's digits, against training from scratch, with pictures

'idmm COMMAND --help' explains every flag; 'idmm --version' tells the version."""


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


def _pretrain(argv: list[str], prog: str) -> int:
    config = parse(PretrainConfig, argv, prog)
    from idmm.stages.pretrain import pretrain  # torch is imported when a stage starts, not for --help

    pretrain(config)
    return 0


def _finetune(argv: list[str], prog: str) -> int:
    config = parse(FinetuneConfig, argv, prog)
    from idmm.stages.finetune import finetune

    finetune(config)
    return 0


def _demo(argv: list[str], prog: str) -> int:
    config = parse(DemoConfig, argv, prog)
    from idmm.analysis.demo import demo

    demo(config.out, config.seeds, config.pretrain, config.finetune)
    return 0


COMMANDS = {"pretrain": _pretrain, "finetune": _finetune, "demo": _demo}
