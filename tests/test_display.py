"""Nothing of the display reaches the work: lost terminals, closed pipes, full disks, narrow
encodings, and signals."""

import contextlib
import errno
import io
import logging
import os
import select
import signal
import subprocess
import sys

import forks
import numpy as np
import psutil
import pytest
from folders import paint, tree, tuned_ok
from grids import cell, grid
from helpers import (
    ENVIRONMENT,
    PATIENCE,
    ROOT,
    Forked,
    call,
    flags,
    inside_ok,
    logged,
    real,
    same,
)
from matplotlib.backends.backend_agg import RendererAgg
from PIL import Image
from tqdm.auto import tqdm

import idmm
from idmm.display import Display, show
from idmm.evaluation.confusion import confusion_figure
from idmm.evaluation.evaluate import Predictions
from idmm.figures import curves_figure, save
from idmm.report.charts import accuracy_curves, comparison
from idmm.report.grid_pictures import bars
from idmm.report.sheets import Tile, caption_sheet
from idmm.report.table import Table
from idmm.training.log import logging_to

ONE = {"stages": [{"size": 16}], "data__subset": {"per_class": 4}}
LAST = "largest class"  # of the last line of a run


# --------------------------------------------------------- streams that fail, in a process of a run
def lead(file):
    """Leads standard output and standard error to a file."""
    os.dup2(file, 1), os.dup2(file, 2)


def close_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    lead(writer)


def fill_disk():
    lead(os.open("/dev/full", os.O_WRONLY))


def close_streams():
    """As by ``>&- 2>&-``, and under pythonw."""
    os.close(1), os.close(2)
    sys.stdout = sys.stderr = None


def narrow():
    sys.stderr.reconfigure(encoding="ascii", errors="strict")


def take_terminal():
    """As the foreground job of a shell: the terminal's end reaches it as SIGHUP."""
    os.open(os.ttyname(1), os.O_RDWR)


def ignore_and_take():
    ignore()
    take_terminal()


def ignore():
    """As by nohup."""
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """A run whose output nobody disturbs."""
    out = tmp_path_factory.mktemp("quiet") / "run"
    inside_ok("finetune", out, **ONE)
    return out


def script(out, **changes):
    """The command line of ``python finetune.py``."""
    return [
        ROOT / "finetune.py",
        *flags("finetune", out, **{**ONE, **changes}),
    ]


@pytest.mark.parametrize(
    "lost",
    [close_pipe, fill_disk, close_streams, narrow],
    ids=lambda lost: lost.__name__,
)
def test_a_run_ends_as_ever_whatever_its_streams(lost, quiet, tmp_path):
    out = tmp_path / "é"
    with Forked(script(out), tmp_path / "printed", prepare=lost) as process:
        assert process.wait() == 0
    assert same(out, quiet)
    log = logged(out)
    assert LAST in log
    assert "Traceback" not in log
    lines_were_lost = "lines on standard output or standard error were lost (" in log
    assert lines_were_lost == (lost in (close_pipe, fill_disk))
    if lost is narrow:
        assert f"{tmp_path}/\\xe9: top-1" in process.said()
        assert LAST in process.said()


