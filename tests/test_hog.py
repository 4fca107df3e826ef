"""The backbone ``hog``: its features against scikit-image and a plain loop, and its way through the commands."""

import colorsys
import json

import numpy as np
import pytest
import torch
from helpers import call, read, refused
from PIL import Image
from skimage import color, data, feature

import idmm
from idmm.models import create_backbone
from idmm.models.hog import SIDE

GRADIENTS = 1764  # features, of 7x7 blocks
TOLERANCE = 1e-6  # in values up to 1; measured: 1e-7


def pictures(side=SIDE):
    """RGB images of 8 bits, float32 [4, side, side, 3] in [0, 1]: photographs, noise, and grey squares with ties."""
    photos = [np.asarray(Image.fromarray(p).resize((side, side))) for p in (data.astronaut(), data.coffee())]
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    squares = np.kron(np.arange(16).reshape(4, 4, 1) * 17, np.ones((side // 4, side // 4, 3))).astype(np.uint8)
    return np.stack([*photos, noise, squares]).astype(np.float32) / 255


def features(images, mean, std):
    """The model's features of images [B, H, W, C] that are normalised by the mean and std [C]."""
    model = create_backbone("hog", in_chans=images.shape[3]).eval()
    model.set_statistics(mean, std)
    normalised = (torch.from_numpy(images) - torch.tensor(mean)) / torch.tensor(std)
    return model(normalised.permute(0, 3, 1, 2)).numpy()


def reference(grey):
    cells = dict(orientations=9, pixels_per_cell=(8, 8), cells_per_block=(2, 2), block_norm="L2-Hys")
    return feature.hog(grey.round(7), **cells)  # without rounding errors, which would have an orientation


# ---------------------------------------------------------------------- features
def test_gradients_are_those_of_scikit_image():
    images = pictures()
    wanted = np.stack([reference(color.rgb2gray(image.astype(np.float64))) for image in images])
    for mean, std in (([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), ([0.1, 0.7, 0.3], [0.4, 0.2, 0.9])):
        np.testing.assert_allclose(features(images, mean, std)[:, :GRADIENTS], wanted, rtol=0, atol=TOLERANCE)


def test_the_histogram_is_that_of_a_loop_over_pixels():
    images = pictures()
    wanted = np.zeros((len(images), 8, 4, 4))
    for count, image in zip(wanted, images, strict=True):
        for pixel in image.reshape(-1, 3).astype(np.float64):
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            place = int(hue * 8 + 1e-4) % 8, min(int(saturation * 4 + 1e-4), 3), min(int(value * 4 + 1e-4), 3)
            count[place] += 1 / SIDE**2
    found = features(images, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[:, GRADIENTS:]
    np.testing.assert_allclose(found, wanted.reshape(len(images), -1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("channels", [1, 5])
def test_other_channels_have_a_histogram_each_and_gradients_of_their_mean(channels):
    images = np.random.default_rng(1).integers(0, 256, (2, SIDE, SIDE, channels)).astype(np.float32) / 255
    found = features(images, [0.2] * channels, [0.7] * channels)
    assert found.shape == (2, GRADIENTS + 32 * channels)
    for row, image in zip(found, images, strict=True):
        np.testing.assert_allclose(row[:GRADIENTS], reference(image.astype(np.float64).mean(2)), rtol=0, atol=TOLERANCE)
        counts = [np.histogram(image[..., c], bins=32, range=(0, 1))[0] for c in range(channels)]
        np.testing.assert_allclose(row[GRADIENTS:], np.concatenate(counts) / SIDE**2, rtol=0, atol=TOLERANCE)


def test_images_of_other_sizes_are_resized_without_aliases():
    images = pictures(200)[:, :150]
    planes = [[Image.fromarray(image[..., c]).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for c in range(3)]
              for image in images]  # fmt: skip
    small = np.stack([np.stack([np.asarray(plane) for plane in image], axis=2) for image in planes])
    norm = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]
    apart = np.abs(features(images, *norm) - features(small, *norm))
    assert np.median(apart) < TOLERANCE and np.quantile(apart, 0.99) < 0.01  # few pixels change their bin


# ---------------------------------------------------------------------- commands
@pytest.mark.usefixtures("own_cache")
def test_it_goes_through_the_commands_like_any_backbone(tmp_path, capsys):
    own = ["--data.mean", "[0.3, 0.2, 0.1]", "--data.std", "[0.5, 0.6, 0.7]", "--data.workers", 0]
    small = ["--data.subset", "{per_class: 5}", "--train.epochs", 2, "--train.size", 32, "--train.precision", "fp32"]
    given = ["--model.name", "hog", *own]
    assert call(["probe", *given, "--size", 32, "--out", tmp_path / "p"]) == 0
    assert read(tmp_path / "p/result.json")["top1"] > 95
    fitted = ["--train.classifier_init", "features", "--train.lr", 0.001, "--train.layer_decay", 0.7]
    assert call(["finetune", *given, *small, *fitted, "--out", tmp_path / "f"]) == 0
    assert read(tmp_path / "f/result.json")["top1"] > 80
    backbone = idmm.load_backbone(tmp_path / "f")
    assert not list(backbone.parameters()) and backbone.mean.tolist() == pytest.approx([0.3, 0.2, 0.1])
    capsys.readouterr()
    assert call(["probe", "--init", tmp_path / "f", *own[4:], "--out", tmp_path / "q"]) == 0
    first, again = (read(tmp_path / name / "result.json") for name in "pq")
    assert first["readouts"] == again["readouts"]
    assert call(["finetune", "--init", tmp_path / "f", "--data.in_chans", 1, *small, "--out", tmp_path / "g"]) == 0
    assert idmm.load_backbone(tmp_path / "g").mean.shape == (1,)
    few = ["--per_class", 2, "--seeds", 1, "--data.workers", 0, "--out", tmp_path / "few"]
    assert call(["fewlabel", "--init", tmp_path / "g", "--model.name", "hog", *few]) == 0
    assert list(json.loads((tmp_path / "few/fewlabel.json").read_text())["runs"]) == [str(tmp_path / "g"), "hog"]


def test_pretraining_is_refused(tmp_path, capsys):
    why = "model.name: hog has no weights to pretrain. Probe or fine-tune it instead"
    assert refused(capsys, ["pretrain", "--model.name", "hog", "--out", tmp_path / "p"])[-1] == why
    grid = ["--sources", "[digits]", "--targets", "[digits]", "--methods", "[idmm]", "--backbones", "[hog]"]
    argv = ["transfer", *grid, "--scratch", "true", "--seeds", "[0]", "--out", tmp_path / "g"]
    assert refused(capsys, argv)[-1] == f"backbones 'hog': {why}"
