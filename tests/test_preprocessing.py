"""What a run's JSON says of its images: timm's own transform from it gives the run's own
predictions."""

import re

import numpy as np
import pytest
import torch
from folders import opened, result, section
from frozen import exported, timms
from helpers import ROOT, inside_ok, read
from PIL import Image
from skimage import data as pictures
from timm.data import create_transform, resolve_model_data_config

import idmm
from idmm.data.images import CentreCrop
from idmm.data.listing import list_images
from idmm.data.loaders import EvalTransform

SIZES = [
    (40, 40),
    (24, 31),
    (250, 300),
    (90, 61),
    (45, 45),
    (33, 200),
    (199, 260),
    (41, 39),
    (120, 180),
    (64, 47),
]
NAMES = ("astronaut", "chelsea", "coffee")
COMMON = {
    "data__subset": None,
    "data__name": "folder",
    "model__drop_path": 0.0,
    "train__epochs": 12,
    "train__ema": None,
    "train__batch_size": 8,
    "train__save_minutes": 60,
    "train__eval_every": 12,
    "augment__randaugment": None,
    "augment__mixup_alpha": 0.0,
    "augment__cutmix_alpha": 0.0,
    "augment__jitter_prob": 0.0,
    "augment__grey_prob": 0.0,
}
RUNS = {
    "vit": {
        "stages": [
            {"size": 24},
            {"size": 40},
        ]
    },  # 40 / 0.875 is rounded down
    "cnn": {
        "stages": [{"size": 40}],
        "augment__crop_pct": 0.9,
        "model__name": "test_resnet",
        "model__kwargs": {},
    },
}
RUNS["padded"] = {**RUNS["cnn"], "augment__crop_mode": "auto"}
RUNS["squashed"] = {**RUNS["cnn"], "augment__crop_mode": "squash", "augment__crop_pct": 1.0}


def cut(name, count, rng):
    """Parts of one of scikit-image's photographs, of every size and shape, uint8 [H, W, 3] each."""
    whole = getattr(pictures, name)()
    for h, w in (SIZES * 2)[:count]:
        top = rng.integers(whole.shape[0] - h + 1)
        left = rng.integers(whole.shape[1] - w + 1)
        yield whole[top : top + h, left : left + w]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """JPEG and PNG photographs by what they show."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for part, count in (
        ("train", 8),
        ("test", 13),
    ):
        for name in NAMES:
            (root / part / name).mkdir(parents=True)
            for i, pixels in enumerate(cut(name, count, rng)):
                Image.fromarray(pixels).save(
                    root / part / name / f"{i:02d}.{('jpg', 'png')[i % 2]}"
                )
    return root


@pytest.fixture(scope="module")
def runs(photos, tmp_path_factory):
    """Fine-tuned on them; not to be written to."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in RUNS.items():
        inside_ok(
            "finetune",
            folder / name,
            **{
                **COMMON,
                **changes,
                "data__root": str(photos),
            },
        )
    return folder


def test_images(photos, info, transform=None):
    """The test images by timm's transform, [N, C, S, S], and their labels [N]."""
    split = list_images(section(photos), labelled=True).test
    images = [(transform or timms(info))(Image.open(path)) for path in split.items]
    return torch.stack(images), split.labels


test_images.__test__ = False


def top1(logits, labels):
    """In percent."""
    return 100 * int((logits.argmax(1).numpy() == labels).sum()) / len(labels)


@pytest.mark.parametrize("name", RUNS)
def test_timm_gives_the_runs_own_predictions(name, runs, photos):
    model, info = exported(runs / name)
    images, labels = test_images(photos, info)
    with torch.inference_mode():
        logits = torch.cat([model(image[None]) for image in images])  # one by one
    assert top1(logits, labels) == pytest.approx(result(runs / name)["top1"], abs=1e-9)
    assert len(logits.argmax(1).unique()) == 3
    assert result(runs / name)["precision"] == "fp32"

    crop = CentreCrop.of(info["size"], info["crop_pct"], info["crop_mode"], info["mean"])
    store = opened(photos, crop, "test", keep="off", labelled=True)
    transform = EvalTransform(store, crop, info["mean"], info["std"])
    run_images = transform(0, np.arange(len(store)))["images"]  # as the run saw them
    assert torch.equal(images, run_images)


def test_the_snippet_without_idmm(runs, photos, capsys):
    photo = photos / "test/coffee/02.jpg"
    blocks = re.findall(
        r"(?s)```python\n(.*?)```", (ROOT / "docs" / "predict-export.md").read_text()
    )
    (text,) = (block for block in blocks if "create_transform" in block and "safetensors" in block)
    exec(text.replace("runs/b/", f"{runs / 'vit'}/").replace("photo.jpg", str(photo)), {})
    (printed,) = capsys.readouterr().out.splitlines()
    model, info = exported(runs / "vit")
    with torch.inference_mode():
        best = model(timms(info)(Image.open(photo).convert("RGB"))[None]).argmax()
    assert printed == info["classes"][best]


@pytest.mark.parametrize(
    "name, crop_pct, crop_mode",
    [
        ("vit", 0.875, "center"),
        ("cnn", 0.9, "center"),
        ("padded", 0.9, "border"),
        ("squashed", 1.0, "squash"),
    ],
)
def test_both_files_and_the_loaded_backbone_say_the_same(name, crop_pct, crop_mode, runs):
    infos = [read(runs / name / f"{stem}.json") for stem in ("model", "backbone")]
    expected = {
        "size": 40,
        "crop_pct": crop_pct,
        "crop_mode": crop_mode,
        "interpolation": "bicubic",
        "channels": 3,
    }
    for info in infos:
        assert {key: info[key] for key in expected} == expected
        assert len(info["mean"]) == len(info["std"]) == 3
    backbone = idmm.load_backbone(runs / name)
    data_config = resolve_model_data_config(backbone)
    assert data_config["input_size"] == (3, 40, 40)
    assert data_config["crop_mode"] == crop_mode
    assert repr(create_transform(**data_config, is_training=False)) == repr(timms(infos[0]))
