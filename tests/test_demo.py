"""The pictures, and the demo in miniature through the real command line."""

import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from helpers import ENVIRONMENT, ROOT, call, real, refused
from PIL import Image

from idmm.commands import crops, demo
from idmm.config import CropGroup, Data, FinetuneConfig, PretrainConfig, Views
from idmm.config.commands import DemoConfig
from idmm.config.parsing import build
from idmm.data.cache import load_split
from idmm.data.datasets import open_splits
from idmm.data.views import MultiCropTransform
from idmm.pictures import save
from idmm.report import pictures

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 1, "global_pool": "avg", "class_token": False}
QUICK = {"epochs": 1, "precision": "fp32", "device": "cpu", "warmup_epochs": 0}
PRETRAIN = {
    "data": {"workers": 0, "subset": {"total": 64}},
    "model": {"name": "vit_tiny_patch16_224", "kwargs": VIT},
    "train": QUICK,
    "views": {"size": 16, "crops": [{"count": 2, "scale": [0.4, 1.0]}]},
}
FINETUNE = {
    "data": {"workers": 0, "subset": {"per_class": 2}},
    "train": {**QUICK, "size": 16, "classifier_init": "random"},
}


@pytest.fixture(scope="module")
def store():
    data = Data(name="digits", subset={"total": 20})
    return load_split(open_splits(data, labelled=False).train, bound=None, data=data)


