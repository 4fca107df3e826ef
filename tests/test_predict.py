"""A finished run on any files: idmm predict, and the classifier in Python."""

import csv
import io
import re
import shutil

import numpy as np
import pillow_heif
import pytest
import torch
from folders import TINY, opened, paint
from frozen import exported
from helpers import call_ok, column, inside_ok, refused
from PIL import Image
from pytest import approx

import idmm
from idmm.data.images import CentreCrop
from idmm.data.loaders import EvalTransform
from idmm.errors import RunError, UserError
from idmm.evaluation import predictor as inference

CLASSES = ("blue", "green", "red")
RUNS = {
    "rgb": {
        "stages": [
            {"size": 16},
            {"size": 24},
        ]
    },
    "grey": {
        "stages": [{"size": 16}],
        "data__in_chans": 1,
        "augment__crop_pct": 1.0,
    },
}


def file(folder, c, i, rng):
    """Writes an image mostly of a class's colour, of another kind of file for each number."""
    h = 20 + 7 * i % 23
    w = 20 + 11 * i % 31
    pixels = rng.integers(0, 120, (h, w, 3), dtype=np.uint8)
    pixels[:, :, 2 - c] += 120
    image = Image.fromarray(pixels)
    path = folder / f"{i:02d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    if i % 6 == 1:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(path := path.with_suffix(".jpg"), exif=exif)
    elif i % 6 == 2:
        image.putalpha(Image.fromarray(rng.integers(0, 256, (h, w), dtype=np.uint8)))
        image.save(path)
    elif i % 6 == 3:
        image.convert("L").save(path)
    elif i % 6 == 4:
        Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 4).save(path)
    else:
        image.save(path)
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for part, count in (
        ("train", 8),
        ("test", 7),
    ):
        for c, name in enumerate(CLASSES):
            for i in range(count):
                file(root / part / name, c, i, rng)
    return root


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """Classifiers of these images; and a pretrained backbone."""
    folder = tmp_path_factory.mktemp("runs")
    common = {
        **TINY,
        "data__root": str(images),
        "train__lr": 0.003,
        "train__epochs": 4,
        "train__eval_every": 4,
    }
    for name, changes in RUNS.items():
        inside_ok("finetune", folder / name, **{**common, **changes})
    common |= {
        "data__in_chans": None,
        "train__eval_every": None,
        "method__classifier_init": "random",
    }
    inside_ok("pretrain", folder / "pretrain", **{**common, "train__epochs": 1})
    return folder


