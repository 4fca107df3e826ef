"""What people read of times and sizes."""

import pytest

from idmm import progress
from idmm.progress import duration


@pytest.mark.parametrize(
    "seconds, text",
    [(45, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (4 * 3600 - 5, "4 h 0 min"), (2 * 86_400, "2.0 days")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_shows_what_it_warns_of(rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    with progress.logging_by(progress.BufferedLog()):
        progress.log.warning("before the log is there")
        with progress.logging_to(tmp_path):
            progress.log.warning("in the run")
    said = capsys.readouterr().err
    assert [said.count("before the log"), said.count("in the run")] == ([1, 1] if rank == 0 else [0, 0])


def test_what_is_said_between_two_runs_is_shown(tmp_path, capsys):
    with progress.logging_by(progress.BufferedLog()):
        for name in ("a", "b"):
            progress.log.info("run %s", name)
            (tmp_path / name).mkdir()
            with progress.logging_to(tmp_path / name):
                progress.log.info("in it")
    assert capsys.readouterr().err.splitlines() == ["run a", "in it", "run b", "in it"]
    assert [len((tmp_path / name / "log.txt").read_text().splitlines()) for name in "ab"] == [2, 2]
