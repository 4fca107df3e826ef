"""``idmm tune``: what it tries, how it is judged, what it writes, and that it goes on after a kill."""

import contextlib
import io
import json
import shutil
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import yaml
from folders import paint, tree
from helpers import VIT, Forked, call, refused
from PIL import Image

from idmm.config import METHODS, Method, PretrainConfig
from idmm.config.commands import TuneConfig
from idmm.config.parsing import build, parse
from idmm.config.recipes import resolve_method
from idmm.errors import install
from idmm.files import read_csv
from idmm.stages import assemble
from idmm.tuning import results, search
from idmm.tuning.options import applied, differences, options_of

OPTIONS = ["crop_scale", "local_crops", "colour_strength", "lr", "classifier_scale", "cutmix_alpha"]
RECIPE = [
    "--config", "idmm_fast", "--views.crops", "[{count: 2, scale: [0.14, 1.0]}, {count: 4, scale: [0.05, 0.4]}]",
]  # fmt: skip
TINY = [
    "tune", *RECIPE, "--data.workers", 0, "--data.subset", "{total: 120}", "--model.name",
    "vit_tiny_patch16_224", "--model.kwargs", yaml.safe_dump(VIT, default_flow_style=True).strip(), "--views.size", 16,
    "--train.batch_size", 40, "--train.precision", "fp32", "--train.device", "cpu", "--epochs", 2, "--minutes", 30,
]  # fmt: skip


def rows(out):
    return read_csv(out / "trials.csv")


