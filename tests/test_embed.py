"""Features of any files by a run's backbone: idmm embed, idmm similar, idmm.embed."""

import numpy as np
import pytest
from folders import paint
from frozen import a_run, by_timm
from helpers import call_ok, refused
from PIL import Image

import idmm
from idmm.data.images import read_image

SIZES = [(40, 31), (24, 24), (31, 60), (90, 33), (18, 18), (25, 47)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("run"), size=24)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for i, size in enumerate(SIZES):
        paint(root / f"{'ab'[i % 2]}" / f"{i}.png", seed=i, size=size)
    return root


def paths(images):
    return [str(path) for path in sorted(images.rglob("*.png"))]


def test_arrays(run, images, tmp_path, capsys):
    call_ok(f"embed --init {run} {images} --out {tmp_path}/f.npz --batch_size 4")
    with np.load(tmp_path / "f.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == ["features", "paths"]
        assert arrays["paths"].tolist() == paths(images)
        features = arrays["features"]
    assert features.dtype == np.float32
    assert features.shape == (6, 32)
    assert features == pytest.approx(by_timm(run, paths(images)), abs=1e-5)
    assert capsys.readouterr().out == f"{tmp_path}/f.npz: 6 images, 32 features each\n"


def test_from_python(run, images):
    files = paths(images)
    features = idmm.embed(run, [files[0], Image.open(files[1]), np.array(Image.open(files[2]))])
    assert features.dtype == np.float32
    assert features == pytest.approx(by_timm(run, files[:3]), abs=1e-5)
    assert idmm.embed(run / "backbone.safetensors", images, batch_size=2).shape == (6, 32)
    assert idmm.embed(run, []).shape == (0, 32)


def test_mistakes(run, images, tmp_path, capsys):
    begun = tmp_path / "begun"
    (begun / "last").mkdir(parents=True)
    run_fault, kind_fault = refused(capsys, f"embed --init {begun} {images} --out f.csv")
    why = "is a run that is not finished (backbone.safetensors is"
    assert run_fault.startswith(f"init: '{begun}' {why}")
    assert kind_fault == "out: 'f.csv' is of an unknown kind, expected a file that ends in .npz"
    assert refused(capsys, f"embed --init {run} {images}")[0].startswith("out: missing")


def similar(capsys, argv):
    call_ok(f"similar {argv}")
    printed = capsys.readouterr()
    rows = [line.split("  ") for line in printed.out.splitlines()]
    return [(path, float(cosine)) for cosine, path in rows], printed.err


def test_nearest_first(run, images, tmp_path, capsys):
    files = paths(images)
    out = tmp_path / "s.png"
    rows, log = similar(capsys, f"--init {run} {files[0]} {images} --top_k 3 --out {out}")
    features = by_timm(run, files)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    cosines = features[1:] @ features[0]
    order = np.argsort(-cosines)[:3]
    assert [row[0] for row in rows] == [files[1 + i] for i in order], "the query is left out"
    assert [row[1] for row in rows] == pytest.approx(cosines[order], abs=1e-4)
    assert f"cosine, median of all {len(cosines)}: {np.median(cosines):.4f}" in log
    assert f"query: '{files[0]}' is among the images and is skipped there" in log
    assert read_image(out).pixels.shape[1] > 1000
    every = " ".join(map(str, files))
    rows, _ = similar(capsys, f"--init {run} {every} {out} --out {out}")
    assert len(rows) == 5, "without its figure"


def test_mistakes_of_similar(run, images, tmp_path, capsys):
    files = paths(images)
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    alone = f"there is no image but the query '{files[0]}'. Name images to compare it with"
    for words, line in [
        (f"{images} {files[0]}", f"query: '{images}' is no file, expected an image"),
        (f"{files[0]} {files[0]}", f"paths: {alone}"),
        (f"{bad} {images}", f"query: '{bad}' cannot be read (not an image)"),
    ]:
        argv = f"similar --init {run} {words} --out {tmp_path}/s.png"
        assert refused(capsys, argv)[-1] == line
    line = "out: 's.jpg' is of an unknown kind, expected a file that ends in .png"
    assert refused(capsys, f"similar --init {run} {files[0]} {images} --out s.jpg") == [line]
    assert not (tmp_path / "s.png").exists()
