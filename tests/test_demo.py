"""The pictures, and what the demo makes of what ``idmm train`` finds (tests/test_train.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import VIT, call, refused
from PIL import Image

import idmm
from idmm.commands import crops, demo
from idmm.config import CropGroup, Data, Views
from idmm.data.cache import load_split
from idmm.data.datasets import open_splits
from idmm.data.views import MultiCropTransform


@pytest.fixture(scope="module")
def store():
    data = Data(name="digits", subset={"total": 20})
    return load_split(open_splits(data, labelled=False).train, bound=None, data=data)


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


def test_crop_sheet_shows_what_the_loader_makes(store):
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    views = Views(size=16, crops=[CropGroup(count=2, scale=[0.3, 1.0])])
    made = MultiCropTransform(store, views, mean, std, 0)(0, np.arange(3))["views"][0]  # [3, 2, 3, 16, 16]
    plain = MultiCropTransform(store, views, [0.0] * 3, [1.0] * 3, 0)(0, np.arange(3))["views"][0]
    shown = crops._Shown(store, np.arange(3), mean, std).crops(made)
    assert len(shown) == 3 and len(shown[0]) == 2
    np.testing.assert_allclose(np.array(shown) / 255, plain.permute(0, 1, 3, 4, 2).numpy(), atol=0.51 / 255)


@pytest.fixture
def trained(monkeypatch):
    """``idmm train`` with runs of an epoch, of 64 images and of 20; returns what it was asked for."""
    asked = []

    def train(given):
        asked.append(given)
        out, kept = Path(given.out), {}
        quick = {"epochs": 1, "precision": "fp32", "device": "cpu", "warmup_epochs": 0}
        model = {"name": "vit_tiny_patch16_224", "kwargs": VIT}
        given = {"seed": given.seed, "model": model, "resume": "auto"}
        views = {"size": 16, "crops": [{"count": 2, "scale": [0.4, 1.0]}]}
        data = {"root": asked[-1].data.root, "workers": 0, "subset": {"total": 64}}
        idmm.pretrain({**given, "out": str(out / "stage1"), "data": data, "views": views, "train": quick})
        tuned = {**given, "data": {**data, "subset": {"per_class": 2}}, "train": {**quick, "size": 16}}
        kept["result"] = idmm.finetune({**tuned, "out": str(out)})
        kept["scratch"] = idmm.finetune({**tuned, "out": str(out / "scratch")})
        return kept | {"counts": {"images": 1437, "labelled": 50}}

    monkeypatch.setattr(demo, "train", train)
    return asked


def test_the_demo_says_what_was_found_and_draws_it(tmp_path, trained, capsys, monkeypatch):
    monkeypatch.setattr(demo, "LEAST_GAIN", -100.0)
    out = tmp_path / "demo"
    argv = ["demo", "--out", out, "--seeds", 2]
    assert call(argv) == 0
    said = capsys.readouterr().out
    assert [(one.seed, one.data.labelled.seed, one.data.labelled.per_class) for one in trained] == [
        (0, 0, 5),
        (1, 1, 5),
    ]
    assert all(one.compare and one.minutes == 1 and one.flip == 0 for one in trained)
    result = json.loads((out / "demo.json").read_text())
    runs = {name: [json.loads((out / f"seed-{seed}" / name / "result.json").read_text()) for seed in (0, 1)]
            for name in ("", "scratch")}  # fmt: skip
    assert result["idmm_top1"] == [run["top1"] for run in runs[""]]
    assert result["scratch_top1"] == [run["top1"] for run in runs["scratch"]]
    assert result["pixel_knn"] == [run["pixel_knn"] for run in runs["scratch"]]
    others = max(np.mean(result["scratch_top1"]), np.mean(result["pixel_knn"]))
    assert result["gain"] == pytest.approx(np.mean(result["idmm_top1"]) - others)
    assert (result["images"], result["labelled_images"], result["test_images"]) == (1437, 50, 360)
    assert "±" in said and f"{result['gain']:+.1f} points" in said
    for name in demo.PICTURES:
        pixels(out / name)
        (out / name).unlink()
    assert call(argv) == 0
    assert capsys.readouterr().out == said and all((out / name).exists() for name in demo.PICTURES)


def test_the_digits_lie_as_ones_own_images_would(tmp_path):
    demo._write_images(tmp_path / "images")
    digits = open_splits(Data(name="digits"), labelled=True).parts
    found = open_splits(Data(root=str(tmp_path / "images")), labelled=True).parts
    for part, split in digits.items():
        order = np.argsort([int(Path(name).stem) for name in found[part].names])
        assert [found[part].classes[found[part].labels[i]] for i in order] == [split.classes[c] for c in split.labels]
        for place in (0, len(split) - 1):
            with Image.open(found[part].items[order[place]]) as image:
                np.testing.assert_array_equal(np.asarray(image), np.squeeze(split.items[place]))


def test_too_small_a_gain_is_a_failure_with_its_result_kept(tmp_path, trained, capsys):
    assert call(["demo", "--out", tmp_path / "demo"]) == 1
    gain = json.loads((tmp_path / "demo" / "demo.json").read_text())["gain"]
    assert gain < 5, "an epoch of 20 images taught too much for this test"
    wanted = f"demo: {gain:+.1f} points from the better of scratch and raw pixels, wanted at least +5; more minutes"
    assert capsys.readouterr().err.splitlines()[-1].startswith(wanted)


def test_bad_flags_write_nothing(tmp_path, capsys):
    lines = refused(capsys, ["demo", "--out", tmp_path / "o", "--minutes", 0, "--seeds", 0])
    assert [line.split(":")[0] for line in lines] == ["minutes", "seeds"] and not (tmp_path / "o").exists()
