"""Features of any files by a run's backbone: idmm embed, idmm similar, idmm.embed."""

import numpy as np
import pytest
from folders import paint
from frozen import a_run, by_timm
from helpers import call, refused
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
    assert (
        call(["embed", "--init", run, images, "--out", tmp_path / "f.npz", "--batch_size", 4]) == 0
    )
    with np.load(tmp_path / "f.npz", allow_pickle=False) as found:
        assert sorted(found) == ["features", "paths"]
        assert found["paths"].tolist() == paths(images)
        features = found["features"]
    assert features.dtype == np.float32
    assert features.shape == (6, 32)
    assert features == pytest.approx(by_timm(run, paths(images)), abs=1e-5)
    assert capsys.readouterr().out == f"{tmp_path}/f.npz: 6 images, 32 features each\n"


def test_from_python(run, images):
    files = paths(images)
    found = idmm.embed(run, [files[0], Image.open(files[1]), np.array(Image.open(files[2]))])
    assert found.dtype == np.float32
    assert found == pytest.approx(by_timm(run, files[:3]), abs=1e-5)
    assert idmm.embed(run / "backbone.safetensors", images, batch_size=2).shape == (6, 32)
    assert idmm.embed(run, []).shape == (0, 32)


def test_mistakes(run, images, tmp_path, capsys):
    (tmp_path / "begun" / "last").mkdir(parents=True)
    lines = refused(
        capsys, ["embed", "--init", tmp_path / "begun", images, "--out", tmp_path / "f.csv"]
    )
    assert lines[0].startswith(
        f"init: '{tmp_path}/begun' is a run that is not finished (backbone.safetensors is"
    )
    assert lines[1:] == [
        f"out: '{tmp_path}/f.csv' is of an unknown kind, expected a file that ends in .npz"
    ]
    assert refused(capsys, ["embed", "--init", run, images])[0].startswith("out: missing")


def similar(capsys, *argv):
    assert call(["similar", *argv]) == 0
    said = capsys.readouterr()
    rows = [line.split("  ") for line in said.out.splitlines()]
    return [(path, float(cosine)) for cosine, path in rows], said.err


def test_nearest_first(run, images, tmp_path, capsys):
    files = paths(images)
    out = tmp_path / "s.png"
    rows, said = similar(capsys, "--init", run, files[0], images, "--top_k", 3, "--out", out)
    features = by_timm(run, files)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    cosines = features[1:] @ features[0]
    order = np.argsort(-cosines)[:3]
    assert [row[0] for row in rows] == [files[1 + i] for i in order], "the query is left out"
    assert [row[1] for row in rows] == pytest.approx(cosines[order], abs=1e-4)
    assert f"cosine, median of all {len(cosines)}: {np.median(cosines):.4f}" in said
    assert f"query: '{files[0]}' is among the images and is skipped there" in said
    assert read_image(out).pixels.shape[1] > 1000
    assert len(similar(capsys, "--init", run, files[0], *files[1:], out, "--out", out)[0]) == 5, (
        "without its figure"
    )


def test_mistakes_of_similar(run, images, tmp_path, capsys):
    files = paths(images)
    out = ["--out", tmp_path / "s.png"]
    (tmp_path / "bad.png").write_text("no image")
    for argv, line in [
        ([images, files[0]], f"query: '{images}' is no file, expected an image"),
        (
            [tmp_path / "none.png", images],
            f"query: '{tmp_path}/none.png' is no file, expected an image",
        ),
        (
            [files[0], files[0]],
            f"paths: there is no image but the query '{files[0]}'. Name images to compare it with",
        ),
        (
            [tmp_path / "bad.png", images],
            f"query: '{tmp_path}/bad.png' cannot be read (not an image)",
        ),
    ]:
        assert refused(capsys, ["similar", "--init", run, *argv, *out])[-1] == line
    line = "out: 's.jpg' is of an unknown kind, expected a file that ends in .png"
    assert refused(capsys, ["similar", "--init", run, files[0], images, "--out", "s.jpg"]) == [line]
    assert not (tmp_path / "s.png").exists()
