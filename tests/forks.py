"""Processes that are forked from one that has done the imports: they start at once, with nothing of
a test's state."""

import multiprocessing
import os
import runpy
import signal
import sys

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "idmm.grid.transfer",
        "idmm.report.grid_pictures",
        "idmm.runs.pretrain",
        "idmm.runs.finetune",
        "sklearn.datasets",
    ]
)


class Child(SERVER.Process):
    """A process that is asked as those of subprocess are."""

    def poll(self):
        return self.exitcode

    def wait(self, timeout):
        self.join(timeout)
        return self.exitcode


def start(argv, output, environment, prepare=None):
    """Starts ``idmm ARGV``, or ``python FILE.py ARGV``, in a session of its own, its output in a
    file.

    ``prepare``, a function of a module, is called before, in the process itself.
    """
    child = Child(target=_run, args=(argv, output, environment, prepare))
    child.start()
    return child


def _run(argv, output, environment, prepare):
    from idmm.cli import main
    from idmm.data.loaders import one_thread

    os.setsid()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1), os.dup2(file, 2)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if prepare:
        prepare()
    with one_thread():
        if not argv[0].endswith(".py"):
            sys.exit(main(argv))
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
