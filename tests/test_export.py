"""``idmm export``: what other programs get, checked as they would run it, with torch and without."""

import csv
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import frozen
import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import yaml
from helpers import ENVIRONMENT, ROOT, call, refused
from PIL import Image

from idmm.commands import export as command
from idmm.config import parsing
from idmm.errors import install
from idmm.export import card, graph
from idmm.export.source import Sample, Source
from idmm.models import create_backbone
from idmm.seeding import seeded

CLASSES = ["a|b`c", "cat & dog", "zebra_*1*"]  # names that would break a card's table, code and emphasis
SIDE = 32
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


def trained(folder, root, name, kwargs, epochs=3, *more):
    argv = ["finetune", "--data.root", root, "--out", folder, "--model.name", name, "--model.kwargs", kwargs]
    argv += ["--train.size", SIDE, "--train.epochs", epochs, "--train.batch_size", 12, "--train.lr", 0.003]
    argv += ["--train.device", "cpu", "--train.precision", "fp32", "--train.warmup_epochs", 0, "--data.workers", 0]
    assert call([*argv, "--augment.scale", "[0.6, 1.0]", "--data.cache", "ram", *more]) == 0
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Opaque 8-bit pictures, wider than high or the other way: a base colour for each class, and noise."""
    root, rng = tmp_path_factory.mktemp("photos") / "pets", np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 6)):
        for number, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 120, (40 + 7 * (i % 2), 52 - 9 * (i % 3), 3), dtype=np.uint8)
                pixels[..., number] += 100
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory, photos):
    """A fine-tuned vision transformer; nothing may be written to it."""
    folder = tmp_path_factory.mktemp("run") / "pets_1"
    kwargs = "{patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}"
    return trained(folder, photos, "vit_tiny_patch16_224", kwargs)


def exported(out, init, kind, *more):
    assert call(["export", "--init", init, "--format", kind, "--out", out, *more]) == 0
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
    return torch.randn(count, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------- ONNX
def test_onnx_gives_what_torch_gives_for_any_batch(run, onnx_file):
    session = onnxruntime.InferenceSession(onnx_file)
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(float)", [3, SIDE, SIDE])
    assert (made.name, made.shape[1]) == ("logits", 3) and isinstance(given.shape[0], str)
    for count in (1, 3, 40):
        found = session.run(None, {"images": noise(count).numpy()})[0]
        np.testing.assert_allclose(found, logits(run, noise(count)), atol=1e-4)


def test_onnx_tells_what_programs_need_to_know(onnx_file, run):
    model = onnx.load(onnx_file)
    onnx.checker.check_model(model, full_check=True)
    told = {prop.key: json.loads(prop.value) for prop in model.metadata_props}
    assert told["classes"] == CLASSES
    looks = told["preprocessing"]
    assert looks["size"] == [SIDE, SIDE] and looks["resize"] == 36 and looks["interpolation"] == "bicubic"
    assert looks["mean"] == [0.485, 0.456, 0.406] and looks["channels"] == "RGB" and looks["layout"] == "NCHW"
    about = told["about"]
    assert about["run"] == "pets_1" and about["opset"] == model.opset_import[0].version == 18
    assert about["checked"]["what"] == "18 test images" and about["checked"]["agreement"] == 1.0
    content = onnx_file.read_bytes()
    assert str(run.parent).encode() not in content and b"site-packages" not in content  # nothing of this machine
    assert list(onnx_file.parent.iterdir()) == [onnx_file]


def test_the_documented_lines_run_without_torch(run, onnx_file, photos, tmp_path):
    """They stand in docs/export.md, and name the classes of predictions.csv."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", (ROOT / "docs" / "export.md").read_text())
    lines = next(block for block in blocks if "sys.argv[1]" in block)
    (tmp_path / "lines.py").write_text(lines)
    with open(run / "predictions.csv", newline="") as file:
        wanted = list(csv.DictReader(file))
    files = [next(photos.rglob(f"test/{row['class']}/{row['path'].rpartition('/')[2]}")) for row in wanted]
    argv = [sys.executable, "-c", WITHOUT_TORCH, tmp_path / "lines.py", onnx_file, *files]
    done = subprocess.run(argv, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [line.rsplit(",", 2) for line in done.stdout.splitlines()]
    assert [name for _, name, _ in found] == [row["predicted"] for row in wanted] and len(found) == 18
    for (_, _, share), row in zip(found, wanted, strict=True):
        assert abs(float(share) - float(row["probability"])) < 1e-3


def test_what_is_printed(run, tmp_path, capsys):
    exported(tmp_path / "m.onnx", run, "onnx", "--data.root", tmp_path / "gone")
    said = capsys.readouterr()
    assert "images [N, 3, 32, 32] -> logits [N, 3]" in said.out and "opset 18" in said.out
    assert "on noise" in said.out and "same top class on 100.0 %" in said.out
    assert "checked on noise" in said.err and "--data.root DIR" in said.err and len(said.err.splitlines()) == 1


def test_a_backbone_gives_features(whole, tmp_path):
    file = exported(tmp_path / "m.onnx", whole["pretrain"], "onnx")
    session = onnxruntime.InferenceSession(file)
    assert session.get_outputs()[0].name == "features" and session.get_outputs()[0].shape[1] == 32
    assert "classes" not in session.get_modelmeta().custom_metadata_map
    text = (exported(tmp_path / "b", whole["pretrain"], "hf") / "README.md").read_text()
    assert "pipeline_tag: image-feature-extraction" in text and "Accuracy" not in text and "softmax" not in text


FAMILIES = {
    "deit_tiny_distilled_patch16_224": (32, dict(patch_size=8, embed_dim=16, depth=1, num_heads=2)),
    "pvt_v2_b0": (32, dict(embed_dims=(8, 16, 20, 16), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))),
    "t2t_vit_7": (32, dict(embed_dim=16, depth=1, num_heads=2)),
    "cvt_13": (32, dict(embed_dims=(8, 8, 8), depths=(1, 1, 1), num_heads=(1, 1, 1))),
    "swin_tiny_patch4_window7_224": (32, dict(embed_dim=8, depths=(1, 1), num_heads=(1, 1), window_size=4)),
    "resnet50": (32, dict(layers=(1, 1, 1, 1))),
}


