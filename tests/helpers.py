"""Tiny runs for tests: their flags, in this process and in real ones, and what they leave
behind."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forks
import safetensors.torch
import torch
import yaml

from idmm.cli import main
from idmm.data.loaders import one_thread
from idmm.methods.base import RunInfo

ROOT = Path(__file__).parents[1]
PATIENCE = 120.0  # seconds until a process counts as stuck

# decoded images stay out of the user's own cache
_CACHE = tempfile.TemporaryDirectory(prefix="idmm-test-cache-")
os.environ["IDMM_CACHE"] = _CACHE.name
# one thread: on busy machines OpenMP's spinning makes tiny steps ten times slower
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
TINY = {
    "seed": 0,
    "data.subset": {"total": 96},
    "data.workers": 0,
    "model.name": "vit_tiny_patch16_224",
    "model.kwargs": VIT,
    "model.drop_path": 0.3,
    "train.epochs": 3,
    "train.batch_size": 20,
    "train.lr": 0.003,
    "train.warmup_epochs": 1,
    "train.precision": "fp32",
    "train.device": "cpu",
    "train.save_minutes": 0,  # every step
}
STAGES = {
    # 5 steps an epoch, the last of 16 images; two passes a step; a cosine N-way layer that starts
    # from features
    "pretrain": {
        **TINY,
        "train.accumulate": 2,
        "method.classifier": "cosine",
        "method.classifier_init": "features",
        "method.classifier_lr_scale": 10,
        "views.size": 16,
        "views.crops": [
            {"count": 2, "scale": [0.14, 1.0]},
            {"count": 1, "scale": [0.05, 0.4]},
        ],
    },
    # two sizes, 2 epochs of 5 steps each: Mixup in the first, CutMix in the second; the averaged
    # weights are exported
    "finetune": {
        **TINY,
        "train.epochs": 2,
        "train.ema": 0.9,
        "train.eval_every": 1,
        "stages": [{"size": 16}, {"size": 32, "lr": 0.001, "batch_size": 24}],
    },
}


def flags(stage, out, **changes):
    """The command line of a tiny run; changes by key, '__' for the dot, None to leave a flag
    out."""
    return as_flags(STAGES[stage] | {"out": out}, changes)


def as_flags(values, changes):
    """Values by key as words; changes as above."""
    values = values | {key.replace("__", "."): value for key, value in changes.items()}
    argv = []
    for key, value in values.items():
        if value is not None:
            argv += [
                f"--{key}",
                str(value) if isinstance(value, str | Path) else _flow(value),
            ]
    return argv


def _flow(value):
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()


def inside(stage, out, **changes):
    """Runs the command line in this process; returns the exit code."""
    return call([stage, *flags(stage, out, **changes)])


def call(argv):
    """Runs a command line, a text or words, in this process, on one thread as the real processes
    do; returns the exit code."""
    if isinstance(argv, str):
        argv = shlex.split(argv)
    with one_thread():
        return main([str(word) for word in argv])


def call_ok(argv):
    assert call(argv) == 0


def inside_ok(command, out, **changes):
    assert inside(command, out, **changes) == 0


def refused(capsys, argv, code=2):
    """Runs a command line that fails; returns its lines on standard error, there being nothing
    else."""
    assert call(argv) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err.splitlines()


def real(*argv, **options):
    """Runs ``idmm ARGV`` in a real process to its end, with further options of subprocess.run."""
    code = "import sys; from idmm.cli import main; sys.exit(main())"
    settings = {
        "cwd": ROOT,
        "env": ENVIRONMENT,
        "capture_output": True,
        "text": True,
        **options,
    }
    return subprocess.run([sys.executable, "-c", code, *map(str, argv)], **settings)


class Process:
    """A real process in a session of its own, its standard error in a file.

    Args:
        command: After the interpreter.
        error: The file.
    """

    def __init__(self, command, error):
        self.error = Path(error)
        with open(self.error, "wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, *(str(word) for word in command)],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self):
        """Waits for the end; returns the exit code."""
        return self.popen.wait(PATIENCE)

    def succeed(self):
        """Waits for the end, which must be good."""
        assert self.wait() == 0, self.said()

    def until(self, what):
        """Waits until ``what()`` holds, looking often; False if the process ended before."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            if self.popen.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"stuck: {self.said()}"
            time.sleep(0.0005)
        return True

    def send(self, number=signal.SIGKILL):
        """Sends a signal to the whole process group."""
        os.killpg(self.popen.pid, number)

    def said(self):
        """What it printed."""
        return self.error.read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.popen.poll() is None:
            self.send()
            self.popen.wait(PATIENCE)


