"""``idmm export``: what other programs get, checked as they would run it, with torch and
without."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import frozen
import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import yaml
from helpers import ENVIRONMENT, ROOT, VIT, as_flags, call_ok, read, refused
from PIL import Image

from idmm.errors import RunError
from idmm.files import read_csv
from idmm.inference import export as command
from idmm.inference import export_model
from idmm.inference.export_model import Source

# names that would break a card's table, code and emphasis
CLASSES = ["a|b`c", "cat & dog", "zebra_*1*"]
SIDE = 32


SETTINGS = {
    "train.size": SIDE,
    "train.epochs": 3,
    "train.batch_size": 12,
    "train.lr": 0.003,
    "train.device": "cpu",
    "train.precision": "fp32",
    "train.warmup_epochs": 0,
    "data.workers": 0,
    "data.cache": "off",
    "augment.scale": [0.6, 1.0],
}


def trained(folder, root, name, kwargs, **changes):
    model = {
        "out": folder,
        "data.root": root,
        "model.name": name,
        "model.kwargs": kwargs,
    }
    call_ok(["finetune", *as_flags(SETTINGS | model, changes)])
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Opaque 8-bit pictures, wider than high or the other way: a base colour for each class, and
    noise."""
    root = tmp_path_factory.mktemp("photos") / "pets"
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 6)):
        for number, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                shape = (40 + 7 * (i % 2), 52 - 9 * (i % 3), 3)
                pixels = rng.integers(0, 120, shape, dtype=np.uint8)
                pixels[..., number] += 100
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory, photos):
    """A fine-tuned vision transformer; nothing may be written to it."""
    folder = tmp_path_factory.mktemp("run") / "pets_1"
    return trained(folder, photos, "vit_tiny_patch16_224", VIT)


def exported(out, init, kind, *more):
    call_ok(["export", "--init", init, "--format", kind, "--out", out, *more])
    return out


@pytest.fixture(scope="module")
def onnx_file(tmp_path_factory, run):
    return exported(tmp_path_factory.mktemp("onnx") / "new" / "m.onnx", run, "onnx")


@pytest.fixture(scope="module")
def hub(tmp_path_factory, run):
    return exported(tmp_path_factory.mktemp("hub") / "b", run, "hf")


def logits(run, images):
    with torch.inference_mode():
        return frozen.exported(run)[0](images)


def noise(count, channels=3):
    return torch.randn(
        count,
        channels,
        SIDE,
        SIDE,
        generator=torch.Generator().manual_seed(0),
    )


def test_onnx_gives_what_torch_gives_for_any_batch(run, onnx_file):
    session = onnxruntime.InferenceSession(onnx_file)
    (images,) = session.get_inputs()
    (output,) = session.get_outputs()
    assert (images.name, images.type) == ("images", "tensor(float)")
    assert images.shape[1:] == [3, SIDE, SIDE]
    assert isinstance(images.shape[0], str)
    assert (output.name, output.shape[1]) == ("logits", 3)
    for count in (1, 3, 40):
        (scores,) = session.run(None, {"images": noise(count).numpy()})
        np.testing.assert_allclose(scores, logits(run, noise(count)), atol=1e-4)


def test_onnx_tells_what_programs_need_to_know(onnx_file, run):
    model = onnx.load(onnx_file)
    onnx.checker.check_model(model, full_check=True)
    metadata = {prop.key: json.loads(prop.value) for prop in model.metadata_props}
    assert metadata["classes"] == CLASSES
    assert {
        "size": [SIDE, SIDE],
        "resize": 36,
        "interpolation": "bicubic",
        "mean": [0.485, 0.456, 0.406],
        "channels": "RGB",
        "layout": "NCHW",
    }.items() <= metadata["preprocessing"].items()
    assert model.opset_import[0].version == 18
    content = onnx_file.read_bytes()
    # nothing of this machine
    assert str(run.parent).encode() not in content
    assert b"site-packages" not in content
    assert list(onnx_file.parent.iterdir()) == [onnx_file]


