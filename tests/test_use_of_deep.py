"""Runs on deep pictures and on chosen channels, used: exports, files and arrays."""

import subprocess
import sys

import numpy as np
import pytest
import tifffile
from folders import tuned
from helpers import ENVIRONMENT, ROOT, call_ok, column, read, refused
from PIL import Image

import idmm
from idmm.errors import UserError
from idmm.files import read_csv as rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]
LONG = {
    "train__epochs": 12,
    "train__lr": 0.01,
    "augment__mixup_alpha": 0.0,
    "augment__cutmix_alpha": 0.0,
}
TOP = 3000  # of the deep pictures
WITHOUT_TORCH = """
import runpy, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchvision", "timm", "idmm", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Gone())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


CLASSES = ("crypts", "lumen", "stroma")  # which a channel tells apart


def bands(number, seed, channels=7):
    """An image of a class, uint16 [24, 28, C] of values up to 4095, as sensors of 12 bits have
    them."""
    rng = np.random.default_rng([number, seed])
    image = rng.integers(100, 900, (24, 28, channels))
    top, left = rng.integers(0, (12, 14))
    image[top : top + 12, left : left + 14, number % channels] += 2500
    return (image * np.linspace(1, 0.4, channels)).astype(np.uint16)  # some channels are darker


def band_tree(root, train=1, test=1, channels=7):
    """Makes ROOT/SPLIT/CLASS/*.tif whose channels are pages or samples, by turns."""
    for split, first, count in (
        ("train", 0, train),
        ("test", 1000, test),
    ):
        for number, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                image = bands(number, first + i, channels)
                planes = {} if i % 2 else {"planarconfig": "contig"}
                image = np.moveaxis(image, 2, 0) if i % 2 else image
                tifffile.imwrite(
                    root / split / name / f"{i}.tif", image, photometric="minisblack", **planes
                )
    return root


def grey(bright, seed):
    """An X-ray, say: uint16 [H, W] of values from 400 to 3000, some of which are a bright
    square."""
    image = np.random.default_rng([bright, seed]).integers(400, 900, (20, 26)).astype(np.uint16)
    image[5:15, 4:18] += 1800 * bright
    image[0, 0], image[-1, -1] = 400, TOP
    return image


@pytest.fixture(scope="module")
def xrays(tmp_path_factory):
    root = tmp_path_factory.mktemp("xrays") / "d"
    for split, first, count in (
        ("train", 0, 10),
        ("test", 100, 4),
    ):
        for bright, name in enumerate(("clear", "node")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(grey(bright, first + i)).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return band_tree(tmp_path_factory.mktemp("tiles") / "d", train=6, test=3)


@pytest.fixture(scope="module")
def runs(xrays, tiles, tmp_path_factory):
    """Of deep pictures, and of three of seven bands."""
    folder = tmp_path_factory.mktemp("runs")
    assert tuned(folder / "rgb", xrays, **LONG) == 0
    assert (
        tuned(
            folder / "some",
            tiles,
            **LONG,
            data__bands=[2, 0, 1],
        )
        == 0
    )
    return folder


def ran(*argv):
    argv = [sys.executable, "-c", WITHOUT_TORCH, *argv]
    done = subprocess.run(
        argv,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["rgb", "some"])
def test_the_example(runs, xrays, tiles, tmp_path, name):
    """examples/classify_onnx.py gives the run's own classes, without torch."""
    run = runs / name
    root = tiles if name == "some" else xrays
    answers = rows(run / "predictions.csv")
    files = []
    for n, row in enumerate(answers):  # a third of them as .npy, of bands by turns [C, H, W]
        files.append(root / row["path"])
        if n % 3 == 0:
            image = (
                np.asarray(Image.open(files[-1])) if name != "some" else tifffile.imread(files[-1])
            )
            files[-1] = tmp_path / f"{n}.npy"
            np.save(files[-1], image)
    for kind, out in (
        ("hf", tmp_path / "hf"),
        ("onnx", tmp_path / "m.onnx"),
    ):
        call_ok(f"export --init {run} --format {kind} --out {out}")

    printed = ran("examples/classify_onnx.py", tmp_path / "m.onnx", *files)
    lines = [line.split(",")[1:] for line in printed.splitlines()]
    assert [label for label, _ in lines] == column(answers, "predicted")
    assert [float(p) for _, p in lines] == pytest.approx(
        [float(row["probability"]) for row in answers], abs=2e-3
    )
    text = (tmp_path / "hf" / "README.md").read_text()
    kind = "images of 3 channels into 3" if name == "some" else "images into 2"
    assert (
        f"A classifier of {kind} classes" in text and "image = ...  # [1, C, H, W], by hand" in text
    )


def test_files_of_other_channels_are_refused(runs, tiles, tmp_path, capsys):
    run = runs / "some"
    for stem in ("model", "backbone"):
        assert read(run / f"{stem}.json")["file_channels"] == 7
    image = bands(1, 5)
    np.save(tmp_path / "four.npy", image[..., :4])
    np.save(tmp_path / "seven.npy", np.moveaxis(image, 2, 0))
    line = f"  {tmp_path}/four.npy: has 4 channels, expected 7"
    for command in ("predict", "embed"):
        out = tmp_path / {"predict": "p.csv", "embed": "f.npz"}[command]
        call_ok(f"{command} --init {run} {tmp_path}/four.npy {tmp_path}/seven.npy --out {out}")
        assert line in capsys.readouterr().err.splitlines()
    argv = f"--init {run} {tmp_path}/seven.npy {tmp_path}/four.npy --out {tmp_path}/s.png"
    assert refused(capsys, f"similar {argv}")[-1] == line
    clf = idmm.load_classifier(run)
    with pytest.raises(UserError, match=r"^images: the image: has 4 channels, expected 7$"):
        clf.predict(image[..., :4])


def test_arrays_of_pictures(runs, xrays):
    clf = idmm.load_classifier(runs / "rgb")
    deep = grey(1, 0)
    expected = clf.predict(xrays / "train" / "node" / "0.png").probability
    for image in (deep, np.dstack([deep] * 3), Image.fromarray(deep)):
        assert clf.predict(image).probability == expected
    expected = (
        r"^images: the image is an array of float32, \[20, 26\], expected .* or \[H, "
        r"W\] of uint8 or uint16$"
    )
    with pytest.raises(UserError, match=expected):
        clf.predict(deep.astype(np.float32))


def test_predict_needs_no_flag(runs, tiles, tmp_path):
    """The run's own classes and probabilities, from files of seven channels."""
    call_ok(f"predict --init {runs}/some {tiles}/test --out {tmp_path}/p.csv")
    predictions = {row["path"]: row for row in rows(tmp_path / "p.csv")}
    answers = rows(runs / "some" / "predictions.csv")
    assert len(predictions) == len(answers) == 9
    for row in answers:
        mine = predictions[str(tiles / row["path"])]
        assert mine["class"] == row["predicted"]
        assert float(mine["probability"]) == pytest.approx(float(row["probability"]), abs=1e-4)
