"""Runs a grid by worker processes that share its folder; each is ``python -m idmm.transfer.workers``."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from idmm.config import parsing
from idmm.errors import Interrupted, RunError, UserError
from idmm.files import write_text
from idmm.progress import Interrupts
from idmm.transfer.config import GridConfig
from idmm.transfer.run import Grid, work

PAUSE = 0.2  # seconds between the parent's looks at the workers
LOOK = 1.0  # seconds between a worker's looks at whether the parent is there


def run(grid: Grid, say: Callable[[], None]) -> None:
    """Runs all jobs of a grid by workers, which end with this process; calls ``say`` now and then. RunError where they
    ended before all was done."""
    file = grid.out / "jobs" / f"workers-{os.getpid()}.yaml"
    write_text(file, parsing.dump(grid.config))
    command = [sys.executable, "-m", "idmm.transfer.workers", str(file), str(os.getpid())]
    workers = []
    try:
        for number in range(grid.config.workers):
            with open(file.with_name(f"worker-{number}.log"), "ab") as said:
                # in a session of its own: Ctrl-C is passed on once, by this process
                kept = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said, "start_new_session": True}
                workers.append(subprocess.Popen(command, env=_environment(number, grid.config.workers), **kept))
        while any(worker.poll() is None for worker in workers):
            time.sleep(PAUSE)
            say()
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in workers:
            worker.wait()
        file.unlink(missing_ok=True)
    if grid.remaining():
        codes = ", ".join(str(worker.returncode) for worker in workers)
        logs = file.with_name("worker-*.log")
        raise RunError(f"the workers ended (codes {codes}) with jobs left, see {logs}; the same command goes on")


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
def main(path: str, parent: int) -> int:
    """Works until nothing is left, or ``parent`` is gone: then its run is saved, as after SIGTERM."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    try:
        with Interrupts():
            work(Grid(parsing.build(GridConfig, path)))
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
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
