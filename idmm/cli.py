"""The command line: ``idmm COMMAND``, and the three scripts, which are one subcommand each."""

import contextlib
import errno
import importlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psutil

from idmm.config import DenseConfig, DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig, usage
from idmm.config import commands as keys
from idmm.config.parsing import parse
from idmm.errors import Interrupted, RunError, UserError, nearest, reason
from idmm.files import emptied_if_refused, weights_file
from idmm.progress import KeptLog, first_process, logging_by, said_once
from idmm.training import clock
from idmm.transfer.config import GridConfig


@dataclass(frozen=True)
class Command:
    """What people may type after ``idmm``, or after ``idmm data``."""

    config: type
    run: str
    """Module and function, imported when it is called: torch takes seconds, ``--help`` must not. It is given the
    config; a text that it returns is printed, a number is the exit code."""
    help: str
    logged: bool = True  # whether the log is shown from here; training shows its own, once its folder is there
    words: tuple[str, ...] = ()  # keys of _WORDS that may stand without their flags, in this order


@dataclass(frozen=True)
class Group:
    """Commands, and what is shown of them."""

    help: str
    commands: "dict[str, Command | Group]"
    usage: str  # with a place for a line on each command


IMPORTS = 60.0  # seconds that they take at most
_WORDS = {  # what may stand without its flag, as the help calls it
    "name": "NAME", "data.root": "DIR", "run": "RUN", "runs": "RUN [RUN ...]", "query": "QUERY",
    "paths": "PATH [PATH ...]",
}  # fmt: skip
STAGED = PretrainConfig | FinetuneConfig | DenseConfig
DATA = {
    "list": Command(keys.DataListConfig, "data.registry:table", "all datasets with their sizes"),
    "info": Command(
        keys.DataInfoConfig, "data.registry:info", "figures, licence, citation and files of one", words=("name",),
    ),
    "check": Command(
        keys.DataCheckConfig, "stages.check:checkup",
        "look at every image: unreadable, duplicates, leakage; exits 1 if something should be mended",
        words=("name",),
    ),
    "download": Command(
        keys.DataDownloadConfig, "stages.check:download", "fetch one, checked; files that are whole are kept",
        words=("name",),
    ),
}  # fmt: skip
COMMANDS = {
    "train": Command(
        keys.TrainCommand, "stages.train:train",
        "from a folder of images to a classifier in a given time, pretraining where that pays",
        logged=False, words=("data.root",),
    ),
    "pretrain": Command(
        PretrainConfig, "stages.pretrain:pretrain", "stage 1: learn a backbone from images alone", logged=False,
    ),
    "finetune": Command(
        FinetuneConfig, "stages.finetune:finetune",
        "stage 2: train a classifier on labels, from a backbone or from scratch", logged=False,
    ),
    "detect": Command(
        DetectConfig, "dense.detect:detect",
        "stage 2 for boxes: train a detector (COCO format), of masks too where there are any", logged=False,
    ),
    "segment": Command(
        SegmentConfig, "dense.segment:segment",
        "stage 2 for masks: train a semantic segmentation (images and PNG masks, ADE20K)", logged=False,
    ),
    "transfer": Command(
        GridConfig, "transfer.command:grid",
        "stage 3: a grid of sources, methods, backbones and targets; 'transfer status OUT' tells where it stands",
        logged=False,
    ),
    "probe": Command(
        keys.ProbeConfig, "stages.probe_command:probe",
        "how good the frozen features of a run are: kNN and a linear probe, in minutes",
    ),
    "fewlabel": Command(
        keys.FewLabelConfig, "stages.fewlabel:fewlabel",
        "accuracy over the labelled images a class, of several runs, as a table and a picture",
    ),
    "predict": Command(
        usage.PredictConfig, "inference.predict:predict",
        "the classes of images, with probabilities; of detectors boxes, of segmentations masks", words=("paths",),
    ),
    "embed": Command(
        usage.EmbedConfig, "inference.embed:embed", "the features of images", words=("paths",),
    ),
    "similar": Command(
        usage.SimilarConfig, "inference.similar:similar", "the images that are most like one", words=("query", "paths"),
    ),
    "explore": Command(
        usage.ExploreConfig, "inference.explore:explore",
        "which training images are alike: neighbours, clusters, likely duplicates and wrong labels", words=("run",),
    ),
    "report": Command(
        usage.ReportConfig, "inference.report:report", "a page on finished runs, with pictures", words=("runs",),
    ),
    "export": Command(
        usage.ExportConfig, "inference.export:export", "the model for other programs: ONNX, timm, hf",
    ),
    "data": Group(
        "datasets: list them, show, download or check one", DATA,
        """usage: idmm data list
       idmm data info NAME
       idmm data check [NAME] --root DIR [--out DIR]
       idmm data download NAME --root DIR

{commands}

'idmm data COMMAND --help' explains every flag.""",
    ),
    "configs": Command(keys.ConfigsConfig, "config.reading:recipe_list", "the recipes that --config takes by name"),
    "demo": Command(
        keys.DemoConfig, "stages.demo:demo",
        "idmm train on scikit-learn's digits, few of them labelled, against scratch, with pictures", logged=False,
    ),
}  # fmt: skip
IDMM = Group(
    "",
    COMMANDS,
    """usage: idmm COMMAND [--config FILE] [--KEY VALUE ...]

commands:
{commands}

'idmm COMMAND --help' explains every flag; 'idmm --version' tells the version.""",
)


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Runs a subcommand; returns the exit code: 0, 1 (a run failed), 2 (a user's mistake) or 130 (interrupted).

    Args:
        argv: Subcommand and flags; None takes the process's.
        prog: What the user typed, for the help of the scripts.
    """
    own = argv is None or prog is not None  # else this process did other things before
    began = clock.now() - (_age() if own else 0.0)
    argv = sys.argv[1:] if argv is None else argv
    if own:
        os.environ.pop("MPLBACKEND", None)  # a notebook's may not be installed here, and all pictures are files
    if own and "OMP_WAIT_POLICY" not in os.environ:  # torch's idle threads would keep cores that others want
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if own and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, before a run listens itself, too
    try:
        return _run(IDMM, "", argv, began, prog)
    except (UserError, RunError, Interrupted) as error:
        if first_process() or not getattr(error, "shared", True):
            print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:  # 'idmm pretrain --help | head'
        sys.stdout = open(os.devnull, "w")
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(RunError(f"{error.filename or 'a file'}: cannot be written ({reason(error)})"), file=sys.stderr)
            return RunError.exit_code
        if "temporary directory" in str(error):  # of Python's tempfile and of matplotlib
            line = "environment: no temporary folder can be written; set TMPDIR to one that can"
            print(UserError(f"{line} ({reason(error)})"), file=sys.stderr)
            return UserError.exit_code
        if error.errno not in (errno.EACCES, errno.ENAMETOOLONG, errno.EROFS) or error.filename is None:
            raise
        print(UserError(f"'{error.filename}': {reason(error)}; wanted a path that can be used"), file=sys.stderr)
        return UserError.exit_code


def _age() -> float:
    """Returns the seconds since this process began, in which it waited for files of imports, too."""
    age = time.time() - psutil.Process().create_time()
    return age if 0 <= age < IMPORTS else time.process_time()  # sandboxes may not tell


def _run(group: Group, typed: str, argv: list[str], began: float, prog: str | None = None) -> int:
    """Runs a command of a group, called at ``began`` (``clock.now()``); ``typed``: the words before it."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {name:<10} {command.help}" for name, command in group.commands.items()]
        print(group.usage.format(commands="\n".join(lines)))
        return 0
    if name == "--version" and group is IDMM:
        print(f"idmm {version('idmm')}")
        return 0
    if name not in group.commands:
        known = ", ".join(group.commands)
        raise UserError(f"{typed}{name}: unknown command; wanted one of {known}{nearest(name, group.commands)}")
    command = group.commands[name]
    if isinstance(command, Group):
        return _run(command, f"{name} ", rest, began)
    once = contextlib.nullcontext() if command.config is GridConfig else said_once()  # each cell has its own log
    with once, logging_by(logging.StreamHandler(sys.stderr) if command.logged else KeptLog()):
        return _call(command, f"{typed}{name}", rest, began, prog)


