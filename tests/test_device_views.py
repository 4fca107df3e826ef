"""Views made on the device against those that are made one by one from the same draws, and runs by both."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as tv

from idmm.config import Augment, CropGroup, Views
from idmm.config.recipes import default_crops
from idmm.data import device_views, views
from idmm.data.augment import TrainTransform
from idmm.data.device_views import DeviceImages, DeviceViews, ViewDraws, blurred, images_on, interpolation_weights
from idmm.data.loaders import BatchPlan, training_batches
from idmm.data.views import MultiCropTransform, make_views
from idmm.errors import UserError

CPU = torch.device("cpu")
EVERYTHING = dict(
    jitter_prob=0.9, solarize_prob=0.3, vflip=0.5, rotate90=True, channel_jitter=[0.5, 0.4], channel_drop=0.3
)
NOTHING = dict(flip=0.0, jitter_prob=0.0, grey_prob=0.0, blur_prob=0.0)


class Store:
    """Random smooth images of uneven sizes, of 8, 16 or both depths."""

    def __init__(self, channels=3, bits=(8,), count=12, low=20, high=90):
        rng = np.random.default_rng(channels)
        self.sizes, self.images = rng.integers(low, high, (count, 2)), []
        for i, size in enumerate(self.sizes):
            deep = bits[i % len(bits)] == 16
            noise = torch.from_numpy(rng.random((1, channels, *size)))
            values = F.interpolate(F.avg_pool2d(noise, 3, 1, 1), tuple(size), mode="bilinear")[0] * 1.4 - 0.2
            pixels = (values.clamp(0, 1) * (65535 if deep else 255)).permute(1, 2, 0).numpy()
            pixels = np.ascontiguousarray(pixels.astype(np.uint16 if deep else np.uint8))
            self.images.append(torch.from_numpy(pixels).permute(2, 0, 1))
        self.channels, self.labels, self.cache = channels, np.arange(count) % 3, "ram"
        self.pixel_bytes = np.array([channels * image.element_size() for image in self.images])

    def image(self, i):
        return self.images[i]


def norms(channels):
    return [0.1 + 0.7 * c / channels for c in range(channels)], [0.2 + 0.1 * c for c in range(channels)]


def on_device(transform, epoch, indices):
    return DeviceViews(transform, DeviceImages(transform.store, CPU))(ViewDraws(transform)(epoch, indices))


def assert_close(made, wanted, most, mean):
    """Compares normalised views: no value differs by more than ``most``, the mean by more than ``mean``."""
    assert made.shape == wanted.shape and made.is_contiguous()
    apart = (made - wanted).abs()
    assert float(apart.max()) < most and float(apart.mean()) < mean, (float(apart.max()), float(apart.mean()))


CASES = [(3, (8,)), (3, (16,)), (3, (8, 16)), (1, (8,)), (2, (16,)), (5, (8, 16)), (13, (8,))]


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["usual", "all"])
@pytest.mark.parametrize(("channels", "bits"), CASES)
def test_views_are_those_of_the_per_image_path(channels, bits, asked):
    crops = [CropGroup(count=2, scale=[0.14, 1.0]), CropGroup(count=3, scale=[0.01, 0.4], size=17)]
    crops.append(CropGroup(count=1, scale=[0.01, 0.4], blur_prob=1.0, blur_sigma=[2.0, 6.0], **asked))
    config = Views(size=24, crops=crops, jitter=[0.8, 0.8, 0.8, 0.2], jitter_prob=0.8)
    make = MultiCropTransform(Store(channels, bits), config, *norms(channels), seed=3)
    indices = np.array([4, 11, 0, 3, 7, 8, 1, 2])
    wanted, made = make(5, indices), on_device(make, 5, indices)
    assert made.keys() == wanted.keys() and made["index"].tolist() == indices.tolist()
    assert torch.equal(made["label"], wanted["label"])
    for ours, theirs in zip(made["views"], wanted["views"], strict=True):
        print(channels, bits, float((ours - theirs).abs().max()), float((ours - theirs).abs().mean()))