def recipe(name="idmm"):
    given = PretrainConfig(method=Method(name=name, **({"classifier": "cosine"} if name == "idmm" else {})))
    resolved = resolve_method(given)[0]
    resolved.train.lr, resolved.train.epochs = 1e-3, 90
    return resolved


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A comparison of three settings, one round of repeats; returns its folder and what it printed."""
    out = tmp_path_factory.mktemp("tune") / "o"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "ROUNDS", 1)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert call([*TINY, "--trials", 3, "--out", out]) == 0
    return out, said.getvalue()


def test_trials_are_the_recipe_then_others_then_both_again(tuned):
    out, _ = tuned
    found = rows(out)
    assert list(found[0]) == ["trial", "seed", *OPTIONS, "accuracy", "ended", "seconds"]
    usual = {name: found[0][name] for name in OPTIONS}
    assert usual == dict(zip(OPTIONS, ["0.14", "True", "1.0", "0.0005", "16.0", "1.0"], strict=True))
    searched = [tuple(row[name] for name in OPTIONS) for row in found if row["seed"] == "0"]
    again = [tuple(row[name] for name in OPTIONS) for row in found if row["seed"] == "1"]
    assert len(searched) == len(set(searched)) == 3 and set(again) <= set(searched)
    assert tuple(usual.values()) in again
    # judged as a run's own kNN is, on training images
    records = [json.loads(line) for line in (out / "trials/0/metrics.jsonl").read_text().splitlines()]
    assert records[-1]["knn"] == pytest.approx(float(found[0]["accuracy"])) and len(records) == 2
    kept = yaml.safe_load((out / "trials/0/config.yaml").read_text())
    assert kept["data"]["val_fraction"] == 0.2 and kept["train"]["epochs"] == 2
    assert not list(out.rglob("*.safetensors")) and not list(out.rglob("state.pt"))


def test_the_file_goes_after_the_recipe_and_is_never_worse(tuned, capsys):
    out, said = tuned
    found = rows(out)
    means = {}
    for row in found:
        means.setdefault(tuple(row[name] for name in OPTIONS), []).append(float(row["accuracy"]))
    deep = {key: np.mean(values) for key, values in means.items() if len(values) == 2}
    usual = tuple(found[0][name] for name in OPTIONS)
    text = (out / "tuned.yaml").read_text()
    best = max(deep.values())
    assert f"the recipe {deep[usual]:.1f} %, the best {best:.1f} % (mean of 2 seeds)" in text
    assert f"the recipe {deep[usual]:.1f} %, the best {best:.1f} %" in said and best >= deep[usual]
    assert all(f"--config RECIPE --config {out / 'tuned.yaml'}" in where for where in (text, said))
    assert "on 287 held-out training images, never on test images" in text
    plain = parse(PretrainConfig, RECIPE, "idmm")
    keys = yaml.safe_load(text) or {}
    assert bool(keys) == (best != deep[usual])
    for section, values in keys.items():
        for name, value in values.items():
            assert getattr(getattr(plain, section), name) != value, "only keys that differ"


def test_what_else_is_written_and_said(tuned):
    out, said = tuned
    for name in ("crop_scale", "0.14*", "which options matter" if "fANOVA" in said else "too few trials", "tuned.yaml"):
        assert name in said
    with Image.open(out / "options.png") as image:
        assert image.format == "PNG" and image.width > image.height > 300
    log = (out / "log.txt").read_text()
    assert "trial 0 (the recipe as it is): " in log and "again with seed 1" in log and " left\n" in log


def test_a_finished_one_does_nothing_and_another_is_refused(tuned, capsys):
    out, said = tuned
    before = (out / "trials.csv").read_bytes()
    assert call([*TINY, "--trials", 3, "--out", out]) == 0
    shown = capsys.readouterr()
    assert "finished already, nothing to do" in shown.err and shown.out == said
    assert (out / "trials.csv").read_bytes() == before
    lines = refused(capsys, [*TINY, "--trials", 3, "--out", out, "--train.lr", 0.002])
    assert lines[0].startswith("train.lr: is 0.002, but") and len(lines) == 2
    (line,) = refused(capsys, [*TINY, "--trials", 3, "--out", out, "--resume", "never"])
    assert "--resume never wants a new folder" in line


def test_more_trials_of_a_finished_one(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "ROUNDS", 0)
    out = tmp_path / "o"
    shutil.copytree(tuned[0], out)
    before = rows(out)
    assert call([*TINY, "--trials", 4, "--out", out]) == 0
    assert rows(out)[: len(before)] == before
    assert len({tuple(row[name] for name in OPTIONS) for row in rows(out)}) == 4


def test_interrupted(tmp_path, capsys, monkeypatch):
    """In the third trial; the line says what is kept."""
    ran, run = [], search.run

    def stopped(job):
        ran.append(job)
        if len(ran) == 3:
            raise KeyboardInterrupt
        run(job)

    monkeypatch.setattr(search, "run", stopped)
    assert call([*TINY, "--trials", 3, "--out", tmp_path / "o"]) == 130
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line == "interrupted; 2 trials that ended are kept, the same command goes on"


def test_killed_and_taken_up(tmp_path):
    """What was measured stays, what was in the middle is done again."""
    out = tmp_path / "o"
    asked = [*TINY, "--trials", 3, "--epochs", 3, "--measure", "fewlabel", "--out", out]
    with Forked(asked, tmp_path / "first") as process:
        assert process.until(lambda: (out / "trials/1/metrics.jsonl").exists())
        process.send()
        process.wait()
    before = search.opened(out).trials
    assert before[0].value is not None and not before[1].state.is_finished()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "ROUNDS", 0)
        assert call(asked) == 0
    found = rows(out)
    assert len(found) == 3 and float(found[0]["accuracy"]) == before[0].value
    assert str(before[1].params["lr"]) in [row["lr"] for row in found[1:]]
    again = [t for t in search.opened(out).trials if t.params == before[1].params]
    assert len(again) == 2 and again[1].state.is_finished()


def test_the_time_is_kept(tuned, tmp_path):
    """No trial is begun that would not end in time, and one that would be late is ended."""
    out = tmp_path / "o"
    shutil.copytree(tuned[0], out)
    given = build(TuneConfig, {**yaml.safe_load((out / "tune.yaml").read_text()), "out": str(out), "trials": None})
    base = assemble.resolve(replace(build(PretrainConfig, str(out / "trials/0/config.yaml")), out=str(out)))[0].config
    study = search.opened(out)
    plan = search.Search(given, base, study, time.time())
    full = max(t.user_attrs["seconds"] for t in plan.trials() if t.user_attrs["ended"] == search.FINISHED)
    assert abs(plan.until - time.time() - (60 * 30 - study.user_attrs["seconds"] - search.REST)) < 5
    job = plan.next()
    assert job.config.seed == 0 and job.prunable and job.until == plan.until
    search.run(replace(job, until=time.time()))
    plan.tell(job)
    late = plan.trials()[-1]
    assert late.user_attrs["ended"] == search.LATE and late.value is not None
    plan.until = time.time() + (1 - search.SEARCH) * 60 * given.minutes - 1  # of the time left for repeats
    assert plan.next().config.seed == 2
    plan.until = time.time() + 0.9 * full
    assert plan.next() is None


def test_a_recipe_that_had_no_time_is_tried_again(tuned, tmp_path):
    """Else the same command with more minutes would have nothing to compare with."""
    given = build(TuneConfig, {**yaml.safe_load((tuned[0] / "tune.yaml").read_text()), "out": str(tmp_path)})
    study = search.opened(tmp_path)
    for name, value in (("epochs", 2), ("estimate", 1.0)):
        study.set_user_attr(name, value)
    plan = search.Search(given, recipe(), study, time.time())
    job = plan.next()
    job.trial.set_user_attr("ended", search.LATE)
    plan.tell(job)
    again = search.Search(given, recipe(), search.opened(tmp_path), time.time()).next()
    assert again.trial.params == job.trial.params == plan.usual and again.config.seed == job.config.seed


def test_on_a_ray_cluster(tuned, tmp_path, monkeypatch):
    """Workers report to the study in OUT; results are the same as one after the other, but for the order."""
    monkeypatch.setattr(search, "ROUNDS", 0)
    assert call([*TINY, "--trials", 2, "--engine", "ray", "--out", tmp_path / "ray"]) == 0
    found = {tuple(row[name] for name in OPTIONS): float(row["accuracy"]) for row in rows(tmp_path / "ray")}
    wanted = rows(tuned[0])[0]
    first = tuple(wanted[name] for name in OPTIONS)
    assert len(found) == 2 and found[first] == pytest.approx(float(wanted["accuracy"]), abs=0.8)  # two images


# ---------------------------------------------------------------------- options
def test_options_are_those_that_the_method_reads():
    assert [option.name for option in options_of(recipe())] == OPTIONS
    for name in METHODS:
        named = [option.name for option in options_of(recipe(name))]
        assert ("cutmix_alpha" in named) == (name in ("idmm", "supervised"))
        assert ("classifier_scale" in named) == (name == "idmm") and named[0] == "crop_scale" and "lr" in named
        assert ("local_crops" in named) == (name in ("idmm", "dino", "supervised"))
    assert all(option.usual in option.values for option in options_of(recipe()))


@pytest.mark.parametrize("name", METHODS)
def test_the_usual_choice_is_the_recipe_and_a_choice_is_what_it_says(name):
    base = recipe(name)
    usual = {option.name: option.usual for option in options_of(base)}
    assert differences(base, applied(base, usual, 90)) == {}
    choice = {**usual, "crop_scale": 0.5, "colour_strength": 0.25, "lr": 3e-3}
    found = differences(base, applied(base, choice, 90))
    assert found["train"] == {"lr": 3e-3}
    jitter = base.views.jitter
    assert found["views"]["jitter"] == pytest.approx([0.25 * value for value in jitter])
    crops = found["views"]["crops"]
    assert [crop["count"] for crop in crops] == [group.count for group in base.views.crops]
    assert all(crop["scale"][0] == 0.5 for crop in crops[: 2 if name in ("dino", "mocov3") else 1])
    own = [(crop.get("blur_prob"), group.blur_prob) for crop, group in zip(crops, base.views.crops, strict=True)]
    assert all(now == before or now == 0.25 * before for now, before in own)
    if "local_crops" in usual:
        short = applied(base, {**usual, "local_crops": False}, 90)
        total = sum(group.count for group in base.views.crops)
        assert short.train.epochs == round(90 * total / sum(group.count for group in short.views.crops))
    build(PretrainConfig, {**found, "method": {"name": name}})  # keys that a file may have


def test_trials_that_were_ended_early_count_with_the_gain_of_the_others():
    import optuna

    def made(number, lr, values, ended):
        of = optuna.distributions.CategoricalDistribution([1.0, 2.0])
        other = optuna.distributions.CategoricalDistribution([0, 1])
        state = optuna.trial.TrialState.COMPLETE if ended == "finished" else optuna.trial.TrialState.PRUNED
        done = optuna.trial.create_trial(
            params={"lr": lr, "x": number % 2}, distributions={"lr": of, "x": other}, state=state,
            value=values[-1], intermediate_values=dict(enumerate(values, 1)), user_attrs={"ended": ended, "seed": 0},
        )  # fmt: skip
        done.number = number
        return done

    finished = [made(n, 1.0, [40.0 + n, 50.0 + n], "finished") for n in range(4)]
    early = [made(4 + n, 2.0, [20.0 + n], "worse than the others") for n in range(4)]
    assert results.expected(finished + early)[5] == pytest.approx(31.0)
    weights = results.importances(finished + early)
    assert list(weights)[0] == "lr" and weights["lr"] > 0.8
    assert results.importances(finished[:2]) == {}


def test_fewlabel_is_a_probe_on_five_labels_a_class():
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 20)
    features = rng.normal(size=(60, 8)).astype(np.float32) + 4 * np.eye(8, dtype=np.float32)[labels]
    assert search.fewlabel(features, labels, features, labels) > 95
    few = np.concatenate([features[labels == c][:2] for c in range(3)])
    assert 0 <= search.fewlabel(few, np.repeat(np.arange(3), 2), features, labels) <= 100


# ---------------------------------------------------------------------- mistakes
def test_without_optuna_it_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    (line,) = refused(capsys, [*TINY, "--out", tmp_path / "o"])
    assert line == f"tune: needs optuna; install it with: {install('tune')}"
    assert not (tmp_path / "o").exists()


def test_labels_are_needed(tmp_path, capsys):
    for i in range(12):
        paint(tmp_path / f"d/{i}.png", i)
    asked = [*TINY, "--data.subset", "null", "--data.root", tmp_path / "d", "--out", tmp_path / "o"]
    assert call(asked) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"data.root: '{tmp_path / 'd'}' has no labels for its training images; tune compares by")
    assert not (tmp_path / "o").exists()


def test_a_short_budget_is_said_with_what_is_wanted(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"a": 10, "b": 10}, test={"a": 2, "b": 2})
    asked = [*TINY, "--data.subset", "null", "--data.root", root, "--epochs", 50, "--minutes", 0.01]
    assert call([*asked, "--out", tmp_path / "o"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("minutes: 0.01 is too short, an epoch takes about") and "4 trials of 50 epochs" in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(("argv", "said"), [
    (["--data.folds", 3], "data.folds: leave it out; trials are judged on held-out training images"),
    (["--engine", "ray", "--ray.shared", "false"], "ray.shared: got False, but trials share the study in OUT"),
    (["--method.name", "simclr", "--method.classifier_scale", 3], "method.classifier_scale: 3.0, but simclr does not"),
    (["--measure", "top1"], "measure: got 'top1', wanted"),
])  # fmt: skip
def test_mistakes_are_a_line_each(argv, said, tmp_path, capsys):
    (line,) = refused(capsys, [*TINY, *argv, "--out", tmp_path / "o"])
    assert line.startswith(said)
    assert not (tmp_path / "o").exists()
