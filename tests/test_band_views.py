"""Views and augmentation of images of any channels and of 16 bits; turns, and channels on their own."""

import math
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from helpers import TINY, inside, run_info
from test_views import Store, one_view
from tiny import HEADS, VIT

from idmm.config import METHODS, Augment, CropGroup, Data, DrLoc, PretrainConfig, Views
from idmm.data import views
from idmm.data.images import unit
from idmm.data.loaders import EvalTransform
from idmm.data.views import ORDERS, MultiCropTransform, TrainTransform, draw_views
from idmm.methods import create_method
from idmm.methods.drloc import Localization
from idmm.models import create_backbone
from idmm.seeding import derive, seeded

ALL = dict(vflip=0.5, rotate90=True)
STRONG = dict(jitter=[0.8, 0.8, 0.0, 0.0], jitter_prob=0.9, grey_prob=0.0, solarize_prob=0.3)


class Bands(Store):
    """Random images of uneven sizes, of any channels and depth."""

    def __init__(self, channels, dtype=np.uint16, count=10):
        super().__init__(count)
        rng, top = np.random.default_rng(1), np.iinfo(dtype).max
        shapes = [(*size, channels) for size in self.sizes]  # in memory as decoded
        pixels = [rng.integers(0, top, shape, dtype=dtype, endpoint=True) for shape in shapes]
        self.images = [torch.from_numpy(image).permute(2, 0, 1) for image in pixels]


def norms(channels):
    return [0.1 + 0.7 * c / channels for c in range(channels)], [0.2 + 0.1 * c for c in range(channels)]


def clip(values):
    return values.clamp(0, 1)


def naive_bands(image, plan, v, size):
    """A view of an image without colours, before its turns: float [C, S, S]."""
    top, left, height, width = plan.box[v]
    made = []
    for plane in unit(image):
        x = tv.resized_crop(plane[None], top, left, height, width, [size, size], tv.InterpolationMode.BICUBIC, True)
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
        made.append(torch.where(x >= 0.5, 1 - x, x) if plan.solarize[v] else x)
    return torch.cat(made)


def naive_turns(view, plan, v):
    """What turns do."""
    planes = []
    for x in view:
        x = x.flip(0) if plan.vflip[v] else x
        for _ in range(plan.turns[v]):
            x = x.T.flip(0)  # the right column becomes the upper row: counter-clockwise
        planes.append(x)
    return torch.stack(planes)