def test_a_backbone_gives_features(whole, tmp_path):
    pretrained = whole["pretrain"]
    session = onnxruntime.InferenceSession(exported(tmp_path / "m.onnx", pretrained, "onnx"))
    (output,) = session.get_outputs()
    assert (output.name, output.shape[1]) == ("features", 32)
    assert "classes" not in session.get_modelmeta().custom_metadata_map
    card = (exported(tmp_path / "b", pretrained, "hf") / "README.md").read_text()
    assert "pipeline_tag: image-feature-extraction" in card
    assert not re.search("top-1|softmax", card)
    assert "- method: idmm\n" in card
    tuned = shutil.copytree(whole["finetune"], tmp_path / "tuned")
    config = (tuned / "config.yaml").read_text()
    (tuned / "config.yaml").write_text(config.replace("init: null", f"init: {pretrained}", 1))
    card = (exported(tmp_path / "f", tuned, "timm") / "README.md").read_text()
    assert "- started from: `pretrain`\n" in card


LEARNED = {
    "name": "resnet10t",
    "kwargs": {"channels": [8, 8, 8, 8]},
    "size": 32,
}
FROZEN = {key: LEARNED[key] for key in ("name", "kwargs")} | {"sizes": [16, 32]}
BACKBONES = {  # of each kind that the recipes use: its arguments, and how it starts
    "hog": ({}, "timm"),
    "hog_conv": (dict(learned=LEARNED, frozen=FROZEN), "timm"),
    "t2t_vit_7": (dict(embed_dim=16, depth=1, num_heads=2), "timm"),
    "cvt_13": (
        dict(embed_dims=[8, 8, 8], depths=[1, 1, 1], num_heads=[1, 1, 1]),
        "timm",
    ),
    "vit_tiny_patch16_224": (
        dict(patch_size=8, embed_dim=48, depth=1, num_heads=3),
        "structured",
    ),
    "deit_tiny_distilled_patch16_224": (
        dict(patch_size=8, embed_dim=16, depth=1, num_heads=2),
        "timm",
    ),
    "pvt_v2_b0": (
        dict(embed_dims=[8, 16, 20, 16], depths=[1] * 4, num_heads=[1] * 4),
        "timm",
    ),
    "swin_tiny_patch4_window7_224": (
        dict(embed_dim=8, depths=[1, 1], num_heads=[1, 1], window_size=4),
        "timm",
    ),
    "resnet50": (dict(layers=[1, 1, 1, 1]), "timm"),
}
OURS = ("hog", "hog_conv", "t2t_vit_7", "cvt_13")
PHOTO = f"test/{CLASSES[0]}/1.png"
WITHOUT_IDMM = """
import contextlib, io, json, runpy, sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "idmm":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
printed = {}
for path in sys.argv[1:]:
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            runpy.run_path(path)
    except ModuleNotFoundError as error:
        print(error, file=text)
    printed[path] = text.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def every(tmp_path_factory, photos):
    """A run of each backbone as ONNX and for timm, and what the code of each card prints without
    idmm. The Hub's folder has the same code."""
    folder = tmp_path_factory.mktemp("every")
    codes = []
    for name, (kwargs, start) in BACKBONES.items():
        run = trained(
            folder / name,
            photos,
            name,
            kwargs,
            train__epochs=1,
            model__start=start,
        )
        exported(run / "m.onnx", run, "onnx")
        card = (exported(run / "timm", run, "timm") / "README.md").read_text()
        (code,) = re.findall(r"(?s)```python\n(.*?)```", card)
        code = code.replace("PATH", str(run / "timm")).replace("photo.jpg", str(photos / PHOTO))
        codes.append(run / "card.py")
        codes[-1].write_text(code)
    command = [sys.executable, "-c", WITHOUT_IDMM, *map(str, codes)]
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_as_onnx_and_for_timm(name, every, photos, tmp_path, capsys):
    folder, printed = every
    run = folder / name
    call_ok(f"predict --init {run} {photos}/{PHOTO} --out {tmp_path}/p.csv")
    (row,) = read_csv(tmp_path / "p.csv")
    session = onnxruntime.InferenceSession(run / "m.onnx")
    (scores,) = session.run(None, {"images": noise(3).numpy()})
    np.testing.assert_allclose(scores, logits(run, noise(3)), atol=2e-3)
    needs = "only if the Python package idmm is installed"
    assert (needs in (run / "timm/README.md").read_text()) == (name in OURS)
    code = str(run / "card.py")
    answer = printed[code]
    if name in OURS:
        assert answer.startswith("idmm")  # is missing
        capsys.readouterr()
        runpy.run_path(code)
        answer = capsys.readouterr().out
    label, probability = answer.rsplit(maxsplit=1)
    assert label == row["class"]
    assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


