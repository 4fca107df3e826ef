"""Hand-made features: the backbones hog and hog_conv, and the baseline that is fitted to them."""

import colorsys

import frozen
import numpy as np
import onnxruntime
import pytest
import torch
from folders import paint, result, tree
from helpers import call, call_ok, inside, inside_ok, logged, read, refused
from numpy.random import default_rng
from numpy.testing import assert_allclose
from PIL import Image
from pytest import approx
from skimage import color, data, feature
from sklearn.datasets import load_sample_images
from test_resume import stop_at

import idmm
from idmm.evaluation import baseline
from idmm.models import create_backbone
from idmm.models.hog import SIDE

pytestmark = pytest.mark.usefixtures("own_cache")
GRADIENTS = 1764  # features, of 7x7 blocks
TOLERANCE = 1e-6  # in values up to 1; measured: 1e-7


def pictures(side=SIDE):
    """RGB images of 8 bits, float32 [4, side, side, 3] in [0, 1]: photographs, noise, and grey
    squares with ties."""
    photos = [
        np.asarray(Image.fromarray(p).resize((side, side)))
        for p in (data.astronaut(), data.coffee())
    ]
    noise = default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    squares = np.kron(
        np.arange(16).reshape(4, 4, 1) * 17, np.ones((side // 4, side // 4, 3))
    ).astype(np.uint8)
    return np.stack([*photos, noise, squares]).astype(np.float32) / 255


def features(images, mean, std):
    """The model's features of images [B, H, W, C] that are normalised by the mean and std [C]."""
    model = create_backbone("hog", in_chans=images.shape[3]).eval()
    model.set_statistics(mean, std)
    normalised = (torch.from_numpy(images) - torch.tensor(mean)) / torch.tensor(std)
    return model(normalised.permute(0, 3, 1, 2)).numpy()


def reference(grey):
    """scikit-image's features, at length 1."""
    cells = dict(
        orientations=9, pixels_per_cell=(8, 8), cells_per_block=(2, 2), block_norm="L2-Hys"
    )
    # without rounding errors, which would have an orientation
    gradients = feature.hog(grey.round(7), **cells)
    return gradients / max(np.linalg.norm(gradients), 1e-6)


def test_gradients_are_those_of_scikit_image():
    images = pictures()
    expected = np.stack([reference(color.rgb2gray(image.astype(np.float64))) for image in images])
    for mean, std in (
        (
            [0.485, 0.456, 0.406],
            [0.229, 0.224, 0.225],
        ),
        (
            [0.1, 0.7, 0.3],
            [0.4, 0.2, 0.9],
        ),
    ):
        assert_allclose(
            features(images, mean, std)[:, :GRADIENTS], expected, rtol=0, atol=TOLERANCE
        )


def test_the_histogram_is_that_of_a_loop_over_pixels():
    images = pictures()
    expected = np.zeros((len(images), 8, 4, 4))
    for count, image in zip(expected, images, strict=True):
        for pixel in image.reshape(-1, 3).astype(np.float64):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            index = (
                int(hue * 8 + 1e-4) % 8,
                min(int(saturation * 4 + 1e-4), 3),
                min(int(value * 4 + 1e-4), 3),
            )
            count[index] += 1 / SIDE**2
    histograms = features(images, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[:, GRADIENTS:]
    roots = np.sqrt(expected).reshape(len(images), -1)
    assert_allclose(histograms, roots, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_have_a_histogram_each_and_mean_gradients(channels):
    images = default_rng(1).integers(0, 256, (2, SIDE, SIDE, channels)).astype(np.float32) / 255
    actual = features(images, [0.2] * channels, [0.7] * channels)
    assert actual.shape == (2, GRADIENTS + 32 * channels)
    for row, image in zip(actual, images, strict=True):
        assert_allclose(
            row[:GRADIENTS], reference(image.astype(np.float64).mean(2)), rtol=0, atol=TOLERANCE
        )
        counts = [np.histogram(image[..., c], bins=32, range=(0, 1))[0] for c in range(channels)]
        shares = np.concatenate(counts) / SIDE**2 / channels
        assert_allclose(row[GRADIENTS:], np.sqrt(shares), rtol=0, atol=TOLERANCE)


def test_data_of_other_sizes_are_resized_without_aliases():
    images = pictures(200)[:, :150]
    planes = [
        [
            Image.fromarray(image[..., c]).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            for c in range(3)
        ]
        for image in images
    ]
    small = np.stack([np.stack([np.asarray(plane) for plane in image], axis=2) for image in planes])
    norm = (
        [0.5, 0.5, 0.5],
        [
            0.25,
            0.25,
            0.25,
        ],
    )
    apart = np.abs(features(images, *norm) - features(small, *norm))
    # few pixels change their index
    assert np.median(apart) < TOLERANCE
    assert np.quantile(apart, 0.99) < 0.01


def test_it_goes_through_the_commands_like_any_backbone(tmp_path):
    few = "--data.workers 0 --data.subset '{per_class: 20}'"
    statistics = "--data.mean '[0.3, 0.2, 0.1]' --data.std '[0.5, 0.6, 0.7]'"
    call_ok(f"probe --model.name hog {few} {statistics} --size 32 --out {tmp_path}/p")
    probe = read(tmp_path / "p/result.json")
    assert probe["top1"] > 85
    short = f"{few} --train.epochs 1 --train.size 32 --train.precision fp32"
    fitted = "--train.classifier_init features --train.layer_decay 0.7"
    call_ok(f"finetune --model.name hog {short} {statistics} {fitted} --out {tmp_path}/f")
    assert read(tmp_path / "f/result.json")["top1"] > 80
    backbone = idmm.load_backbone(tmp_path / "f")
    assert not list(backbone.parameters())
    assert backbone.mean.tolist() == approx([0.3, 0.2, 0.1])
    call_ok(f"probe --init {tmp_path}/f {few} --out {tmp_path}/q")
    assert read(tmp_path / "q/result.json")["readouts"] == probe["readouts"]
    grey = f"--init {tmp_path}/f --data.in_chans 1"
    call_ok(f"finetune {grey} {short} --out {tmp_path}/g")
    assert idmm.load_backbone(tmp_path / "g").mean.shape == (1,)
    draws = f"--per_class 2 --seeds 1 --data.workers 0 --out {tmp_path}/few"
    call_ok(f"fewlabel --init {tmp_path}/g --model.name hog {draws}")
    assert list(read(tmp_path / "few/fewlabel.json")["runs"]) == [f"{tmp_path}/g", "hog"]


def test_pretraining_is_refused(tmp_path, capsys):
    reason = (
        "model.name: {} has hand-made features, which cannot be pretrained. Probe or "
        "fine-tune it instead"
    )
    for name in ("hog_conv", "hog"):
        argv = f"pretrain --model.name {name} --views.size 64 --out {tmp_path}/p"
        assert refused(capsys, argv)[-1] == reason.format(name)
    grid = "--sources [digits] --targets [digits] --methods [idmm] --backbones [hog]"
    argv = f"transfer {grid} --scratch true --seeds [0] --out {tmp_path}/g"
    assert refused(capsys, argv)[-1] == f"backbones 'hog': {reason.format('hog')}"


NETWORK = "{name: resnet10t, kwargs: {channels: [8, 8, 16, 16]}"
SMALL = f"learned: {NETWORK}, size: 32}}, frozen: {NETWORK}, sizes: [32, 48]}}"


def tiles(count=48, side=64):
    """Tiles of two photographs, float32 [count, 3, 64, 64] in [0, 1], and which of them each is
    from."""
    photos = load_sample_images().images
    rng = default_rng(0)
    rows = rng.integers(0, 427 - side, count)
    columns = rng.integers(0, 640 - side, count)
    parts = [
        photos[i % 2][r : r + side, c : c + side]
        for i, (r, c) in enumerate(zip(rows, columns, strict=True))
    ]
    return torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2).float() / 255, np.arange(count) % 2


def started(images, seed=0, **kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = create_backbone(
            "hog_conv", in_chans=images.shape[1], num_classes=0, **kwargs
        ).eval()
    model.set_statistics([0.0] * images.shape[1], [1.0] * images.shape[1])
    model.learn_start([{"images": part} for part in images.split(16)], seed)
    return model


@torch.no_grad()
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_fixed_features_are_centred_groups_that_have_weights(channels):
    images = tiles()[0]
    if channels != 3:
        images = images.mean(1, keepdim=True).repeat(1, channels, 1, 1)
    frozen_network = {"name": "resnet10t", "kwargs": {}, "sizes": [32, 48]}
    model = started(images, frozen=frozen_network)
    features = model(images)
    assert model.groups[3:] == 2 * [128, 256, 512, 512], "four depths at two sizes"
    assert torch.equal(features, started(images, frozen=frozen_network)(images)), "from the seed"
    raw = torch.cat([model.raw(part) for part in images.split(16)])
    groups = (raw - raw.mean(0)).split(model.groups, dim=1)
    weights = 3 * [1.0] + 2 * [0.5, 1.0, 1.0, 2.0]
    parts = []
    for group, weight in zip(groups, weights, strict=True):
        parts.append(weight**0.5 * group / group.norm(dim=1, keepdim=True))
    assert_allclose(features[:, : model.fixed], torch.cat(parts, dim=1), atol=1e-4)
    assert_allclose(features[:, model.fixed :], model.learned(images) / 4, atol=1e-4)
    learning = model.train()(images)
    assert not learning[:, : model.fixed].any()
    assert_allclose(learning[:, model.fixed :], model.learned(images), atol=1e-4)


@torch.no_grad()
def test_flat_images_have_finite_features():
    flat = torch.linspace(0, 1, 16)[:, None, None, None].repeat(1, 3, 64, 64)
    assert bool(torch.isfinite(started(flat)(flat)).all())


def test_the_network_learns_and_the_rest_does_not():
    images, labels = tiles()
    model = started(images)
    fixed = {}
    for name, value in model.state_dict().items():
        if "learned" not in name:
            fixed[name] = value.clone()
    model.train()
    model(images)[:, model.fixed :].square().mean().backward()
    for p in model.parameters():
        assert p.grad is not None
    assert (model(images)[:, : model.fixed] == 0).all(), "in training"
    for name, value in fixed.items():
        assert torch.equal(value, model.state_dict()[name])


def test_through_the_commands(tmp_path, capsys):
    root = tree(tmp_path / "d", train={"cat": 8, "dog": 8}, test={"cat": 4, "dog": 4})
    small = f"--data.root {root} --data.workers 0 --train.epochs 1 --train.precision fp32"
    model = f"--model.name hog_conv --model.kwargs '{{{SMALL}}}'"
    tuned = f"finetune {small} {model} --train.size 64 --train.batch_size 5 --out {tmp_path}/f"
    reason = "hog_conv uses its hand-made features only by a fitted classifier, expected features"
    assert refused(capsys, f"{tuned} --train.classifier_init random") == [
        f"train.classifier_init: random, but {reason}"
    ]
    call_ok(tuned)
    assert "start_top1" in read(tmp_path / "f/result.json")
    note = "hog_conv: mixtures and centre from 16 training images"
    assert note in logged(tmp_path / "f")
    call_ok(f"export --init {tmp_path}/f --format onnx --out {tmp_path}/m.onnx")
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    logits = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(
        None, {"images": images.numpy()}
    )[0]
    with torch.inference_mode():
        assert_allclose(logits, frozen.exported(tmp_path / "f")[0](images), atol=1e-4)


RUN = dict(
    stages=None, train__size=32, train__epochs=1, train__ema=None, data__subset={"per_class": 6}
)


def probed(tmp_path, more):
    call_ok(f"probe --model.name hog --data.workers 0 {more} --out {tmp_path}/probe")
    return read(tmp_path / "probe/result.json")["top1"]


def test_a_run_measures_once_what_a_probe_of_hog_does(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert inside("finetune", tmp_path / "run", **RUN) == 130
    inside_ok("finetune", tmp_path / "run", **RUN)
    baseline_top1 = result(tmp_path / "run")["baseline_top1"]
    expected = probed(tmp_path, "--size 32 --data.subset '{per_class: 6}'")
    # crops of training images are not rounded to 8 bits
    assert baseline_top1 == approx(expected, abs=1)
    assert baseline_top1 > 80
    text = logged(tmp_path / "run")
    assert (
        text.count(
            f"{baseline_top1:.2f} % of 360 test images, fitted to 60 training images with C = "
        )
        == 1
    )
    assert f"the baseline {baseline_top1:.2f}" in text
    assert "is no better than logistic regression on hand-made features" in text


def test_a_start_without_a_checkpoint_measures_again(tmp_path):
    """The next start may be on other images."""
    (tmp_path / "run/last").mkdir(parents=True)
    (tmp_path / "run/last/start.json").write_text('{"baseline_top1": 12.5}')
    inside_ok("finetune", tmp_path / "run", **RUN)
    assert result(tmp_path / "run")["baseline_top1"] > 80


@pytest.mark.parametrize("side", [40, 130])
def test_the_check_of_images_finds_the_same(side, tmp_path, capsys):
    root = tree(
        tmp_path / "d",
        train={
            "a": 9,
            "b": 9,
            "c": 9,
        },
        test={"a": 6, "b": 6, "c": 7},
    )
    for seed, path in enumerate(sorted(root.rglob("*.png"))):
        paint(path, seed, (side, side + 17))
    call(f"data check --root {root} --out {tmp_path}/c")
    floor = read(tmp_path / "c/check.json")["floor"]
    assert floor["train_images"] == 27
    assert floor["images"] == 19
    assert floor["of"] == "test"
    line = (
        f"baseline: {floor['baseline_top1']:.1f} % top-1 by logistic regression on "
        "hand-made features "
    )
    assert f"{line}(the largest class every time: 36.8 %)" in capsys.readouterr().out
    more = f"--size 64 --crop_mode auto --data.root {root}"
    assert floor["baseline_top1"] == probed(tmp_path, more)


def test_of_many_images_a_part_is_drawn_by_the_classes_shares(monkeypatch):
    labels = default_rng(0).permutation(np.repeat([-1, 0, 1, 2, 3], [50, 600, 300, 99, 1]))
    rows = baseline.sample(labels, 100)
    assert (np.diff(rows) > 0).all()
    assert np.bincount(labels[rows]).tolist() == [59, 30, 10, 1]
    assert baseline.sample(labels, 1000).tolist() == np.flatnonzero(labels >= 0).tolist()
    many = np.repeat(np.arange(200), 20)
    assert len(baseline.sample_to_fit(many)) == 400_000 // 200
    monkeypatch.setattr(baseline, "MOST", 300)
    assert np.bincount(many[baseline.sample_to_fit(many)]).tolist() == [5] * 200, (
        "5 of each class in any case"
    )


def test_a_baseline_of_many_images_does_not_depend_on_the_cache(tmp_path, monkeypatch):
    """It is fitted to a part of the training images, whose number is in the result, and tested on
    all test images."""
    monkeypatch.setattr(baseline, "MOST", 12)
    root = tree(tmp_path / "d", train={"a": 12, "b": 12}, test={"a": 6, "b": 6})
    run = {
        "data__name": "folder",
        "data__root": str(root),
        "train__epochs": 1,
        "data__subset": None,
    }
    for cache, note in (
        ("auto", "decoded once"),
        ("off", "decoded at each use"),
    ):
        inside_ok(
            "finetune",
            tmp_path / cache,
            **{**RUN, **run},
            data__cache=cache,
        )
        results = result(tmp_path / cache)
        assert results["baseline_train_size"] == 12
        assert results["train_size"] == 24
        text = logged(tmp_path / cache)
        assert note in text
        assert " % of 12 test images, fitted to 12 training images with C = " in text
    assert results["baseline_top1"] == result(tmp_path / "auto")["baseline_top1"]