def source_of(name, size, **kwargs):
    """A network without a run, as :mod:`idmm.export.graph` takes it."""
    with seeded(0):
        model = create_backbone(name, size, drop_path=0.1, num_classes=5, **kwargs).eval()
    source = Source.__new__(Source)
    source.model, source.size, source.classes = model, size, list("abcde")
    source.saved = SimpleNamespace(name=name, in_chans=3, source="run", extra={})
    return source


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_exports(name, monkeypatch):
    """The backbones of the recipes, by torch's current exporter, with a batch of any size."""
    size, kwargs = FAMILIES[name]
    monkeypatch.setattr(graph, "_by_tracing", lambda source: pytest.fail("the older exporter"))
    source = source_of(name, size, **kwargs)
    images = torch.randn(6, 3, size, size, generator=torch.Generator().manual_seed(1))
    proto, check = graph.onnx_model(source, Sample(images, "noise"))
    assert check.difference < 1e-4 and proto.opset_import[0].version == graph.OPSET


def test_the_older_exporter_where_the_current_one_fails(monkeypatch):
    def fails(source):
        raise ValueError("no such operator")

    monkeypatch.setattr(graph, "_by_export", fails)
    source = source_of("vit_tiny_patch16_224", 32, patch_size=8, embed_dim=16, depth=1, num_heads=2)
    sample = Sample(noise(5), "noise")
    assert graph.onnx_model(source, sample)[1].agreement == 1.0
    monkeypatch.setattr(graph, "_by_tracing", fails)
    with pytest.raises(graph.RunError, match="cannot be written as ONNX by torch .*: ValueError: no such operator"):
        graph.onnx_model(source, sample)


# ---------------------------------------------------------------------- 8 bits
def test_int8_is_measured(run, tmp_path, capsys):
    file = exported(tmp_path / "m.onnx", run, "onnx", "--int8", "true")
    said = capsys.readouterr().out
    told = json.loads(onnxruntime.InferenceSession(file).get_modelmeta().custom_metadata_map["int8"])
    assert told["method"] == "dynamic" and told["images"] == 18 and told["speed"] > 0
    top1 = json.loads((run / "result.json").read_text())["top1"]
    assert told["float32"]["top1"] == pytest.approx(top1)
    assert told["int8"]["bytes"] < told["float32"]["bytes"] and told["agreement"] >= 90
    assert "int8 (dynamic) on 18 test images" in said and f"float32  {top1:.2f}" in said
    assert "MatMulInteger" in {node.op_type for node in onnx.load(file).graph.node}


def test_convolutions_are_calibrated(photos, tmp_path):
    made = trained(tmp_path / "r", photos, "test_resnet", "{}", epochs=1)
    file = exported(tmp_path / "m.onnx", made, "onnx", "--int8", "true")
    model = onnx.load(file)
    told = json.loads({prop.key: prop.value for prop in model.metadata_props}["int8"])
    assert told["method"] == "static, calibrated on 24 training images"
    assert "QuantizeLinear" in {node.op_type for node in model.graph.node}
    assert told["int8"]["bytes"] < 0.5 * told["float32"]["bytes"]
    assert onnxruntime.InferenceSession(file).run(None, {"images": noise(3).numpy()})[0].shape == (3, 3)