def test_the_check_names_the_image_whose_class_changes(run):
    """A jump of one image's outputs that keeps its class is right, as hand-made features have
    steps."""
    source = Source(run)
    images, names, _ = export_model.checked_images(source)
    assert names[5].startswith("train/")
    outputs = logits(run, images).numpy()
    largest = np.abs(outputs).max()

    def checked(change):
        parts = iter(np.split(outputs + change, [1]))
        return export_model.check(source, lambda _: next(parts))

    jump = np.zeros_like(outputs)
    jump[5, outputs[5].argmax()] = 0.01 * largest
    assert "16 training images, the same classes, largest difference" in checked(jump)
    jump[5] = -2 * outputs[5]
    for change, line in (
        (jump, f"most for {names[5]} "),
        (0.002 * largest, "differ from torch's"),
        (np.nan, "differ from torch's"),
    ):
        with pytest.raises(RunError, match=re.escape(line)):
            checked(change)


def test_random_images_replace_training_images_that_are_gone(run, whole, tmp_path, capsys):
    for source, kind in ((run, "onnx"), (whole["pretrain"], "timm")):
        moved = shutil.copytree(source, tmp_path / f"moved_{kind}")
        config = read(moved / "config.yaml")
        config["data"] |= {"name": "folder", "root": str(tmp_path / "gone")}
        (moved / "config.yaml").write_text(yaml.safe_dump(config))
        capsys.readouterr()
        exported(tmp_path / f"{kind}.onnx", moved, kind)
        assert "16 random images, as the training images cannot be read" in capsys.readouterr().out