def test_nothing_else_gets_the_number_of_a_closed_stream(tmp_path):
    """A library that writes to standard error would write into a file of the run."""
    code = "import os; from idmm.cli import main; main(); "
    code += "print(os.readlink('/proc/self/fd/2'), file=open('2', 'w'))"
    words = [
        "sh",
        "-c",
        '"$@" 2>&- >&- <&-',
        "sh",
        sys.executable,
        "-c",
        code,
        "configs",
    ]
    subprocess.run(
        words,
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert (tmp_path / "2").read_text() == "/dev/null\n"


def test_a_full_disk_of_the_log_ends_no_run(quiet, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "log.txt").symlink_to("/dev/full")
    inside_ok("finetune", out, **ONE)
    assert same(out, quiet)
    assert LAST in capsys.readouterr().err


def test_a_log_goes_on_when_the_disk_has_room_again(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "full")

    log = logging.getLogger("idmm")
    with logging_to(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(logging.FileHandler, "flush", full)
            log.info("the first line")
        log.info("the second line")
    assert "the first line" in logged(tmp_path)
    assert "the second line" in logged(tmp_path)


# ------------------------------------------------------------------ a terminal
class Terminal:
    """A command in a pseudo-terminal of its own, which the test may close."""

    def __init__(self, argv, prepare=None):
        self.master, slave = os.openpty()
        name = os.ttyname(slave)
        os.close(slave)
        self.shown = b""
        self.process = forks.start([str(word) for word in argv], name, ENVIRONMENT, prepare)

    def until(self, what):
        """Reads what is shown until ``what()`` holds, or the process has ended."""
        while not what() and self.process.poll() is None:
            if select.select([self.master], [], [], 0.01)[0]:
                try:
                    self.shown += os.read(self.master, 10_000)
                except OSError:  # not opened yet, or closed at the end
                    continue

    def close(self):
        os.close(self.master)
        return self.process.wait(PATIENCE)


@pytest.mark.parametrize("prepare", [ignore_and_take, take_terminal], ids=["nohup", "hung up"])
def test_a_terminal_that_is_lost_in_mid_run(prepare, tmp_path):
    out = tmp_path / "run"
    long = {"stages": [{"size": 16, "epochs": 12}], "train__save_minutes": 60}
    terminal = Terminal(script(out, **long), prepare)
    terminal.until((out / "metrics.jsonl").exists)
    assert b"finetune 16 px" in terminal.shown
    assert not (out / "result.json").exists()
    code = terminal.close()
    log = logged(out)
    if prepare is ignore_and_take:
        assert code == 0
        assert LAST in log
        assert "standard error were lost (input/output error)" in log
    else:
        assert code == 130
        assert not (out / "result.json").exists()
        assert "interrupted. The same command resumes from" in log
        inside_ok("finetune", out, **{**ONE, **long})


# ------------------------------------------------------------------ signals
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_run(number, tmp_path):
    """A scheduler sends it to loader workers, too. Twice, as a terminal does."""
    out = tmp_path / "run"
    argv = script(out, stages=[{"size": 16, "epochs": 12}], data__workers=2)
    with Forked(argv, tmp_path / "printed") as process:
        assert process.until((out / "metrics.jsonl").exists), process.said()
        for _ in range(2):
            for one in [
                *psutil.Process(process.popen.pid).children(recursive=True),
                process.popen,
            ]:
                os.kill(one.pid, number)
        assert process.wait() == 130, process.said()
    line = process.said().splitlines()[-1]
    assert line.startswith("interrupted. The same command resumes from")


def test_a_signal_that_was_ignored_stays_ignored(quiet, tmp_path):
    out = tmp_path / "run"
    with Forked(script(out), tmp_path / "printed", prepare=ignore) as process:
        assert process.until((out / "last").exists), process.said()
        process.send(signal.SIGHUP)
        process.send(signal.SIGUSR1)
        process.succeed()
    assert same(out, quiet)


def test_idmm_train_stops_by_a_signal(tmp_path):
    root = tmp_path / "images"
    out = tmp_path / "run"
    tree(root, train={"a": 12, "b": 12}, test={"a": 4, "b": 4})
    argv = [
        "train",
        root,
        "--out",
        out,
        "--minutes",
        "5",
        "--device",
        "cpu",
        "--data.workers",
        "0",
    ]
    with Forked(argv, tmp_path / "printed") as process:
        assert process.until((out / "trial/1/metrics.jsonl").exists), process.said()
        process.send(signal.SIGUSR1)
        assert process.wait() == 130, process.said()
    assert "interrupted" in process.said()
    assert "Traceback" not in process.said()


# ------------------------------------------------------------------ output that is the result
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a classifier, and images."""
    folder = tmp_path_factory.mktemp("finished")
    paint(folder / "photos/1.png", 1)
    classes = {"cat": 3, "<b>dog": 3}
    tuned_ok(folder / "run", tree(folder / "images", train=classes, test=classes))
    return folder


@contextlib.contextmanager
def broken_pipe():
    """A pipe on standard output whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = open(writer, "w", encoding="utf-8")
    with contextlib.redirect_stdout(stream):
        yield
    with contextlib.suppress(BrokenPipeError):
        stream.close()


@pytest.mark.parametrize(
    ("command", "code"),
    {
        "configs": 141,
        "data list": 141,
        "data info flowers": 141,
        "version": 141,
        "completion zsh": 141,
        "pretrain --out x --print_config": 141,
        "predict --init run photos": 141,
        "pretrain --help": 0,
        "--help": 0,
    }.items(),
)
def test_the_reader_left_early(command, code, run, monkeypatch):
    monkeypatch.chdir(run)
    with broken_pipe():
        try:
            ended = call(command.split())
        except SystemExit as end:
            ended = end.code
    assert ended == code


def test_a_real_process_whose_reader_left():
    """Python itself adds neither a message nor an exit code of its own."""
    for words, code in ((["configs"], 141), (["--help"], 0)):
        reader, writer = os.pipe()
        os.close(reader)
        done = real(
            *words,
            capture_output=False,
            stdout=writer,
            stderr=subprocess.PIPE,
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (code, "")
    with open("/dev/full", "w") as full:
        done = real(
            "configs",
            capture_output=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    line = "standard output: cannot be written (no space left on device)\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_python_calls_bear_a_lost_display(run, tmp_path):
    """Bars, log lines and what libraries print in a user's program, whose own streams are
    closed."""
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        with broken_pipe(), contextlib.redirect_stderr(stream):
            assert len(idmm.load_classifier(run / "run").predict([run / "photos/1.png"])) == 1
            assert idmm.finetune(str(run / "run/config.yaml"))["test_size"] == 6
            with logging_to(tmp_path):
                print("of a library", file=sys.stderr, flush=True)
            show("a result")


def test_lines_stay_above_a_bar(monkeypatch):
    """tqdm clears a bar only if it knows that both go to one stream."""
    stream = io.StringIO()
    with tqdm(total=2, file=Display(stream), mininterval=0) as bar:
        bar.update()
        tqdm.write("a line", file=Display(stream))
    shown = stream.getvalue()
    assert "\r" in shown[: shown.index("a line")][-2:]


# ------------------------------------------------------------------ an ASCII locale, and pictures
@pytest.mark.slow
def test_a_run_of_foreign_names_in_an_ascii_locale(tmp_path):
    root = tmp_path / "images"
    out = tmp_path / "run"
    tree(root, train={"日本": 4, "b": 4}, test={"日本": 2, "b": 2})
    ascii_only = {
        **ENVIRONMENT,
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    changes = {
        **ONE,
        "data__subset": None,
        "data__name": "folder",
        "data__root": root,
    }
    done = real("finetune", *flags("finetune", out, **changes), env=ascii_only)
    assert done.returncode == 0 and "not drawn" not in done.stderr, done.stderr
    for name in ("confusion.png", "curves.png"):
        assert Image.open(out / name).format == "PNG"
    assert "日本" in (out / "per_class.csv").read_text(encoding="utf-8")


def test_names_that_python_cannot_decode_are_drawn(tmp_path, monkeypatch):
    """Japanese under an ASCII locale, and bytes that are no UTF-8: on axes, in legends, captions
    and titles."""
    drawn = []
    draw = RendererAgg.draw_text

    def record(renderer, gc, x, y, text, *more, **options):
        drawn.append(text)
        draw(renderer, gc, x, y, text, *more, **options)

    monkeypatch.setattr(RendererAgg, "draw_text", record)
    name = os.fsencode("日本").decode("ascii", "surrogateescape")
    other = os.fsdecode(b"\xff")
    file = tmp_path / "picture.png"
    truth = np.array([0, 1])
    points = [(1, 50.0, 1.0), (2, 60.0, 1.0)]
    tile = Tile(np.zeros((8, 8, 3), np.uint8), other)
    predictions = Predictions(truth, truth[:, None], truth)
    table = Table(grid([cell(target=name, backbone=other)]))
    for picture in (
        lambda: bars(table, file),
        lambda: save(confusion_figure(predictions, [name, other]), file),
        lambda: save(
            curves_figure([{"epoch": 1, "loss": 1.0}], f"{name} {other}"),
            file,
        ),
        lambda: accuracy_curves({name: {other: points}}, file, (name, "top-1")),
        lambda: comparison({"idmm train": [50.0]}, file, f"{name} {other}", 10.0),
        lambda: caption_sheet([(name, [tile])], file, name, other),
    ):
        drawn.clear()
        picture()
        text = " ".join(drawn)
        assert "日本" in text
        assert "\ufffd" in text
