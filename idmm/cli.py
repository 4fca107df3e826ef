"""The command line: ``idmm COMMAND``, and the three scripts, which are one subcommand each."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig
from idmm.config import commands as keys
from idmm.config.parsing import parse
from idmm.config.reading import recipe_list
from idmm.display import Display, lost, open_closed, output_code
from idmm.errors import Fault, Interrupted, Message, RunError, UserError, reason
from idmm.files import idmm_version
from idmm.grid.config import GridConfig, StatusConfig
from idmm.grid.status import status
from idmm.text import nearest
from idmm.training import clock
from idmm.training.log import first_process, log_once, logging_by, screen, stop_signals

IMPORT_SECONDS = 60.0  # imports take less
Outcome = str | int | dict[str, Any] | None  # a text is printed, a number is the exit code


# ---------------------------------------------------------------------- the commands
# Each imports its module when it runs, so that ``--help`` needs no torch.
def _train(config: keys.TrainCommand, started_at: float) -> Outcome:
    from idmm.auto.train import train

    return train(config, started_at)


def _suggest(config: keys.SuggestConfig) -> None:
    from idmm.inference.suggest import suggest

    suggest(config)


def _pretrain(config: PretrainConfig, started_at: float) -> Outcome:
    from idmm.runs.commands import pretrain

    return pretrain(config, started_at)


def _finetune(config: FinetuneConfig, started_at: float) -> Outcome:
    from idmm.runs.commands import finetune

    return finetune(config, started_at)


def _detect(config: DetectConfig, started_at: float) -> Outcome:
    from idmm.runs.commands import detect

    return detect(config, started_at)


def _segment(config: SegmentConfig, started_at: float) -> Outcome:
    from idmm.runs.commands import segment

    return segment(config, started_at)


def _transfer(config: GridConfig) -> Outcome:
    from idmm.grid.transfer import command

    return command(config)


def _probe(config: keys.ProbeConfig) -> Outcome:
    from idmm.runs.commands import probe

    result = probe(config)
    from idmm.runs.probe import table

    return "\n".join(table(result))


def _fewlabel(config: keys.FewLabelConfig) -> Outcome:
    from idmm.runs.fewlabel import fewlabel

    return fewlabel(config)


def _predict(config: keys.PredictConfig) -> Outcome:
    from idmm.inference.predict import predict

    return predict(config)


def _embed(config: keys.EmbedConfig) -> Outcome:
    from idmm.inference.embed import embed

    return embed(config)


def _similar(config: keys.SimilarConfig) -> None:
    from idmm.inference.similar import similar

    similar(config)


def _explore(config: keys.ExploreConfig) -> Outcome:
    from idmm.inference.explore import explore

    return explore(config)


def _report(config: keys.ReportConfig) -> Outcome:
    from idmm.inference.report import report

    return report(config)


def _export(config: keys.ExportConfig) -> Outcome:
    from idmm.inference.export import export

    return export(config)


def _data_list(config: keys.DataListConfig) -> Outcome:
    from idmm.data.registry import table

    return table(config)


def _data_info(config: keys.DataInfoConfig) -> Outcome:
    from idmm.data.registry import info

    return info(config)


def _data_check(config: keys.DataCheckConfig) -> Outcome:
    from idmm.runs.check import checkup

    return checkup(config)


def _data_download(config: keys.DataDownloadConfig) -> Outcome:
    from idmm.runs.check import download

    return download(config)


def _completion(config: keys.CompletionConfig) -> Outcome:
    from idmm.config.completion import script

    return script(
        config.shell,
        {name: (command.config, bool(command.words)) for name, command in COMMANDS.items()},
    )


def _demo(config: keys.DemoConfig) -> Outcome:
    from idmm.runs.demo import demo

    return demo(config)


@dataclass(frozen=True)
class Command:
    """A command after ``idmm``."""

    config: type
    run: Callable[..., Outcome]  # takes the config
    words: Mapping[str, str] = field(default_factory=dict)
    """Keys that may stand without their flags, in this order, with their names in the help."""
    timed: bool = False  # whether ``run`` also takes the time when the command began

    @property
    def help(self) -> str:
        """The first sentence of the config's docstring."""
        sentence, _, _ = " ".join((self.config.__doc__ or "").split()).partition(". ")
        return sentence.removesuffix(".") + "."


FOLDER = {"data.root": "[DIR]"}
IMAGES = {"paths": "PATH [PATH ...]"}
RUNS = {"runs": "RUN [RUN ...]"}
DATASET = {"name": "NAME"}
COMMANDS = {
    "train": Command(keys.TrainCommand, _train, {"data.root": "DIR"}, timed=True),
    "pretrain": Command(PretrainConfig, _pretrain, FOLDER, timed=True),
    "finetune": Command(FinetuneConfig, _finetune, FOLDER, timed=True),
    "detect": Command(DetectConfig, _detect, FOLDER, timed=True),
    "segment": Command(SegmentConfig, _segment, FOLDER, timed=True),
    "transfer": Command(GridConfig, _transfer),
    "transfer status": Command(StatusConfig, status, {"out": "OUT"}),
    "probe": Command(keys.ProbeConfig, _probe, FOLDER),
    "fewlabel": Command(keys.FewLabelConfig, _fewlabel, FOLDER),
    "suggest": Command(keys.SuggestConfig, _suggest, {"data.root": "DIR"}),
    "predict": Command(keys.PredictConfig, _predict, IMAGES),
    "embed": Command(keys.EmbedConfig, _embed, IMAGES),
    "similar": Command(keys.SimilarConfig, _similar, {"query": "QUERY", **IMAGES}),
    "explore": Command(keys.ExploreConfig, _explore, RUNS),
    "report": Command(keys.ReportConfig, _report, RUNS),
    "export": Command(keys.ExportConfig, _export),
    "data list": Command(keys.DataListConfig, _data_list),
    "data info": Command(keys.DataInfoConfig, _data_info, DATASET),
    "data check": Command(keys.DataCheckConfig, _data_check, {"name": "DIR|NAME"}),
    "data download": Command(keys.DataDownloadConfig, _data_download, DATASET),
    "configs": Command(keys.ConfigsConfig, recipe_list),
    "completion": Command(keys.CompletionConfig, _completion, {"shell": "SHELL"}),
    "demo": Command(keys.DemoConfig, _demo),
}
USAGE = """usage: idmm {group}COMMAND [--config FILE] [--KEY VALUE ...]

commands:
{commands}

'idmm {group}COMMAND --help' explains every flag. 'idmm --version' prints the version."""


