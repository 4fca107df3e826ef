"""Images in groups of similar ones: folds, the choice of C, agreement, intervals, and what idmm
train prints."""

import logging
from collections import Counter

import numpy as np
import pytest
from folders import section, tree
from helpers import call_ok, read
from PIL import Image

from idmm.auto import trial
from idmm.auto.linear import agreement_of
from idmm.data.listing import list_images
from idmm.data.stratify import stratified_folds
from idmm.evaluation import evaluate
from idmm.evaluation.similarity import nearest, unit_rows
from idmm.files import read_csv
from idmm.report.stats import group_interval, wilson_interval

COPIES = 6
CLASSES = 4
WIDTH = 32


def near_copies(seed, groups):
    """Features of groups of near-copies: a group is far from its class, its images are close to
    each other."""
    draw = np.random.default_rng(seed)
    labels = np.arange(groups) % CLASSES
    centres = 1.5 * np.eye(WIDTH)[labels] + draw.normal(size=(groups, WIDTH))
    images = np.repeat(centres, COPIES, axis=0) + 0.05 * draw.normal(size=(groups * COPIES, WIDTH))
    return (
        images,
        np.repeat(labels, COPIES),
        np.repeat(np.arange(groups).astype(str), COPIES),
    )


def test_folds_hold_out_shares_of_classes_and_whole_groups(caplog):
    labels = np.repeat([0, 1, 2, 3, 4, 5], [1, 2, 3, 7, 23, 0]).astype(int)
    folds = stratified_folds(labels, None, 3, list("abcdef"))
    held = np.concatenate([held for _, held in folds])
    assert sorted(held) == np.flatnonzero(labels >= 3).tolist(), (
        "each image once, none of the small classes"
    )
    assert caplog.messages == [
        "classes with fewer images than the 5 folds are left out of the estimate on "
        "held-out training images: "
        "'a' (1), 'b' (2), 'c' (3)"
    ]
    for train, held in folds:
        assert sorted([*train, *held]) == list(range(len(labels)))
        assert set(labels[train]) == set(labels)
        assert set(np.bincount(labels[held])[3:]) <= {1, 2, 4, 5}
    assert not np.array_equal(folds[0][1], stratified_folds(labels, None, 4)[0][1])
    for few, count in (([0, 1, 2, 3], 0), ([0] * 9, 0), ([0, 0, 1, 1], 2)):
        assert len(stratified_folds(np.array(few), None)) == count

    _, labels, groups = near_copies(0, 40)
    labels[groups == "39"] = 0  # an image of class 3 is in a group of class 0, too
    labels[np.flatnonzero(groups == "39")[0]] = 3
    for train, held in stratified_folds(labels, groups):
        assert not set(groups[train]) & set(groups[held])


def test_without_a_fold_there_is_no_estimate():
    rows, labels, _ = near_copies(0, 40)
    one = np.array(["one"] * len(labels))  # group, which cannot be held out
    choice = evaluate.choose_strength(rows, labels, groups=one)
    assert choice == (
        evaluate.USUAL_STRENGTH,
        "default, as no group can be held out",
        {},
    )
    assert evaluate.fit_temperature(rows, labels, 1.0, groups=one) == 1.0


def test_c_is_chosen_on_other_groups():
    """On other images of the same groups every classifier is right."""
    rows, labels, groups = near_copies(1, 40)
    alone = evaluate.choose_strength(rows, labels)
    grouped = evaluate.choose_strength(rows, labels, groups=groups)
    assert max(alone.accuracies.values()) == 100
    assert max(grouped.accuracies.values()) < 80
    temperatures = [evaluate.fit_temperature(rows, labels, 1.0, groups=g) for g in (groups, None)]
    assert temperatures[0] > temperatures[1]


def test_new_images_are_in_the_interval():
    inside = 0
    too_narrow = 0
    errors = []
    for seed in range(20):
        rows, labels, groups = near_copies(seed, 90)
        new = np.arange(len(rows)) >= 40 * COPIES
        old = np.arange(len(rows)) < 40 * COPIES
        train, held = stratified_folds(labels[old], groups[old], seed=seed)[0]
        known = (rows[train], labels[train])
        both = {"groups": groups[train], "test_groups": groups[held]}
        result = evaluate.readouts(*known, rows[held], labels[held], **both)["probe"]
        predicted = evaluate.probe_predict(*known, rows[new], result["strength"])
        accuracy = 100 * np.mean(predicted == labels[new])
        low, high = result["top1_interval"]
        inside += low <= accuracy <= high
        low, high = wilson_interval(result["top1"] / 100 * len(held), len(held))
        too_narrow += low <= accuracy <= high
        errors.append(max(result["accuracies"].values()) - accuracy)
    assert inside >= 16 > too_narrow
    assert abs(np.mean(errors)) < 5, "the accuracy on held-out groups is that on new groups"