def test_a_phone_photo_is_upright_in_every_path(runs, images, tmp_path):
    """Stored for training, predicted and embedded, in all of EXIF's orientations, and as HEIC."""
    upright = Image.open(images / "train/red/00.png").convert("RGB")
    # undone by the orientations 1 to 8
    back = [upright, *(upright.transpose(t) for t in (0, 3, 1, 5, 2, 6, 4))]
    for orientation, turned in enumerate(back, start=1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for part in ("train/a", "train/b"):
            path = tmp_path / f"d/{part}/{orientation}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            turned.save(path, exif=exif)
    heif = pillow_heif.from_pillow(turned)
    heif.save(
        tmp_path / "d/train/b/phone.heic",
        quality=-1,
        chroma=444,
        matrix_coefficients=0,
        exif=exif.tobytes(),
    )
    store = opened(tmp_path / "d")
    for i in range(16):
        assert torch.equal(store.image(i), store.image(0))
    assert len(store) == 17
    assert tuple(store.image(0).shape[1:]) == tuple(store.image(16).shape[1:]) == upright.size[::-1]
    photos = tmp_path / "d/train/b"
    call_ok(f"predict --init {runs}/rgb {photos} --out {tmp_path}/p.csv")
    rows = predicted((tmp_path / "p.csv").read_text())
    assert len({(row["class"], row["probability"]) for row in rows[:8]}) == 1
    assert float(rows[8]["probability"]) == approx(float(rows[0]["probability"]), abs=0.02)
    call_ok(f"embed --init {runs}/pretrain {photos} --out {tmp_path}/f.npz")
    features = np.load(tmp_path / "f.npz")["features"]
    np.testing.assert_allclose(
        features[:8], np.broadcast_to(features[0], features[:8].shape), atol=1e-5
    )
    np.testing.assert_allclose(features[8], features[0], atol=0.1)


def predicted(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    for row in rows:
        assert list(row) == ["path", "rank", "class", "probability"]
    return rows


def written(path):
    return predicted(path.read_text())


def by_the_run(run, images):
    """Names, pixels [N, C, S, S] and probabilities [N, K] of test images, by the run's own
    transform and timm."""
    model, info = exported(run)
    crop = CentreCrop(info["size"], info["crop_pct"])
    store = opened(
        images,
        crop,
        "test",
        keep="off",
        labelled=True,
        range=info["range"],
    )
    transform = EvalTransform(store, crop, info["mean"], info["std"])
    pixels = transform(0, np.arange(len(store)))["images"]
    with torch.inference_mode():
        return store.names, pixels, model(pixels).softmax(1).numpy()


@pytest.mark.parametrize("name", RUNS)
def test_what_the_run_itself_found(name, runs, images, tmp_path):
    """``idmm predict`` on a finished run's test files: its own classes, and its probabilities."""
    run = runs / name
    out = tmp_path / "p.csv"
    call_ok(f"predict --init {run} {images}/test --top_k 3 --out {out}")
    with open(run / "predictions.csv") as file:
        answers = {str(images / row["path"]): row for row in csv.DictReader(file)}
    rows = written(out)
    best = {row["path"]: row for row in rows if row["rank"] == "1"}
    assert {path: row["class"] for path, row in best.items()} == {
        path: row["predicted"] for path, row in answers.items()
    }
    for path, row in answers.items():
        if "probability" in row:
            assert float(best[path]["probability"]) == approx(float(row["probability"]), abs=1e-5)
    names, _, shares = by_the_run(run, images)
    known = dict(zip((str(images / name) for name in names), shares, strict=True))
    assert len(rows) == 3 * len(names)
    for row in rows:
        assert float(row["probability"]) == approx(
            known[row["path"]][CLASSES.index(row["class"])], abs=1e-5
        )


def test_ranks_and_order(runs, images, tmp_path, capsys):
    argv = f"predict --init {runs}/rgb --batch_size 4 {images}/test/red {images}/test/blue"
    call_ok(f"{argv} --top_k 2 --out {tmp_path}/new/p.csv")
    rows = written(tmp_path / "new" / "p.csv")
    expected = []
    for name in ("red", "blue"):
        for path in sorted((images / "test" / name).iterdir()):
            expected += [
                (str(path), "1"),
                (str(path), "2"),
            ]
    assert [(row["path"], row["rank"]) for row in rows] == expected
    for a, b in zip(rows[::2], rows[1::2], strict=True):
        assert float(a["probability"]) >= float(b["probability"])
    capsys.readouterr()
    call_ok(f"predict {images}/test --init {runs}/rgb --top_k 9")
    assert len(predicted(capsys.readouterr().out)) == 3 * 21  # as many ranks as there are classes


def test_unreadable_files_are_listed(runs, tmp_path, capsys):
    paint(tmp_path / "in" / "deep" / "down" / "good.png")
    (tmp_path / "in" / "bro\nken.jpg").write_bytes(b"\xff\xd8\xff no more")
    (tmp_path / "in" / "empty.png").touch()
    paint(tmp_path / "in" / ".hidden.png")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    argv = f"predict --init {runs}/rgb"
    call_ok(f"{argv} {tmp_path}/in")
    output = capsys.readouterr()
    assert column(predicted(output.out), "path") == [str(tmp_path / "in/deep/down/good.png")]
    assert "skipped 1 file of other kinds" in output.err
    lines = output.err[output.err.index("paths: skipped") :].splitlines()
    assert lines[0] == "paths: skipped 2 of 3 images that cannot be read:"
    assert lines[1].startswith(f"  {tmp_path}/in/bro\\nken.jpg: ")
    assert lines[2] == f"  {tmp_path}/in/empty.png: empty file"
    text_file = (
        tmp_path / "in" / "notes.txt"
    )  # a file that is named is tried, whatever it is called
    lines = refused(capsys, f"{argv} {text_file} {tmp_path}/in/empty.png --out {tmp_path}/p.csv")
    assert lines[0] == "paths: none of 2 images can be read:"
    assert lines[1:] == [f"  {text_file}: not an image", f"  {tmp_path}/in/empty.png: empty file"]
    assert not (tmp_path / "p.csv").exists()


def test_mistakes_are_told_together_before_the_work(runs, tmp_path, capsys):
    (tmp_path / "none").mkdir()
    argv = f"predict --init {runs}/pretrain {tmp_path}/none {tmp_path}/nowhere --out p.txt"
    assert refused(capsys, argv) == [
        f"init: '{runs}/pretrain' is a run without a classifier. Fine-tune it on labelled "
        "images first: "
        f"idmm finetune --config fast --init {runs}/pretrain --data.root DIR --out NEW",
        "out: 'p.txt' is of an unknown kind, expected a file that ends in .csv",
        f"paths: '{tmp_path}/none' has no images, expected at least one",
        f"paths: '{tmp_path}/nowhere' does not exist, expected images, or folders of images",
    ]


def test_runs_that_cannot_predict(runs, images, tmp_path, capsys):
    (tmp_path / "folds" / "fold-1").mkdir(parents=True)
    for run, reason in {
        tmp_path / "folds": f"holds k-fold runs. Give one of them ('{tmp_path}/folds/fold-1')",
        runs
        / "rgb"
        / "backbone.safetensors": "has no classifier: its JSON lists no classes, expected",
    }.items():
        (line,) = refused(capsys, f"predict --init {run} {images}")
        assert line.startswith(f"init: '{run}' {reason}")
    (line,) = refused(capsys, f"predict --init {runs}/rgb {images} --device mps")
    assert line.startswith("device: 'mps' is not available, expected one of ")


def test_three_lines_of_python(runs, images):
    classifier = idmm.load_classifier(runs / "rgb")
    path = images / "test" / "red" / "00.png"
    pixels = np.array(Image.open(path))
    predictions = classifier.predict([path, str(path), Image.open(path), pixels], top_k=2)
    assert predictions.classes == classifier.classes == list(CLASSES)
    assert predictions.paths == [str(path), str(path), None, None]
    assert predictions.probabilities.shape == (4, 3)
    for probabilities in predictions.probabilities:
        assert probabilities == approx(predictions.probabilities[0], abs=1e-6)
        assert probabilities.sum() == approx(1, abs=1e-5)
    one = classifier.predict(path)
    assert len(one.top) == 1
    assert predictions.labels == [one.label] * 4
    for prediction in predictions[-4:]:
        assert prediction.top[0] == (prediction.label, prediction.probability)
        assert len(prediction.top) == 2
        assert prediction.label == one.label
        assert prediction.probability == approx(one.probability)
    assert classifier.predict([]).probabilities.shape == (0, 3)
    folder = classifier.predict(images / "test")
    assert folder.paths == [str(path) for path in sorted((images / "test").rglob("*.*"))]
    array = classifier.predict(np.stack([pixels, 255 - pixels]))
    assert len(array) == 2
    assert array.probabilities[0] == approx(predictions.probabilities[0], abs=1e-6)


def test_what_python_refuses(runs, images, tmp_path):
    clf = idmm.load_classifier(runs / "rgb")
    good = images / "test" / "red" / "00.png"
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    for item, line in {
        (bad,): f"images: {bad}: not an image",
        (str(tmp_path / "none.png"),): f"images: {tmp_path}/none.png: no such file or directory",
        (3.0,): f"images: image 1 is float, {inference.PICTURES_EXPECTED}",
    }.items():
        with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
            clf.predict([good, *item])
    with pytest.raises(
        UserError, match=r"^images: image 0 is an array of float64, \[4, 4, 3\], expected a path"
    ):
        clf.predict([np.zeros((4, 4, 3))])
    with pytest.raises(UserError, match=f"^images: {bad}: not an image$"):
        clf.predict(bad, on_error="skip")  # there would be nothing left
    predictions = clf.predict([bad, good], on_error="skip")
    assert predictions.paths == [str(good)]
    assert predictions.unreadable == {str(bad): "not an image"}
    with pytest.raises(UserError, match="^on_error: got 'ignore', expected 'fail' or 'skip'$"):
        clf.predict(good, on_error="ignore")
    with pytest.raises(UserError, match="^top_k: got 0, expected 1 or more$"):
        clf.predict(good, top_k=0)


def test_out_of_memory_names_the_batch_size(runs, images, monkeypatch):
    clf = idmm.load_classifier(runs / "rgb")

    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(clf._network.model, "forward", full)
    with pytest.raises(
        RunError, match="out of memory with 64 images at a time. Try a smaller batch_size"
    ):
        clf.predict(images / "test")


def test_the_accuracy_is_of_folders_from_the_named_ones_on(runs, images, tmp_path, capsys):
    """A folder above them may be named like a class by chance."""
    shutil.copytree(images / "test", tmp_path / "red/new/test")
    shutil.copytree(images / "test/green", tmp_path / "red/new/other")
    init = f"predict --init {runs}/rgb --out {tmp_path}/p.csv"
    for path, count in (
        ("red/new", "on 21 of 28 images"),
        ("red/new/test/green", "on 7 images"),
        ("red/new/other", ""),
    ):
        call_ok(f"{init} {tmp_path}/{path}")
        errors = capsys.readouterr().err
        assert (
            f"{count} in folders named like classes" in errors
            if count
            else "accuracy" not in errors
        )
        assert "was trained on" not in errors
    call_ok(f"{init} {images}")
    trained_on = len(list((images / "train").rglob("*.*")))
    assert f"accuracy: the run was trained on {trained_on} of these" in capsys.readouterr().err
