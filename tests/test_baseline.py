"""The baseline: logistic regression on hand-made features, the same in a run, in the check of images and as a probe."""

import numpy as np
import pytest
from folders import paint, result, tree
from helpers import call, inside, logged, read
from test_resume import stop_at

from idmm.evaluation import baseline, evaluate

pytestmark = pytest.mark.usefixtures("own_cache")
RUN = dict(stages=None, train__size=32, train__epochs=1, train__ema=None, data__subset={"per_class": 6})


def probed(tmp_path, *argv):
    assert call(["probe", "--model.name", "hog", "--data.workers", 0, *argv, "--out", tmp_path / "probe"]) == 0
    return read(tmp_path / "probe/result.json")["top1"]


def test_a_run_measures_once_what_a_probe_of_hog_does(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert inside("finetune", tmp_path / "run", **RUN) == 130
    assert inside("finetune", tmp_path / "run", **RUN) == 0
    found = result(tmp_path / "run")["baseline_top1"]
    wanted = probed(tmp_path, "--size", 32, "--data.subset", "{per_class: 6}")
    assert found == pytest.approx(wanted, abs=1) and found > 80  # crops of training images are not rounded to 8 bits
    text = logged(tmp_path / "run")
    assert text.count(f"{found:.2f} % of 360 test images, fitted to 60 training images with C = ") == 1
    assert f"the baseline {found:.2f}" in text and "is no better than logistic regression on hand-made features" in text


def test_what_a_start_without_a_checkpoint_remembered_is_forgotten(tmp_path):
    """The next start may be on other images."""
    (tmp_path / "run/last").mkdir(parents=True)
    (tmp_path / "run/last/start.json").write_text('{"baseline_top1": 12.5}')
    assert inside("finetune", tmp_path / "run", **RUN) == 0
    assert result(tmp_path / "run")["baseline_top1"] > 80


@pytest.mark.parametrize("side", [40, 130])
def test_the_check_of_images_finds_the_same(side, tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 9, "b": 9, "c": 9}, test={"a": 6, "b": 6, "c": 7})
    for seed, path in enumerate(sorted(root.rglob("*.png"))):
        paint(path, seed, (side, side + 9))
    call(["data", "check", "--root", root, "--out", tmp_path / "c"])
    floor = read(tmp_path / "c/check.json")["floor"]
    assert (floor["train_images"], floor["images"], floor["of"]) == (27, 19, "test")
    line = f"baseline: {floor['baseline_top1']:.1f} % top-1 by logistic regression on hand-made features "
    assert f"{line}(largest class 36.8 %)" in capsys.readouterr().out
    assert floor["baseline_top1"] == probed(tmp_path, "--size", 64, "--data.root", root)


def test_of_many_images_a_part_is_drawn_by_the_classes_shares(monkeypatch):
    labels = np.random.default_rng(0).permutation(np.repeat([-1, 0, 1, 2, 3], [50, 600, 300, 99, 1]))
    found = baseline.drawn(labels, 100)
    assert (np.diff(found) > 0).all() and np.bincount(labels[found]).tolist() == [59, 30, 10, 1]
    assert baseline.drawn(labels, 1000).tolist() == np.flatnonzero(labels >= 0).tolist()
    many = np.repeat(np.arange(200), 20)
    assert len(baseline.drawn_to_fit(many, 5000)) == 400_000 // 200
    assert np.bincount(many[baseline.drawn_to_fit(many, 300)]).tolist() == [5] * 200, "5 of each class in any case"


def test_the_strength_is_chosen_on_a_part_and_fitted_on_all(monkeypatch):
    rng = np.random.default_rng(0)
    labels, seen = np.tile(np.arange(6), 20), []
    train = rng.normal(size=(120, 5)) + 3 * labels[:, None] * (np.arange(5) == labels[:, None] % 5)
    choose = evaluate.choose_strength
    monkeypatch.setattr(baseline, "choose_strength", lambda *args: seen.append(args) or choose(*args))
    monkeypatch.setattr(baseline, "CHOSEN", 30)
    monkeypatch.setattr(baseline, "CLASSES", 4)
    found = baseline.measured(train, labels, train[:50], labels[:50], 0.0)
    ((_, classes),) = seen
    assert len(classes) == 30 and len(set(classes)) == 4 and (found.train, found.test) == (120, 50)
    predicted = evaluate.probe_predict(train, labels, train[:50], choose(*seen[0]).strength)
    assert found.top1 == pytest.approx(100 * np.mean(predicted == labels[:50]))