def _call(command: Command, typed: str, rest: list[str], began: float, prog: str | None) -> int:
    if command.config is GridConfig and rest and not rest[0].startswith("-"):
        from idmm.transfer.command import status

        print(status(rest))
        return 0
    words = [prog or f"idmm {typed}", *(_WORDS[word] for word in command.words)]
    given = parse(command.config, rest, " ".join(words), command.words, _configs())
    module, function = command.run.split(":")
    _check(given)
    with emptied_if_refused(getattr(given, "out", None)), _counted_from(began, given):
        found = getattr(importlib.import_module(f"idmm.{module}"), function)(given)
    if isinstance(found, str):
        print(found)
    return found if isinstance(found, int) else 0


def _configs() -> dict[str, type]:
    """Returns the config class of each command, to name the one that a flag belongs to."""
    groups = {"idmm": COMMANDS, "idmm data": DATA}
    return {
        f"{typed} {name}": command.config
        for typed, commands in groups.items()
        for name, command in commands.items()
        if isinstance(command, Command)
    }


def _counted_from(began: float, given: Any) -> contextlib.AbstractContextManager:
    """Has the time of a run, where the command is one, counted from the command's beginning."""
    if not isinstance(given, STAGED | keys.TrainCommand):
        return contextlib.nullcontext()
    from idmm.stages import counted_from

    return counted_from(began)


def _check(given: Any) -> None:
    """Finds the mistakes that can be found before torch is imported."""
    if isinstance(given, STAGED):
        from idmm.stages import prepare

        prepare(given)
    elif isinstance(given, keys.FeatureConfig | keys.TrainCommand):
        from idmm.data.registry import check_folder

        check_folder(given.data, given.out)
    if isinstance(given, keys.FeatureConfig):
        for init in [given.init] if isinstance(given.init, str) else given.init or ():
            weights_file(init, "init")
