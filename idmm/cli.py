"""The command line: ``idmm COMMAND``, and the three scripts, which are one subcommand each."""

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig
from idmm.config import commands as keys
from idmm.config.parsing import parse
from idmm.display import Display, lost, open_closed, output_code
from idmm.errors import Interrupted, Message, RunError, UserError, reason
from idmm.files import idmm_version
from idmm.grid.config import GridConfig, StatusConfig
from idmm.text import nearest
from idmm.training import clock
from idmm.training.log import first_process, log_once, logging_by, screen, stop_signals


@dataclass(frozen=True)
class Command:
    """A command after ``idmm``."""

    config: type
    run: str
    """Module and function, imported when the command runs, so that ``--help`` needs no torch. The
    function takes the config. A text that it returns is printed, a number is the exit code."""
    timed: bool = False  # whether the function takes the time when the command began
    words: Mapping[str, str] = field(default_factory=dict)
    """Keys that may stand without their flags, in this order, with their names in the help."""

    @property
    def help(self) -> str:
        """The first sentence of the config's docstring."""
        return " ".join(self.config.__doc__.split()).partition(". ")[0].removesuffix(".") + "."


IMPORT_SECONDS = 60.0  # imports take less
FOLDER = {"data.root": "[DIR]"}
STAGE = partial(Command, run="runs.resolve:run_stage", words=FOLDER, timed=True)
COMMANDS = {
    "train": Command(keys.TrainCommand, "auto.train:train", words={"data.root": "DIR"}, timed=True),
    "pretrain": STAGE(PretrainConfig),
    "finetune": STAGE(FinetuneConfig),
    "detect": STAGE(DetectConfig),
    "segment": STAGE(SegmentConfig),
    "transfer": Command(GridConfig, "grid.transfer:command"),
    "transfer status": Command(StatusConfig, "grid.status:status", words={"out": "OUT"}),
    "probe": Command(keys.ProbeConfig, "runs.probe:command", words=FOLDER),
    "fewlabel": Command(keys.FewLabelConfig, "runs.fewlabel:fewlabel", words=FOLDER),
    "predict": Command(
        keys.PredictConfig, "inference.predict:predict", words={"paths": "PATH [PATH ...]"}
    ),
    "embed": Command(keys.EmbedConfig, "inference.embed:embed", words={"paths": "PATH [PATH ...]"}),
    "similar": Command(
        keys.SimilarConfig,
        "inference.similar:similar",
        words={"query": "QUERY", "paths": "PATH [PATH ...]"},
    ),
    "explore": Command(
        keys.ExploreConfig, "inference.explore:explore", words={"runs": "RUN [RUN ...]"}
    ),
    "report": Command(
        keys.ReportConfig, "inference.report:report", words={"runs": "RUN [RUN ...]"}
    ),
    "export": Command(keys.ExportConfig, "inference.export:export"),
    "data list": Command(keys.DataListConfig, "data.registry:table"),
    "data info": Command(keys.DataInfoConfig, "data.registry:info", words={"name": "NAME"}),
    "data check": Command(keys.DataCheckConfig, "runs.check:checkup", words={"name": "DIR|NAME"}),
    "data download": Command(
        keys.DataDownloadConfig, "runs.check:download", words={"name": "NAME"}
    ),
    "configs": Command(keys.ConfigsConfig, "config.reading:recipe_list"),
    "completion": Command(keys.CompletionConfig, "cli:completion", words={"shell": "SHELL"}),
    "demo": Command(keys.DemoConfig, "runs.demo:demo"),
}
USAGE = """usage: idmm {group}COMMAND [--config FILE] [--KEY VALUE ...]

commands:
{commands}

'idmm {group}COMMAND --help' explains every flag. 'idmm --version' prints the version."""


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run a command; return the exit code: 0, 1 (a run failed), 2 (a user's mistake) or 130
    (interrupted).

    Args:
        argv: Command and flags; None: the process's.
        prog: The script that the user started, for its help.
    """
    is_process = argv is None or prog is not None  # else the caller did other things before
    started_at = clock.now()
    if is_process:  # it began before its imports
        age = time.time() - psutil.Process().create_time()
        # a sandbox may hide the start
        started_at -= age if 0 <= age < IMPORT_SECONDS else time.process_time()
        open_closed()
        # a notebook's may not be installed here, and all pictures are files
        os.environ.pop("MPLBACKEND", None)
        if "OMP_WAIT_POLICY" not in os.environ:  # idle threads of torch would keep cores busy
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        # huge pages: torch spends less time on fresh memory
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                # as Ctrl-C, until a run handles it
                signal.signal(number, signal.default_int_handler)
    argv = sys.argv[1:] if argv is None else argv
    out = Display(sys.stdout)
    errors = Display(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            return _dispatch(argv or ["--help"], started_at, prog)
    except Message as error:
        if first_process() or not getattr(error, "shared", True):
            print(error, file=errors)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=errors)
        return Interrupted.exit_code
    except OSError as error:
        fault = _fault_of(error)
        print(fault, file=errors)
        return fault.exit_code
    finally:
        if is_process:
            out.release()
            errors.release()


def _fault_of(error: OSError) -> RunError | UserError:
    """Return the message for an error of the file system, or raise one that is no user's mistake
    again."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{error.filename or 'a file'}: cannot be written ({reason(error)})")
    if "temporary directory" in str(error):  # of Python's tempfile and of matplotlib
        return UserError(
            f"environment: no temporary folder can be written. Set TMPDIR to one that can ({reason(error)})"
        )
    if error.errno not in (errno.EACCES, errno.ENAMETOOLONG, errno.EROFS) or error.filename is None:
        raise error
    return UserError(f"'{error.filename}': {reason(error)}, expected a path that can be used")