# ---------------------------------------------------------------------- how they run
def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run a command; return the exit code: 0, 1 (a run failed), 2 (a user's mistake) or 130
    (interrupted).

    Args:
        argv: Command and flags; None: the process's.
        prog: The script that the user started, for its help.
    """
    is_process = argv is None or prog is not None  # else the caller did other things before
    started_at = clock.now()
    if is_process:
        started_at -= _process_seconds()
        _prepare_process()
    if argv is None:
        argv = sys.argv[1:]
    out = Display(sys.stdout)
    errors = Display(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            return _dispatch(argv or ["--help"], started_at, prog)
    except Message as error:
        if first_process() or not error.shared:
            print(error, file=errors)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=errors)
        return Interrupted.exit_code
    except OSError as error:
        message = _message_of(error)
        print(message, file=errors)
        return message.exit_code
    finally:
        if is_process:
            out.release()
            errors.release()


def _process_seconds() -> float:
    """Return how long this process has run, with its imports."""
    age: float = time.time() - psutil.Process().create_time()
    if 0 <= age < IMPORT_SECONDS:
        return age
    return time.process_time()  # a sandbox may hide the start


def _prepare_process() -> None:
    """Prepare streams, environment and signals, before torch and matplotlib are imported."""
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


def _message_of(error: OSError) -> Message:
    """Return the message for an error of the file system. Raise one that is no user's mistake."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"{error.filename or 'a file'}: cannot be written ({reason(error)})")
    if "temporary directory" in str(error):  # of Python's tempfile and of matplotlib
        return UserError(
            Fault(
                "environment",
                "no temporary folder can be written",
                f"Set TMPDIR to one that can ({reason(error)})",
            )
        )
    if error.errno not in (errno.EACCES, errno.ENAMETOOLONG, errno.EROFS) or error.filename is None:
        raise error
    return UserError(
        Fault(f"'{error.filename}'", f"{reason(error)}, expected a path that can be used")
    )


def _dispatch(argv: list[str], started_at: float, prog: str | None) -> int:
    """Run a command of one or two words, or list the commands."""
    if argv[0] in ("version", "--version"):
        print(f"idmm {idmm_version()}")
        return output_code()
    for count in (2, 1):
        name = " ".join(argv[:count])
        if name in COMMANDS:
            # each cell of a grid has its own log
            once = contextlib.nullcontext() if name == "transfer" else log_once()
            with once, logging_by(screen()):
                return _run(name, argv[count:], started_at, prog)
    return _list_commands(*argv)


def _list_commands(word: str, *others: str) -> int:
    """Print the commands, or those of a group such as ``data``. UserError: an unknown one."""
    group = ""
    if any(name.startswith(f"{word} ") for name in COMMANDS):
        group = f"{word} "
        word = " ".join(others[:1])
    commands = {
        name.removeprefix(group): command
        for name, command in COMMANDS.items()
        if name.startswith(group)
    }
    if word not in ("", "-h", "--help"):
        raise UserError(
            Fault(
                f"{group}{word}",
                f"unknown command, expected one of {', '.join(commands)}",
                nearest(word, [name.split()[0] for name in commands]),
            )
        )
    lines = [f"  {name:<15} {command.help}" for name, command in commands.items()]
    print(USAGE.format(group=group, commands="\n".join(lines)))
    return 0


def _run(name: str, flags: list[str], started_at: float, prog: str | None) -> int:
    """Run a command and return its exit code."""
    command = COMMANDS[name]
    usage = " ".join([prog or f"idmm {name}", *command.words.values()])
    configs = {f"idmm {other}": COMMANDS[other].config for other in COMMANDS}
    config: object = parse(command.config, flags, usage, tuple(command.words), configs)
    # before torch is imported, as the stages do
    if isinstance(config, keys.ProbeConfig | keys.FewLabelConfig | keys.TrainCommand):
        from idmm.data.registry import check_folder

        check_folder(config.data, config.out)
    result = command.run(config, started_at) if command.timed else command.run(config)
    if isinstance(result, str):
        print(result)
    code = result if isinstance(result, int) else 0
    log_file = Path(getattr(config, "out", None) or os.devnull) / "log.txt"
    if command.config is StatusConfig or not log_file.is_file():  # not a run
        return output_code() or code
    if error := lost(sys.stdout) or lost(sys.stderr):
        with contextlib.suppress(OSError), open(log_file, "a") as file:
            print(
                f"lines on standard output or standard error were lost ({reason(error)})", file=file
            )
    return code