@pytest.fixture
def files(tmp_path):
    """The miniature's two YAML files, as flags."""
    argv = []
    for name, config in (("pretrain", PRETRAIN), ("finetune", FINETUNE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
        argv += [f"--{name}", str(tmp_path / f"{name}.yaml")]
    return argv


def pixels(path):
    """A PNG as an array, after the checks that hold for any picture."""
    with Image.open(path) as image:
        image.verify()
    with Image.open(path) as image:
        assert image.format == "PNG" and min(image.size) >= 300 and max(image.size) <= 3000
        array = np.asarray(image.convert("RGB"))
    assert array.std() > 5, "blank"
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []  # nothing left aside
    return array


def test_comparison_of_any_number_of_seeds(tmp_path, monkeypatch):
    said, files = [], []

    def kept(figure, path):
        said.append([text.get_text() for text in figure.legends[0].get_texts()])
        places = [float(bar[0].get_xdata()[0]) for bar in figure.axes[0].containers if hasattr(bar, "has_yerr")]
        joined = [line for line in figure.axes[0].lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 2]
        assert places == [0, 1] and not joined, "intervals at the middle of their bars; no line joins seeds"
        save(figure, path)

    monkeypatch.setattr(pictures, "save", kept)
    for some in (slice(3), slice(1), slice(1)):
        scores = {"scratch": [60.0, 62.0, 64.0][some], "IDMM": [80.0, 81.0, 79.0][some]}
        pictures.comparison(scores, tmp_path / "a.png", "title", 10.0)
        pixels(tmp_path / "a.png")
        files.append((tmp_path / "a.png").read_bytes())
    assert files[1] == files[2] != files[0], "the same twice, the second in place of the first"
    assert said[:2] == [["mean", "one seed", "± 1 standard deviation over seeds"], ["mean", "one seed"]]


def test_pyplot_is_left_alone():
    code = "import sys; import idmm.report.pictures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT).returncode == 0


@pytest.mark.parametrize(("mean", "std"), [([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ([0.45], [0.22])])
def test_crop_sheet_with_groups_and_cutmix(tmp_path, store, mean, std):
    groups = [CropGroup(count=2, scale=[0.3, 1.0]), CropGroup(count=1, scale=[0.1, 0.3])]
    views = Views(size=16, crops=groups)
    shapes = []
    for more in ({"cutmix_alpha": 0.5}, {"images": 3}):
        blocks = crops.crop_blocks(store, views, mean=mean, std=std, **more)
        pictures.image_sheet(blocks, tmp_path / "crops.png")
        shapes.append(pixels(tmp_path / "crops.png").shape)
    mixed, plain = shapes
    assert mixed[0] > plain[0] and mixed[1] > plain[1]


def test_crop_sheet_shows_what_the_loader_makes(store):
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    views = Views(size=16, crops=[CropGroup(count=2, scale=[0.3, 1.0])])
    made = MultiCropTransform(store, views, mean, std, 0)(0, np.arange(3))["views"][0]  # [3, 2, 3, 16, 16]
    plain = MultiCropTransform(store, views, [0.0] * 3, [1.0] * 3, 0)(0, np.arange(3))["views"][0]
    shown = crops._Shown(store, np.arange(3), mean, std).crops(made)
    assert len(shown) == 3 and len(shown[0]) == 2
    np.testing.assert_allclose(np.array(shown) / 255, plain.permute(0, 1, 3, 4, 2).numpy(), atol=0.51 / 255)


def test_a_miniature_demo_ends_with_its_result_and_goes_on(tmp_path, files, capsys, monkeypatch):
    monkeypatch.setattr(demo, "LEAST_GAIN", -100.0)
    out = tmp_path / "demo"
    argv = ["demo", "--out", out, "--seeds", 2, *files]
    assert call(argv) == 0
    said, log = capsys.readouterr()
    result = json.loads((out / "demo.json").read_text())
    assert len(result["idmm_top1"]) == len(result["scratch_top1"]) == 2 and 0 < result["seconds"] < 60
    assert result["gain"] == pytest.approx(np.mean(result["idmm_top1"]) - np.mean(result["scratch_top1"]))
    assert (result["unlabelled_images"], result["labelled_images"], result["test_images"]) == (64, 20, 360)
    assert "±" in said and f"{result['gain']:+.1f} points" in said
    for name in ("loss.png", "crops.png", "comparison.png"):
        pixels(out / name)
    begun = [re.sub(r"about \d+ s", "about T", line) for line in log.splitlines() if line.startswith("run ")]
    assert begun == [
        "run 1 of 6: seed 0, pretraining", "run 2 of 6: seed 0, fine-tuning from IDMM",
        "run 3 of 6: seed 0, fine-tuning from scratch; about T left", "run 4 of 6: seed 1, pretraining; about T left",
        "run 5 of 6: seed 1, fine-tuning from IDMM; about T left",
        "run 6 of 6: seed 1, fine-tuning from scratch; about T left",
    ]  # fmt: skip
    _check_runs(out)

    began = time.monotonic()
    assert call(argv) == 0
    assert time.monotonic() - began < 2
    assert capsys.readouterr().out == said

    (out / "comparison.png").unlink()  # a picture lost: drawn again from the finished runs
    shutil.rmtree(out / "scratch-1")  # a run lost: made again, to the same end
    assert call(argv) == 0
    again = json.loads((out / "demo.json").read_text())
    assert again["scratch_top1"] == result["scratch_top1"] and again["seconds"] > 0
    pixels(out / "comparison.png")

    assert call([*argv[:3], "--seeds", 1, *files]) == 0  # fewer seeds: part of what is there
    assert json.loads((out / "demo.json").read_text())["idmm_top1"] == result["idmm_top1"][:1]


def _check_runs(out):
    """The seed drives all three runs, the draw too; nothing but the start differs between two of a seed."""
    for seed in range(2):
        tuned = {name: yaml.safe_load((out / f"{name}-{seed}/config.yaml").read_text()) for name in ("idmm", "scratch")}
        pretrained = yaml.safe_load((out / f"pretrain-{seed}/config.yaml").read_text())
        assert pretrained["seed"] == tuned["idmm"]["seed"] == tuned["idmm"]["data"]["subset"]["seed"] == seed
        assert (tuned["idmm"].pop("init"), tuned["scratch"].pop("init")) == (str(out / f"pretrain-{seed}"), None)
        tuned["idmm"].pop("out"), tuned["scratch"].pop("out")
        assert tuned["idmm"] == tuned["scratch"]


def test_too_small_a_gain_is_a_failure_with_its_result_kept(tmp_path, files):
    out = tmp_path / "demo"
    argv = ["demo", "--out", out, "--seeds", 1, *files]
    done = real(*argv)
    gain = json.loads((out / "demo.json").read_text())["gain"]
    assert gain < 5, "an epoch of 64 images taught too much for this test"
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == f"demo: IDMM is {gain:+.1f} points from scratch, wanted at least +5"
    again = real(*argv)
    assert (again.returncode, again.stdout) == (1, done.stdout)  # the verdict of a finished demo stays


def test_missing_and_faulty_files_are_named_together(tmp_path, capsys):
    (tmp_path / "f.yaml").write_text("train: {epoch: 3, batch_size: none}\n")
    argv = ["demo", "--out", tmp_path / "o", "--pretrain", tmp_path / "p.yaml", "--finetune", tmp_path / "f.yaml"]
    lines = refused(capsys, argv)
    assert len(lines) == 3 and not (tmp_path / "o").exists()
    assert lines[0] == f"pretrain: cannot read '{tmp_path}/p.yaml' (No such file or directory); wanted a YAML file"
    assert all(line.startswith("finetune: train.") for line in lines[1:])


def test_fine_tuning_another_model_is_refused(tmp_path, files, capsys):
    other = {**FINETUNE, "model": {"name": "resnet18", "kwargs": {}}}
    (tmp_path / "finetune.yaml").write_text(yaml.safe_dump(other))
    assert call(["demo", "--out", tmp_path / "o", *files]) == 2
    assert "finetune: model.name is 'resnet18', pretraining's is 'vit_tiny_patch16_224'" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_the_configs_that_ship_are_sound():
    pretrain, finetune = build(PretrainConfig, DemoConfig().pretrain), build(FinetuneConfig, DemoConfig().finetune)
    assert pretrain.data.name == finetune.data.name == "digits"
    assert pretrain.data.subset is None and pretrain.data.val_fraction == finetune.data.val_fraction == 0
    assert finetune.data.subset.per_class == 10
    assert finetune.train.size == pretrain.views.size


def test_the_time_to_go_is_that_of_the_runs_without_a_result(tmp_path):
    done = {"pretrain": [{"seconds": 60}], "idmm": [{"seconds": 20}], "scratch": []}
    assert demo._to_go(tmp_path, 2, {**done, "idmm": []}) == ""
    for name in ("pretrain-0", "idmm-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").touch()
    assert demo._to_go(tmp_path, 2, done) == "; about 2 min left"  # 60 s and three times 20