def _dispatch(argv: list[str], started_at: float, prog: str | None) -> int:
    """Run a command of one or two words, or list the commands."""
    if argv[0] in ("version", "--version"):
        print(f"idmm {idmm_version()}")
        return output_code()
    if name := next((words for words in (" ".join(argv[:2]), argv[0]) if words in COMMANDS), None):
        command = COMMANDS[name]
        # each cell has its own log
        if command.config is GridConfig:
            once = contextlib.nullcontext()
        else:
            once = log_once()
        with once, logging_by(screen()):
            return _run(name, argv[name.count(" ") + 1 :], started_at, prog)
    if any(words.startswith(f"{argv[0]} ") for words in COMMANDS):
        group = f"{argv[0]} "
    else:
        group = ""
    commands = {
        words.removeprefix(group): command
        for words, command in COMMANDS.items()
        if words.startswith(group)
    }
    word = " ".join(argv[1:2]) if group else argv[0]
    if word not in ("", "-h", "--help"):
        hint = nearest(word, [words.split()[0] for words in commands])
        raise UserError(
            f"{group}{word}: unknown command, expected one of {', '.join(commands)}{hint}"
        )
    lines = [f"  {words:<15} {command.help}" for words, command in commands.items()]
    print(USAGE.format(group=group, commands="\n".join(lines)))
    return 0


def completion(config: keys.CompletionConfig) -> str:
    """Return the script of ``config.shell``."""
    from idmm.config.completion import script

    return script(config.shell, COMMANDS)


def _run(name: str, flags: list[str], started_at: float, prog: str | None) -> int:
    command = COMMANDS[name]
    usage = " ".join([prog or f"idmm {name}", *command.words.values()])
    configs = {f"idmm {words}": other.config for words, other in COMMANDS.items()}
    config = parse(command.config, flags, usage, tuple(command.words), configs)
    # before torch is imported, as the stages do
    if isinstance(config, keys.FeatureConfig | keys.TrainCommand):
        from idmm.data.registry import check_folder

        check_folder(config.data, config.out)
    module, function = command.run.split(":")
    run = getattr(importlib.import_module(f"idmm.{module}"), function)
    result = run(config, started_at) if command.timed else run(config)
    if isinstance(result, str):
        print(result)
    code = result if isinstance(result, int) else 0
    out = Path(getattr(config, "out", None) or os.devnull)
    if command.config is StatusConfig or not (out / "log.txt").is_file():  # not a run
        return output_code() or code
    if error := lost(sys.stdout) or lost(sys.stderr):
        with contextlib.suppress(OSError), open(out / "log.txt", "a") as file:
            print(
                f"lines on standard output or standard error were lost ({reason(error)})", file=file
            )
    return code