class Forked(Process):
    """``idmm ARGV``, or ``python FILE.py ARGV``, in a process that has done its imports: a third of
    the time.

    Args:
        argv: The command line.
        error: Where its output goes.
        environment: Further variables.
    """

    def __init__(self, argv, error, prepare=None, **environment):
        self.error = Path(error)
        self.error.unlink(missing_ok=True)
        self.popen = forks.start(
            [str(word) for word in argv],
            self.error,
            ENVIRONMENT | environment,
            prepare,
        )
        self.until(self.error.exists)  # from then on it has a session of its own

    def kill(self, number=signal.SIGKILL):
        """Sends a signal to the process alone; returns the exit code."""
        os.kill(self.popen.pid, number)
        return self.wait()


class Together:
    """A command line on two forked processes, told of each other as by torchrun; where one fails
    the other is ended."""

    def __init__(self, argv, error):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        self.parts = []
        for rank in ("0", "1"):
            own = common | {"RANK": rank, "LOCAL_RANK": rank}
            self.parts.append(Forked(argv, f"{error}.{rank}", **own))

    def wait(self):
        """Waits for the end of both; returns the first exit code that is not 0."""
        deadline = time.monotonic() + PATIENCE
        while None in (codes := [part.popen.poll() for part in self.parts]):
            assert time.monotonic() < deadline, f"stuck: {self.said()}"
            if any(codes):
                time.sleep(1.0)  # to end by itself, if it hears of it
                self.parts[codes.index(None)].popen.terminate()
                break
            time.sleep(0.01)
        return next(filter(None, [part.wait() for part in self.parts]), 0)

    succeed = Process.succeed

    def said(self):
        """What both printed, the first process before the other."""
        return "".join(part.said() for part in self.parts)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in self.parts:
            part.__exit__()


def start(stage, out, **changes):
    """Starts a tiny run in a process that has done its imports."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    return Forked([stage, *flags(stage, out, **changes)], f"{out}.err")


def outside(stage, out, **changes):
    """Runs ``python STAGE.py`` in a process that has done its imports, to its end, which must be
    good."""
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    with Forked([ROOT / f"{stage}.py", *flags(stage, out, **changes)], f"{out}.err") as process:
        process.succeed()
    return Path(out)


def weights(out):
    """All exported tensors of a run, by file and name."""
    tensors = {}
    for path in sorted(Path(out).glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(path).items():
            tensors[f"{path.stem}/{name}"] = tensor
    return tensors


def same(a, b):
    """Whether two runs exported the same tensors, to the last bit."""
    return distance(a, b) == 0


def distance(a, b):
    """Largest difference between the exported tensors of two runs."""
    a = weights(a)
    b = weights(b)
    assert a
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def metrics(out):
    """metrics.jsonl without what the clock says."""
    records = []
    for line in (Path(out) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name in ("seconds", "images_per_s"):
            record.pop(name, None)
        records.append(record)
    return records


def read(path):
    """What a JSON or YAML file holds."""
    text = Path(path).read_text()
    return json.loads(text) if str(path).endswith(".json") else yaml.safe_load(text)


def column(rows, name):
    """The values of one field, row by row."""
    return [row[name] for row in rows]


def logged(out):
    """log.txt."""
    return (Path(out) / "log.txt").read_text(encoding="utf-8")


def state(out):
    """The checkpoint."""
    return torch.load(state_file(out), map_location="cpu", weights_only=True)


def state_file(out):
    return Path(out) / "last" / "state.pt"


def temporary(out):
    """Files that were written aside and not renamed."""
    return [path for path in Path(out).rglob(".*") if path.is_file()]


def run_info(
    images,
    classes=None,
    batch_size=4,
    epochs=2,
    steps=10,
    global_groups=1,
    labelled=None,
):
    """What a method is told of a small run."""
    return RunInfo(images, batch_size, epochs, steps, classes, global_groups, labelled)