def test_a_model_that_timm_cannot_rebuild(run, tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("__init__() got an unexpected keyword argument 'global_pool'")

    monkeypatch.setattr("timm.models.save_for_hf", fail)
    argv = f"export --init {run} --format hf --out {tmp_path}/new"
    (line,) = refused(capsys, argv, code=1)
    assert line.startswith("format: vit_tiny_patch16_224 cannot be rebuilt by timm ")
    assert "'global_pool'" in line
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def phone(tmp_path_factory):
    """Photos that EXIF turns, each way, and pictures with opacity, none of them symmetrical."""
    root = tmp_path_factory.mktemp("phone")
    rng = np.random.default_rng(1)
    for number in range(24):
        pixels = rng.integers(0, 60, (37 + number, 48, 4), dtype=np.uint8)
        pixels[:14, :20, number % 3] += 190
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        Image.fromarray(pixels[..., :3]).save(root / f"{number}.jpg", exif=exif, quality=95)
        pixels[..., 3] = 10 * number
        pixels[:5, :9, 3] = 0
        Image.fromarray(pixels).save(root / f"{number}.png", exif=exif)
    image = Image.fromarray(pixels)
    image.convert("LA").save(root / "la.png")
    image.convert("L").save(root / "grey.jpg")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(root / "deep.png")
    image.convert("RGB").quantize(8).save(root / "palette.png", transparency=3)
    image.convert("CMYK").save(root / "cmyk.jpg")
    return root


@pytest.mark.parametrize("name", ["grey", "colour", "padded"])
def test_the_example_agrees_with_predict(name, run, photos, phone, tmp_path_factory, capsys):
    """examples/classify_onnx.py on photos of phones and pictures with opacity, by classifiers of
    RGB and of grey."""
    folder = tmp_path_factory.mktemp(name)
    if name == "grey":
        grey = dict(data__in_chans=1, augment__crop_pct=0.7, train__epochs=4)
        run = trained(folder / "run", photos, "resnet10t", LEARNED["kwargs"], **grey)
    if name == "padded":
        padded = dict(augment__crop_mode="pad", augment__crop_pct=0.9, train__epochs=4)
        run = trained(folder / "run", photos, "resnet10t", LEARNED["kwargs"], **padded)
    onnx_file = exported(folder / "m.onnx", run, "onnx")
    call_ok(f"predict --init {run} {phone} --out {folder}/p.csv")
    rows = read_csv(folder / "p.csv")
    broken = folder / "broken.jpg"
    broken.write_bytes(b"no image")
    command = [
        sys.executable,
        ROOT / "examples/classify_onnx.py",
        onnx_file,
        broken,
    ]
    command += [row["path"] for row in rows]
    done = subprocess.run([*map(str, command)], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{broken}: ")
    assert done.stderr.count("\n") == 1
    assert len(rows) == 53
    assert len({row["class"] for row in rows}) > 1
    assert len({row["probability"][:6] for row in rows}) > 40
    for row, line in zip(rows, done.stdout.splitlines(), strict=True):
        path, label, probability = line.rsplit(",", 2)
        assert (path, label) == (row["path"], row["class"])
        assert float(probability) == pytest.approx(float(row["probability"]), abs=2e-4)


def test_timm_loads_the_folder(run, hub, tmp_path, monkeypatch):
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(model(noise(4)), logits(run, noise(4)))
    assert model.pretrained_cfg["label_names"] == CLASSES
    looks = timm.data.resolve_model_data_config(model)
    assert looks["input_size"] == (3, SIDE, SIDE)
    assert looks["crop_pct"] == 0.875
    names = ["README.md", "config.json", "model.safetensors"]
    assert sorted(path.name for path in hub.iterdir()) == names
    monkeypatch.chdir(tmp_path)
    call_ok(f"export --init {run} --format timm --out .")
    assert sorted(os.listdir()) == names


def test_the_card_tells_what_was_measured(run, hub, photos):
    result = read(run / "result.json")
    _, front, text = (hub / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["library_name"] == "timm"
    assert front["pipeline_tag"] == "image-classification"
    low, high = result["top1_interval"]
    for part in (
        f"**{result['top1']:.2f} %** (95 % interval {low:.2f} to {high:.2f}) of 18 test images",
        f"hand-made features: {result['baseline_top1']:.2f} %",
        "- dataset: `pets`, 24 training images\n",
        "`a|b'c`, `cat & dog`, `zebra_*1*`.",
        "# `pets_1`",
    ):
        assert part in text
    assert str(photos.parent) not in text
    assert "pip install" not in text


def test_what_is_not_torchs_is_not_written(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(export_model, "TOLERANCE", -1.0)
    for kind, out in (("onnx", "m.onnx"), ("timm", "deep/b")):
        argv = f"export --init {run} --format {kind} --out {tmp_path}/new/{out}"
        (line,) = refused(capsys, argv, code=1)
        assert "outputs differ from torch's" in line
        assert "largest difference" in line
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_bad_out(run, tmp_path, capsys):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "full/notes").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    ending = "is of an unknown kind, expected a file that ends in"
    for kind, name, why in [
        ("onnx", "m.pt", f"'OUT' {ending} .onnx"),
        ("onnx", "folder.onnx", "'OUT' is a folder, expected a file"),
        ("timm", "full", "'OUT' exists and is not empty. Name a new folder"),
        (
            "hf",
            "file",
            "cannot write 'OUT', because 'OUT' is not a folder. Name another place",
        ),
    ]:
        out = tmp_path / name
        lines = refused(capsys, f"export --init {run} --format {kind} --out {out}")
        assert lines == [f"out: {why.replace('OUT', str(out))}"]
        assert sorted(tmp_path.rglob("*")) == before


def test_bad_run(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    shutil.copytree(run, tmp_path / "begun")
    (tmp_path / "begun/result.json").unlink()
    out = tmp_path / "new"
    for name, why in (
        ("gone", "does not exist"),
        ("empty", "has no backbone.safetensors"),
        ("begun", "has no result.json"),
        ("begun/model.safetensors", "has no result.json"),
    ):
        init = tmp_path / name
        (line,) = refused(capsys, f"export --init {init} --format hf --out {out}")
        assert line.startswith((f"init: '{init}'", f"{init}: "))
        assert why in line
    assert not out.exists()


def test_without_the_extra(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "NEEDED", ("onnx", "no_such_library"))
    argv = f"export --init {run} --format onnx --out {tmp_path}/m.onnx"
    (line,) = refused(capsys, argv)
    assert line.startswith("format: onnx: needs no_such_library. Install it with: pip install ")
