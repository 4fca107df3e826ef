"""One of several processes that share a grid's folder: ``python -m idmm.transfer.worker GRID.yaml PARENT``."""

import os
import signal
import sys
import threading
import time

from idmm import options
from idmm.errors import Interrupted, RunError, UserError
from idmm.progress import Interrupts
from idmm.transfer.config import GridConfig
from idmm.transfer.run import Grid, work

LOOK = 1.0  # seconds between looks at whether the parent is there


def main(path: str, parent: int) -> int:
    """Works until nothing is left, or ``parent`` is gone: then it saves what it is at, as after SIGTERM."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    try:
        with Interrupts():
            work(Grid(options.build(GridConfig, path)), lambda grid: None)
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