# ---------------------------------------------------------------------- TorchScript
def test_torchscript_carries_names_and_preparation(run, tmp_path, capsys):
    file = exported(tmp_path / "m.pt", run, "torchscript")
    assert capsys.readouterr().err == ""
    extra = {"classes.json": "", "preprocessing.json": ""}
    with graph.quiet():  # torch.jit.load is deprecated
        model = torch.jit.load(file, _extra_files=extra)
    assert json.loads(extra["classes.json"]) == CLASSES and json.loads(extra["preprocessing.json"])["resize"] == 36
    for count in (1, 5):
        with torch.inference_mode():
            torch.testing.assert_close(model(noise(count)), logits(run, noise(count)))


# ---------------------------------------------------------------------- timm and Hugging Face
def test_timm_loads_the_folder(run, hub):
    model = timm.create_model(f"local-dir:{hub}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(model(noise(4)), logits(run, noise(4)))
    assert model.pretrained_cfg["label_names"] == CLASSES
    looks = timm.data.resolve_model_data_config(model)
    assert looks["input_size"] == (3, SIDE, SIDE) and looks["crop_pct"] == 0.875
    assert sorted(path.name for path in hub.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_the_card_says_what_was_measured(run, hub, photos):
    result = json.loads((run / "result.json").read_text())
    _, front, text = (hub / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["library_name"] == "timm" and front["pipeline_tag"] == "image-classification"
    (told,) = front["model-index"]
    assert told["results"][0]["metrics"][0]["value"] == round(result["top1"], 2)
    low, high = result["top1_interval"]
    assert f"**{result['top1']:.2f}** (95 % interval {low:.2f} to {high:.2f})" in text
    floor = f"{result['pixel_knn']:.2f}" if "pixel_knn" in result else "not measured"
    assert f"by raw pixels | {floor} |" in text
    for line in ("| dataset | pets |", "| training images | 24 |", "| test images | 18 |", "| seed | 0 |"):
        assert line in text
    assert "differences under about" in text  # 18 test images tell little
    assert "| `train.epochs` | `3` | `200` |" in text and "`train.lr`" not in text
    assert "`a|b'c`, `cat & dog`, `zebra_*1*`." in text and "# pets\\_1" in text
    assert str(photos.parent) not in text and "| processor |" in text


def test_the_card_of_timm_has_no_front_matter(run, tmp_path):
    text = (exported(tmp_path / "b", run, "timm") / "README.md").read_text()
    assert text.startswith("# pets") and "import idmm.models" not in text


def test_a_class_whose_name_is_no_utf8(run, tmp_path):
    bad = shutil.copytree(run, tmp_path / "bad")
    about = json.loads((bad / "model.json").read_text())
    (bad / "model.json").write_text(json.dumps({**about, "classes": ["caf\udce9", *about["classes"][1:]]}))
    folder = exported(tmp_path / "hf", bad, "hf")
    assert "`caf?`" in (folder / "README.md").read_text(encoding="utf-8")
    assert json.loads((folder / "config.json").read_text())["label_names"][0] == "caf\udce9"


def test_a_card_follows_init(whole, tmp_path):
    """A run from a backbone tells of both; where the first is gone, it says so."""
    pretrained = tmp_path / "first"
    shutil.copytree(whole["pretrain"], pretrained)
    argv = ["finetune", "--init", pretrained, "--out", tmp_path / "second", "--train.epochs", 1, "--train.size", 16]
    assert call([*argv, "--train.lr", 0.001, "--data.subset", "{per_class: 2}", "--data.workers", 0]) == 0
    source = Source(tmp_path / "second")
    text = card.card(source, hub=False)
    assert "## Fine-tuning" in text and "## Pretraining" in text and "| method | idmm |" in text
    assert "`method.classifier` | `cosine` | `linear`" in text and "| drawn | per\\_class 2, seed 0 |" in text
    settings = parsing.read_file(tmp_path / "second" / "config.yaml")
    (tmp_path / "second" / "config.yaml").write_text(
        yaml.safe_dump({**settings, "init": str(pretrained / "backbone.safetensors")})
    )
    assert "## Pretraining" in card.card(Source(tmp_path / "second"), hub=False), "a file of the run is as good"
    shutil.rmtree(pretrained)
    text = card.card(source, hub=False)
    assert "## Pretraining" not in text and "started from the weights of `first`" in text


def test_a_run_of_0_1_0(run, tmp_path):
    """Its result lacks most figures, its JSON how images are prepared; what it ran on was not recorded."""
    old = tmp_path / "old"
    shutil.copytree(run, old)
    (old / "environment.json").unlink()
    result, info = (json.loads((old / name).read_text()) for name in ("result.json", "model.json"))
    known = ("top1", "top5", "num_classes", "train_size", "test_size", "seed", "seconds")
    (old / "result.json").write_text(json.dumps({key: result[key] for key in known}))
    known = ("name", "kwargs", "mean", "std", "ema", "classes")
    (old / "model.json").write_text(json.dumps({key: info[key] for key in known}))
    text = (exported(tmp_path / "b", old, "hf") / "README.md").read_text()
    low, high = result["top1_interval"]
    assert f"(95 % interval {low:.2f} to {high:.2f})" in text and "was not recorded" in text
    assert "mean over classes" not in text and f"the centre {SIDE} x {SIDE}" in text


def test_grey_images_and_a_backbone_of_ours(photos, tmp_path):
    """timm builds it where idmm.models is imported, which the card says; one channel stays one."""
    kwargs = "{embed_dim: 16, depth: 1, num_heads: 2}"
    made = trained(tmp_path / "r", photos, "t2t_vit_7", kwargs, 1, "--data.in_chans", 1)
    out = exported(tmp_path / "b", made, "hf")
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(model(noise(3, 1)), logits(made, noise(3, 1)))
    text = (out / "README.md").read_text()
    assert "import idmm.models  #" in text and '.convert("L")' in text and "| 32 px | 1 epoch, " in text


# ---------------------------------------------------------------------- mistakes
def test_what_is_not_torchs_is_not_written(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(graph, "TOLERANCE", -1.0)
    for kind, out in (("onnx", "m.onnx"), ("torchscript", "m.pt"), ("timm", "deep/b")):
        argv = ["export", "--init", run, "--format", kind, "--out", tmp_path / "new" / out]
        (line,) = refused(capsys, argv, code=1)
        assert "not what torch computes" in line and "largest difference" in line
    assert list(tmp_path.iterdir()) == []


def test_bad_out(run, tmp_path, capsys):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before, ending = sorted(tmp_path.rglob("*")), "is of no kind that is known; wanted a file that ends in"
    for kind, name, why in [
        ("onnx", "m.pt", f"{ending} .onnx"),
        ("torchscript", "m.onnx", f"{ending} .pt or .ts"),
        ("onnx", "folder.onnx", "is a folder; wanted a file"),
        ("timm", "full", "is there already and not empty; name a new folder"),
        ("hf", "file", "is a file; wanted a new folder"),
    ]:
        out = tmp_path / name
        found = refused(capsys, ["export", "--init", run, "--format", kind, "--out", out])
        assert found == [f"out: '{out}' {why}"] and sorted(tmp_path.rglob("*")) == before
    argv = ["export", "--init", run, "--format", "timm", "--out", tmp_path / "new", "--int8", "true"]
    assert refused(capsys, argv) == ["int8: true, but --format is timm; wanted onnx, or leave it out"]


def test_bad_run(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "folds" / "fold-1").mkdir(parents=True)
    shutil.copytree(run, tmp_path / "begun")
    (tmp_path / "begun" / "result.json").unlink()
    wanted = {
        tmp_path / "gone": "does not exist", tmp_path / "empty": "has no backbone.safetensors",
        tmp_path / "folds": "holds k-fold runs", tmp_path / "begun": "is no finished run",
        run / "model.safetensors": "is a file; wanted a run folder",
    }  # fmt: skip
    for init, why in wanted.items():
        (line,) = refused(capsys, ["export", "--init", init, "--format", "hf", "--out", tmp_path / "new"])
        assert line.startswith(f"init: '{init}'") and why in line
    assert not (tmp_path / "new").exists()


def test_int8_without_images_or_classifier(run, whole, tmp_path, capsys):
    argv = ["export", "--format", "onnx", "--int8", "true", "--out", tmp_path / "m.onnx"]
    (line,) = refused(capsys, [*argv, "--init", run, "--data.root", tmp_path / "gone"])
    assert line.startswith("int8: its accuracy is measured on the run's images") and line.endswith("--data.root DIR")
    (line,) = refused(capsys, [*argv, "--init", whole["pretrain"]])
    assert line.startswith("int8: ") and "no classifier" in line
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra(run, tmp_path, capsys, monkeypatch):
    real = command.importlib.util.find_spec
    monkeypatch.setattr(
        command.importlib.util, "find_spec", lambda name: None if name in command.NEEDED else real(name)
    )
    (line,) = refused(capsys, ["export", "--init", run, "--format", "onnx", "--out", tmp_path / "m.onnx"])
    assert line == f"format: onnx needs onnx, onnxruntime, onnxscript; install with: {install('export')}"
