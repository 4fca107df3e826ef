"""examples/tune_with_optuna.py on digits."""

import runpy

import pytest
from helpers import ROOT

from idmm.config import PretrainConfig
from idmm.config.parsing import build
from idmm.data.loaders import one_thread

pytestmark = pytest.mark.slow


def run(name, monkeypatch, **settings):
    for key, value in settings.items():
        monkeypatch.setenv(key, str(value))
    with one_thread():
        runpy.run_path(ROOT / "examples" / name)


def test_tuning_keeps_the_best_trial_and_continues(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    for trials in (1, 2):
        run("tune_with_optuna.py", monkeypatch, OUT=out, TRIALS=trials, EPOCHS=1)
        said = capsys.readouterr()
        assert said.err.count("finished with value") == 1, "a finished trial is not repeated"
    assert "kNN on held-out training images: first trial" in said.out and str(out / "tuned.yaml") in said.out
    found = build(PretrainConfig, out / "tuned.yaml")
    assert found.views.crops[0].scale[1] == 1.0 and 1e-4 <= found.train.lr <= 1e-2
    assert sorted(path.name for path in out.iterdir()) == ["study.db", "tuned.yaml"]