def test_the_interval_by_hand():
    """Five groups of 2 to 6 images: an effective number of images, by hand from Korn and
    Graubard."""
    images = np.array([2, 3, 4, 5, 6])
    correct = np.array([2, 3, 1, 5, 1])
    share = 12 / 20
    variance = 5 / 4 * np.sum((correct - share * images) ** 2) / 20**2
    effect = variance / (share * (1 - share) / 20)
    effective = 20 / effect * (1.959964 / 2.776445) ** 2  # t with 4 degrees of freedom
    assert effect > 1
    expected = wilson_interval(share * effective, effective)
    assert group_interval(correct, images) == pytest.approx(expected)
    assert wilson_interval(4, 6) == pytest.approx([30.00, 90.32], abs=0.01)
    singles = group_interval([1] * 300 + [0] * 100, [1] * 400)
    assert singles == pytest.approx(wilson_interval(300, 400), abs=0.1)
    # if all are right, a group is one image
    assert group_interval([6] * 8, [6] * 8)[0] < wilson_interval(48, 48)[0] - 20
    assert group_interval([5], [6]) == [0.0, 100.0]


def test_a_groups_own_images_do_not_agree():
    rows, labels, groups = near_copies(2, 40)
    # a class for each group
    predicted = np.random.default_rng(0).permutation(40)[groups.astype(int)] % CLASSES
    rows = unit_rows(rows)
    near = nearest(rows, 5)
    apart = nearest(rows, 5, groups)
    assert (groups[near.index] == groups[:, None]).all()
    assert (groups[apart.index] != groups[:, None]).all()
    assert agreement_of(near, predicted) == pytest.approx(1)
    assert agreement_of(apart, predicted) < 0.3
    two = nearest(rows[: 2 * COPIES], 11, groups[: 2 * COPIES])
    assert (two.value == -np.inf).sum(axis=1).tolist() == [COPIES - 1] * 2 * COPIES
    assert agreement_of(two, np.repeat([0, 1], COPIES)) == 0


def test_images_without_labels_have_their_groups(tmp_path):
    root = tree(
        tmp_path / "d",
        train={"a": 4, "b": 4},
        test={"a": 2, "b": 2},
        unlabelled={"": 3},
    )
    train = list_images(section(root, groups=r"([^/]+/\d)"), labelled=True, unlabelled=True).train
    assert (train.labels < 0).sum() == 3
    assert set(train.groups[train.labels < 0]) == {f"unlabelled/{number}" for number in range(3)}


def test_idmm_train_counts_groups(tmp_path, capsys, caplog, monkeypatch, fake_clock):
    """Ten scenes per class, six near-copies of each: what is held out, tried and printed is by
    scenes."""
    root = tree(tmp_path / "d", **{f"train/{of}": {"": 60} for of in ("cat", "dog")})
    for path in sorted(root.rglob("*.png")):
        number = int(path.stem)
        scene = path.with_name(f"s{number // COPIES}_{number}.png")
        path.unlink()
        seed = number // COPIES + 10 * (path.parent.name == "dog")
        pixels = np.random.default_rng(seed).integers(0, 256, (24, 24, 3))
        noise = np.random.default_rng(number).integers(-3, 4, pixels.shape)
        Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(scene)
    caplog.set_level(logging.INFO, "idmm")
    monkeypatch.setattr(trial, "ENOUGH", 30)
    monkeypatch.setattr(trial, "FEW", 1)
    out = tmp_path / "x"
    argv = [
        "train",
        root,
        "--data.groups",
        r"(\w+/s\d)_",
        "--minutes",
        1,
        "--size",
        32,
    ]
    call_ok([*argv, "--device", "cpu", "--out", out])
    printed = capsys.readouterr().out
    result = read(out / "result.json")
    rows = read_csv(out / "predictions.csv")
    images = Counter(row["group"] for row in rows)
    correct = Counter(row["group"] for row in rows if row["class"] == row["predicted"])
    low, high = group_interval([correct[name] for name in images], list(images.values()))
    assert result["top1_interval"] == pytest.approx([low, high])
    assert result["test_groups"] == len(images)
    counts = f"{len(rows)} test images of {len(images)} groups"
    assert f"top-1 {result['top1']:.1f} % ({low:.1f} to {high:.1f}) on {counts}" in printed
    assert ("not clearly better than the baseline" in printed) == (low <= result["baseline_top1"])
    for number in (1, 2):
        fold = {"train": set(), "test": set()}
        for row in read_csv(out / f"trial/{number}.csv"):
            fold[row["split"]].add(row["group"])
        assert fold["test"]
        assert not fold["train"] & fold["test"]
        assert not set(images) & (fold["train"] | fold["test"])
    counts = f"{len(images)} groups of 20 groups, {len(rows)} of 120 images"
    lines = {line for line in caplog.messages if "held out are" in line}
    assert lines == {f"data.val_fraction: held out are {counts}"}
    assert "accuracy on held-out training images:\n  linear classifier: " in printed