def normalised(view, mean, std):
    return (view - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


@pytest.mark.parametrize(("channels", "dtype", "asked"), [(1, np.uint8, {}), (5, np.uint16, ALL)])
def test_views_of_bands_are_a_naive_loops(channels, dtype, asked):
    store, (mean, std), indices = Bands(channels, dtype), norms(channels), np.arange(10)
    group = CropGroup(count=3, scale=[0.2, 1.0], **STRONG, **asked)
    plan = draw_views(Views(), group, 3, indices, store.sizes)
    assert 0 < plan.solarize.sum() < 30 and 0 < plan.jitter.sum() < 30 and (plan.sigma > 0).any()
    made = views.make_views(store.images, plan, 16, mean, std)
    assert made.shape == (10, 3, channels, 16, 16) and made.dtype == torch.float32
    for v in range(30):
        wanted = naive_turns(naive_bands(store.image(v // 3), plan, v, 16), plan, v)
        found = made[v // 3, v % 3] * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
        close = (found - wanted).abs() < 1e-4  # a value at the edge of solarization may fall on either side
        assert float(close.float().mean()) > 0.99 if plan.solarize[v] else close.all()


@pytest.mark.parametrize(("grey", "dtype"), [(False, np.uint16), (True, np.uint8)])
def test_rgb_of_both_depths_has_all_colours_and_turns(grey, dtype):
    store, indices, group = Bands(3, dtype), np.arange(10), CropGroup(count=3, scale=[0.2, 1.0], **ALL)
    plan = draw_views(Views(), group, 3, indices, store.sizes)
    assert plan.grey.any() and plan.jitter.any()
    mean, std = ([0.5], [0.2]) if grey else norms(3)
    made = views.make_views(store.images, plan, 16, mean, std)
    for v in range(30):
        image = (
            store.image(v // 3) if dtype == np.uint8 else unit(store.image(v // 3)) * 255
        )  # torchvision wants floats
        wanted = naive_turns(one_view(image, plan, v, 16).clamp(0, 1), plan, v)
        wanted = views.normalise(wanted[None], mean, std)[0]
        torch.testing.assert_close(made[v // 3, v % 3], wanted, atol=3e-2, rtol=0)  # torchvision's luma and bytes


def test_bits_of_rgb_views_are_those_before_there_were_bands():
    """Sums of absolute values, and with weights, recorded from an earlier implementation on the same images."""
    wanted = {
        ("idmm", 3): [(43145.096, -28.9527304), (95889.8456, -258.522046)],
        ("idmm", 1): [(8821.10489, -86.9694527), (19341.3622, 93.3553246)],
        ("dino", 3): [(17272.2366, 9.66801166), (22359.8686, 52.7480133), (85208.699, 305.788529)],
        ("mocov3", 1): [(3432.91748, 14.0744235), (4107.52656, 18.9704517)],
    }
    store, indices = Store(), np.arange(10)
    for (name, channels), sums in wanted.items():
        looks = ((0.5,), (0.25,)) if channels == 1 else ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
        config = Views(crops=list(METHODS[name].CROPS), size=24, solarize_prob=0.3)
        made = MultiCropTransform(store, config, *looks, seed=3)(2, indices)["views"]
        for group, (total, weighted) in zip(made, sums, strict=True):
            x = group.double().flatten()
            assert float(x.abs().sum()) == pytest.approx(total, rel=1e-6), (name, channels)
            assert float((x * torch.arange(len(x)).double().cos()).sum()) == pytest.approx(weighted, abs=0.05)


def test_augmented_photographs_are_turned_after_all_else():
    store, looks, indices = Store(), norms(3), np.arange(10)
    usual = TrainTransform(store, Augment(), 16, *looks, key=5)(2, indices)["images"]
    transform = TrainTransform(store, Augment(**ALL), 16, *looks, key=5)
    found = transform(2, indices)["images"]
    plan = draw_views(Views(), transform.crop, derive(5, "views", 2), indices, store.sizes)
    mean, std = (torch.tensor(values)[:, None, None] for values in looks)
    for v in range(10):
        wanted = naive_turns(usual[v] * std + mean, plan, v)
        torch.testing.assert_close(found[v], normalised(wanted, *looks), atol=1e-4, rtol=0)


def test_randaugment_is_left_out_for_deep_colours_and_the_log_says_so(tmp_path):
    texts = ("rand-m9-mstd0.5-inc1", None)
    makers = [TrainTransform(Bands(3), Augment(randaugment=text), 16, *norms(3), 5) for text in texts]
    with_it, without = (maker(0, np.arange(10))["images"] for maker in makers)
    assert torch.equal(with_it, without)

    for i, image in enumerate(Bands(3, count=8).images):
        path = tmp_path / "set" / ("train", "test")[i // 4] / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), image.permute(1, 2, 0).numpy())
    given = {key.replace(".", "__"): value for key, value in {**TINY, "model.kwargs": VIT}.items()}
    given |= {
        "data__name": "folder",
        "data__root": str(tmp_path / "set"),
        "data__subset": None,
        "train__size": 16,
        "train__epochs": 1,
    }
    assert inside("finetune", tmp_path / "run", **given) == 0
    told = (tmp_path / "run/log.txt").read_text()
    assert told.count("augment.randaugment: left out for the 4 of more than 8 bits, which it would cut to 8") == 1


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint8), (3, np.uint8), (5, np.uint16)])
def test_centre_crops_of_any_image(channels, dtype):
    store, (mean, std) = Bands(channels, dtype), norms(channels)
    found = EvalTransform(store, 16, 0.875, mean, std)(0, np.arange(10))["images"]
    for i, image in enumerate(store.images):
        short, (h, w) = 18, image.shape[1:]
        size = [18, 18 * w // h] if h <= w else [18 * h // w, 18]
        image = image if channels == 3 and dtype == np.uint8 else unit(image)  # photographs are resized as bytes
        planes = tv.resize(image, size, tv.InterpolationMode.BICUBIC, antialias=True)
        planes = planes if planes.is_floating_point() else unit(planes)
        top, left = (round((side - 16) / 2) for side in size)
        wanted = clip(planes)[:, top : top + 16, left : left + 16]
        assert min(size) == short
        torch.testing.assert_close(found[i], normalised(wanted, mean, std), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_from_bands(name, channels=5):
    given = PretrainConfig(method=METHODS[name](**HEADS.get(name, {})), data=Data(in_chans=channels))
    config = given.fill_from_method()[0]
    with seeded(0):
        backbone = create_backbone("vit_tiny_patch16_224", 16, in_chans=channels, **VIT)
        method = create_method(backbone, run_info(10, classes=3), config.method)
        method.localization = Localization(backbone, DrLoc(weight=0.1, hidden_dim=8), 16, channels)
    maker = MultiCropTransform(Bands(channels), replace(config.views, size=16, **ALL), *norms(channels), seed=0)
    loss = method.train()(maker(0, np.arange(8)), 5, 0)["loss"]
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    first = next(p for name, p in backbone.named_parameters() if "patch_embed" in name)
    assert first.shape[1] == channels and (first.grad is None or float(first.grad.abs().sum()) > 0)  # mocov3 holds it
