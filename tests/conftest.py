"""What several test files share."""

import sys

import pytest
import transfers
from clocks import fake_clock  # noqa: F401 (another)
from folders import decoded  # noqa: F401 (another)
from helpers import STAGES, outside
from loopback import Server, miniature

from idmm.data import registry
from idmm.data.registry import DATASETS

# files of whole runs, several processes and clusters, which 'make test-fast' leaves out
SLOW = """test_artifacts test_backbones test_demo test_dense_runs
    test_distributed test_probe test_handover test_joint test_minutes
    test_monitor test_guessed_labels test_report test_results test_resume test_resume_methods
    test_running test_train test_transfer_ray test_transfer_run test_transfer_survival""".split()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in SLOW or {"whole", "whole_grid"} & set(item.fixturenames):
            item.add_marker("slow")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """Names of files that are no UTF-8 stand in logs; xdist cannot send them."""
    report = (yield).get_result()
    report.sections = [
        (name, text.encode("utf-8", "replace").decode()) for name, text in report.sections
    ]


@pytest.fixture(autouse=True)
def threads_stay():
    """A test leaves torch's number of threads as it was: sums, and so the bits that others compare,
    depend on it."""
    before = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
    yield
    assert before in (None, sys.modules["torch"].get_num_threads())


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Uninterrupted tiny runs of both stages, each in a process; nothing may be written to them."""
    folder = tmp_path_factory.mktemp("whole")
    return {stage: outside(stage, folder / stage) for stage in STAGES}


@pytest.fixture(scope="session")
def whole_grid(tmp_path_factory):
    """An uninterrupted tiny transfer grid by the real command line; nothing may be written to
    it."""
    out = tmp_path_factory.mktemp("grid") / "out"
    with transfers.forked(out) as process:
        process.succeed()
    out.with_name("said").write_text(process.said())
    return out


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Decoded images and features are kept in a folder of the test's own."""
    monkeypatch.setenv("IDMM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def server(monkeypatch):
    """A server on loopback; downloads are impatient."""
    monkeypatch.setattr(registry, "TIMEOUT", 10.0)
    monkeypatch.setenv("no_proxy", "*")
    with Server.running() as running:
        yield running


@pytest.fixture
def indoor67(server, monkeypatch, tmp_path):
    """indoor67 comes from the server."""
    row = miniature(server, "indoor67", tmp_path / "source")
    monkeypatch.setitem(DATASETS, "indoor67", row)
    return row


@pytest.fixture
def any_checksum(monkeypatch):
    """torchvision takes the files of miniatures for the publishers'."""
    for module in ("cifar", "svhn", "flowers102"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda *_: True)
