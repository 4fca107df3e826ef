"""Runs a grid by worker processes that share its folder; each is ``python -m idmm.transfer.workers``."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from idmm.config import parsing
from idmm.config.reading import read_value
from idmm.errors import Interrupted, RunError, UserError
from idmm.progress import Interrupts
from idmm.transfer.config import GridConfig
from idmm.transfer.run import Grid, work

PAUSE = 0.2  # seconds between the parent's looks at the workers
LOOK = 1.0  # seconds between a worker's looks at whether the parent is there


def run(grid: Grid, say: Callable[[], None]) -> None:
    """Runs all jobs of a grid by workers, which end with this process; calls ``say`` now and then. RunError where they
    ended before all was done."""
    logs = grid.out / "jobs"
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "idmm.transfer.workers", str(os.getpid())]
    workers = []
    try:
        for number in range(grid.config.workers):
            with open(logs / f"worker-{number}.log", "ab") as said:
                # in a session of its own: Ctrl-C is passed on once, by this process
                kept = {"stdin": subprocess.PIPE, "stdout": said, "stderr": said, "start_new_session": True}
                workers.append(subprocess.Popen(command, env=_environment(number, grid.config.workers), **kept))
            with contextlib.suppress(BrokenPipeError), workers[-1].stdin as given:  # it died at once
                given.write(parsing.dump(grid.config).encode())
        while any(worker.poll() is None for worker in workers):
            time.sleep(PAUSE)
            say()
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in workers:
            worker.wait()
    if grid.remaining():
        codes = ", ".join(str(worker.returncode) for worker in workers)
        see = logs / "worker-*.log"
        raise RunError(f"the workers ended (codes {codes}) with jobs left, see {see}; the same command goes on")


def _environment(number: int, workers: int) -> dict[str, str]:
    """The environment of a worker: a GPU of its own, or its share of the cores."""
    import torch

    environment = dict(os.environ)
    if torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = seen if seen != [""] else [str(i) for i in range(torch.cuda.device_count())]
        environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
    else:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // workers)))
    return environment


# ------------------------------------------------------------------ in a worker
def main(parent: int) -> int:
    """Works on the grid of standard input, as YAML, until nothing is left, or ``parent`` is gone: then its run is
    saved, as after SIGTERM."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    try:
        with Interrupts():
            work(Grid(parsing.build(GridConfig, read_value(sys.stdin.read()))))
    except (Interrupted, KeyboardInterrupt):
        return Interrupted.exit_code
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
