"""Views and augmentation of images of any channels and of 16 bits; turns, and channels on their
own."""

import math

import cv2
import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from folders import tuned_ok
from helpers import logged
from test_device_views import Store
from test_views import draw_group

from idmm.config import CropGroup, Views
from idmm.data import views
from idmm.data.images import CentreCrop, unit
from idmm.data.loaders import EvalTransform
from idmm.data.view_plan import ORDERS

ALL = dict(vflip=0.5, rotate90=True)
STRONG = dict(
    jitter=[0.8, 0.8, 0.0, 0.0],
    jitter_prob=0.9,
    grey_prob=0.0,
    solarize_prob=0.3,
)


def bands(channels, dtype=np.uint16, count=10):
    return Store(channels, dtype, low=20, high=60, count=count)


def norms(channels):
    return np.linspace(0.1, 0.7, channels).tolist(), np.linspace(0.2, 0.5, channels).tolist()


def clip(values):
    return values.clamp(0, 1)


def naive_bands(image, plan, v, size):
    """A view of an image without colours, before its turns: float [C, S, S]."""
    top, left, height, width = plan.box[v]
    planes = []
    for plane in unit(image):
        x = tv.resized_crop(
            plane[None],
            top,
            left,
            height,
            width,
            [size, size],
            tv.InterpolationMode.BICUBIC,
            True,
        )
        x = clip(x)
        x = x.flip(-1) if plan.flip[v] else x
        for number in ORDERS[plan.order[v]] if plan.jitter[v] else ():
            factor = plan.factors[v, number]
            if number == 0:
                x = clip(x * factor)
            elif number == 1:
                x = clip(x * factor + x.mean() * (1 - factor))
        if plan.sigma[v]:
            side = 2 * math.ceil(3 * plan.sigma[v]) + 1
            x = tv.gaussian_blur(x, [side, side], [float(plan.sigma[v])] * 2)
        planes.append(torch.where(x >= 0.5, 1 - x, x) if plan.solarize[v] else x)
    return torch.cat(planes)


def naive_turns(view, plan, v):
    """What turns do."""
    if plan.vflip[v]:
        view = view.flip(1)
    for _ in range(plan.turns[v]):
        view = view.mT.flip(1)  # the right column becomes the upper row: counter-clockwise
    return view


def normalised(view, mean, std):
    return (view - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


@pytest.mark.parametrize(("channels", "dtype", "asked"), [(1, np.uint8, {}), (5, np.uint16, ALL)])
def test_views_of_bands_are_a_naive_loops(channels, dtype, asked):
    store, (mean, std), indices = (
        bands(channels, dtype),
        norms(channels),
        np.arange(10),
    )
    group = CropGroup(count=3, scale=[0.2, 1.0], **STRONG, **asked)
    plan = draw_group(group, Views(), 3, indices, store.sizes)
    assert 0 < plan.solarize.sum() < 30
    assert 0 < plan.jitter.sum() < 30
    assert (plan.sigma > 0).any()
    batch = views.make_views(store.images, plan, 16, mean, std)
    assert batch.shape == (10, 3, channels, 16, 16)
    assert batch.dtype == torch.float32
    for v, view in enumerate(batch.flatten(0, 1)):
        expected = naive_turns(naive_bands(store.image(v // 3), plan, v, 16), plan, v)
        close = (view - normalised(expected, mean, std)).abs() < 3e-4
        # a value at the edge of solarization may fall on either side
        assert close.float().mean() > (0.99 if plan.solarize[v] else 0.9999)


def test_randaugment_is_left_out_for_deep_colours(tmp_path):
    for i, image in enumerate(bands(3, count=8).images):
        path = tmp_path / "set" / ("train", "test")[i // 4] / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image.permute(1, 2, 0).numpy())
    tuned_ok(tmp_path / "run", tmp_path / "set")
    line = "augment.randaugment: left out for the 4 of more than 8 bits, which it would cut to 8"
    assert logged(tmp_path / "run").count(line) == 1


def test_bands_are_padded_with_their_mean():
    store, (mean, std) = bands(5), norms(5)
    crop = CentreCrop.of(16, 1.0, "border", mean)
    crops = EvalTransform(store, crop, mean, std)(0, np.arange(10))["images"]
    for result, image in zip(crops, store.images, strict=True):
        h, w = image.shape[1:]
        height, width = (round(16 * side / max(h, w)) for side in (h, w))
        top, left = (16 - height) // 2, (16 - width) // 2
        inside = torch.zeros(16, 16, dtype=torch.bool)
        inside[top : top + height, left : left + width] = True
        assert (result[:, ~inside].abs() < 1e-4).all()  # of 16 bits
        planes = tv.resize(
            unit(image), [height, width], tv.InterpolationMode.BICUBIC, antialias=True
        )
        expected = normalised(clip(planes), mean, std).flatten(1)
        torch.testing.assert_close(result[:, inside], expected, atol=1e-4, rtol=0)


def test_centre_crops_of_bands():
    store, (mean, std) = bands(5), norms(5)
    crops = EvalTransform(store, CentreCrop(16, 0.875), mean, std)(0, np.arange(10))["images"]
    for i, image in enumerate(store.images):
        h, w = image.shape[1:]
        size = [18, 18 * w // h] if h <= w else [18 * h // w, 18]
        planes = tv.resize(unit(image), size, tv.InterpolationMode.BICUBIC, antialias=True)
        top, left = (round((side - 16) / 2) for side in size)
        expected = clip(planes)[:, top : top + 16, left : left + 16]
        torch.testing.assert_close(crops[i], normalised(expected, mean, std), atol=1e-4, rtol=0)
