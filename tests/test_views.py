"""Stage 1's views against torchvision with the same parameters, also of several sizes; stage 2's
images; batches."""

import math

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as tv
from pytest import approx
from timm.data.auto_augment import rand_augment_transform
from timm.data.random_erasing import RandomErasing
from tiny import VIT
from torch.testing import assert_close

from idmm.config import METHODS, Augment, CropGroup, Views
from idmm.config.data import colours_of
from idmm.data import views
from idmm.data.loaders import BatchPlan, training_batches, worker_count
from idmm.data.view_plan import ORDERS, draw_boxes, draw_views
from idmm.data.views import MultiCropTransform, TrainTransform
from idmm.errors import RunError, UserError
from idmm.models import create_backbone
from idmm.models.build import try_size
from idmm.seeding import derive, seeded, uniforms

GREY = (0.5, 0.5, 0.5)

CROPS = list(METHODS["idmm"].CROPS)


class Store:
    """Random images of uneven sizes."""

    def __init__(self, count=10, seed=0):
        rng = np.random.default_rng(seed)
        self.sizes = rng.integers(20, 60, (count, 2))
        self.images = [
            torch.from_numpy(rng.integers(0, 256, (3, *size), dtype=np.uint8))
            for size in self.sizes
        ]
        self.labels = np.arange(count) % 3
        self.stored_size = None

    def image(self, i):
        return self.images[i]


def draw_group(group, config, *args):
    """The plan of a group of crops."""
    return draw_views(colours_of(group, config), group.scale, group.count, *args)


def one_view(image, plan, v, size):
    """The same view by torchvision, one operation after the other."""
    top, left, height, width = plan.box[v]
    mode = tv.InterpolationMode.BICUBIC
    x = (
        tv.resized_crop(image, top, left, height, width, [size, size], mode, antialias=True).float()
        / 255
    )
    x = tv.horizontal_flip(x) if plan.flip[v] else x
    if plan.jitter[v]:
        adjust = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
        for number in ORDERS[plan.order[v]]:
            x = adjust[number](x, float(plan.factors[v, number]))
    x = tv.rgb_to_grayscale(x, 3) if plan.grey[v] else x
    if plan.sigma[v] > 0:
        x = tv.gaussian_blur(
            x, [2 * math.ceil(3 * plan.sigma[v]) + 1] * 2, [float(plan.sigma[v])] * 2
        )
    return tv.solarize(x, 0.5) if plan.solarize[v] else x


@pytest.mark.parametrize("solarized", [0.0, 0.5])
def test_views_are_torchvisions_with_the_same_parameters(solarized):
    store = Store()
    config = Views(crops=CROPS, size=16, solarize_prob=solarized)
    indices = np.arange(10)
    group = CropGroup(count=4, scale=[0.05, 0.4])
    plan = draw_group(group, config, derive(0, "t"), indices, store.sizes)
    assert (0 < plan.solarize.sum() < 40) == (solarized > 0)
    ours = views.make_views([store.image(i) for i in indices], plan, 16, (0.0,) * 3, (1.0,) * 3)
    assert ours.shape == (10, 4, 3, 16, 16)
    for v in range(40):
        expected = one_view(store.image(v // 4), plan, v, 16)
        # torchvision rounds luma's weights
        assert_close(
            ours[v // 4, v % 4],
            expected,
            atol=2e-3,
            rtol=0,
        )


def test_a_groups_own_colours_come_before_those_of_all():
    config = Views(
        crops=CROPS,
        blur_prob=0.0,
        jitter=[0.1, 0.1, 0.1, 0.0],
        grey_prob=1.0,
    )
    coloured = CropGroup(
        count=2,
        blur_prob=1.0,
        solarize_prob=1.0,
        flip=0.0,
    )
    plan, other = (
        draw_group(group, config, 5, np.arange(50), np.full((50, 2), 64))
        for group in (coloured, CropGroup())
    )
    assert plan.sigma.min() >= 0.1
    assert plan.solarize.all()
    assert not plan.flip.any()
    assert plan.grey.all()
    assert not other.sigma.any()
    assert not other.solarize.any()
    assert other.flip.any()
    assert other.grey.all()
    assert np.array_equal(plan.factors, other.factors)
    assert 0.9 <= plan.factors[:, :3].min()


def test_boxes_lie_inside_and_cover_the_share_asked_for():
    sizes = np.tile([[40, 100]], (5000, 1))
    boxes = draw_boxes(sizes, (0.05, 0.4), uniforms(1, np.arange(5000), 22))
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 40).all()
    assert (left + width <= 100).all()
    share = height * width / 4000
    assert 0.04 < share.min()
    assert share.max() < 0.42
    assert share.mean() == approx(0.225, abs=0.02)
    ratio = width / height
    assert 0.6 < ratio.min()
    assert ratio.max() < 1.5
    assert np.exp(np.log(ratio).mean()) == approx(1, abs=0.1)


def test_frequencies_and_strengths_are_the_configs():
    config = Views(crops=CROPS, solarize_prob=0.3)
    indices = np.arange(10_000)
    sizes = np.full((10_000, 2), 64)
    plan = draw_group(config.crops[0], config, 5, indices, sizes)
    shares = {
        "flip": 0.5,
        "jitter": 0.8,
        "grey": 0.2,
        "sigma": 0.5,
        "solarize": 0.3,
    }
    for name, expected in shares.items():
        assert (getattr(plan, name) > 0).mean() == approx(expected, abs=0.02)
    blurred = plan.sigma[plan.sigma > 0]
    ranges = [(plan.factors[:, i], 0.2, 1.8) for i in range(3)] + [
        (plan.factors[:, 3], -0.2, 0.2),
        (blurred, 0.1, 2),
    ]
    for values, low, high in ranges:
        assert low <= values.min() < low + 0.01
        assert high - 0.01 < values.max() <= high
    assert np.bincount(plan.order, minlength=24).min() > 600


def test_a_view_depends_on_seed_epoch_and_image_alone():
    store = Store()
    config = Views(crops=CROPS, size=12)
    maker = MultiCropTransform(store, config, GREY, GREY, seed=1)
    batch = maker(3, np.arange(10))
    assert [tuple(v.shape) for v in batch["views"]] == [
        (10, 2, 3, 12, 12),
        (10, 4, 3, 12, 12),
    ]
    alone = maker(3, np.array([7]))
    for group, one in zip(batch["views"], alone["views"], strict=True):
        assert torch.equal(one[0], group[7])
    assert not torch.equal(maker(4, np.array([7]))["views"][0], alone["views"][0])
    other = MultiCropTransform(store, config, GREY, GREY, seed=2)
    assert not torch.equal(other(3, np.array([7]))["views"][0], alone["views"][0])
    assert not torch.equal(batch["views"][0][7, 0], batch["views"][0][7, 1])


@pytest.mark.parametrize("randaugment", [None, "rand-m9-n3-inc1"])
def test_training_images_are_views_then_timms_randaugment(randaugment):
    store, indices, (mean, std) = (
        Store(12),
        np.arange(12),
        (
            (0.4, 0.5, 0.6),
            (0.1, 0.2, 0.3),
        ),
    )
    colours = (
        dict(jitter_prob=0.0, grey_prob=0.0)
        if randaugment
        else dict(jitter_prob=0.5, grey_prob=0.3)
    )
    transform = TrainTransform(
        store, Augment(**colours, randaugment=randaugment), 16, mean, std, key=5
    )
    images = transform(2, indices)["images"]
    plan = next(transform.plans(2, indices))
    assert 0 < plan.flip.sum() < 12
    assert bool(plan.jitter.sum()) is not bool(randaugment)
    for v, image in enumerate(map(store.image, indices)):
        expected = one_view(image, plan, v, 16)
        if randaugment:
            operations = rand_augment_transform(
                randaugment, {"translate_const": 7, "img_mean": (102, 128, 153)}
            )
            with seeded(derive(5, "augment", 2, v)):
                expected = tv.to_dtype(
                    tv.to_image(operations(tv.to_pil_image(expected))), scale=True
                )
        assert_close(
            images[v],
            tv.normalize(expected, mean, std),
            atol=2e-2,
            rtol=0,
        )


def test_the_strongest_posterize_works():
    maker = TrainTransform(
        Store(40), Augment(randaugment="rand-m10-n4-inc1"), 16, GREY, GREY, key=5
    )
    images = maker(0, np.arange(40))["images"]
    assert_close(maker(0, np.array([9]))["images"][0], images[9])


@pytest.mark.parametrize("channels", [3, 5])
def test_random_erasing_is_timms_with_a_seed_per_image(channels):
    store = Store(40)
    indices = np.arange(40)
    store.images = [image.repeat(2, 1, 1)[:channels] for image in store.images]
    norms = ((0.5,) * channels,) * 2
    usual = TrainTransform(store, Augment(), 16, *norms, key=5)(2, indices)["images"]
    erasing = TrainTransform(store, Augment(random_erasing=0.25), 16, *norms, key=5)
    before = torch.get_rng_state()
    images = erasing(2, indices)["images"]
    assert torch.equal(before, torch.get_rng_state()), "the caller's generators stay"
    assert torch.equal(erasing(2, np.array([9, 31]))["images"], images[[9, 31]])
    erased = 0
    for index, image in enumerate(usual):
        with seeded(derive(5, "erasing", 2, index)):
            expected = RandomErasing(0.25, mode="pixel", device="cpu")(image.clone())
        assert torch.equal(images[index], expected)
        erased += not torch.equal(image, expected)
    assert 3 <= erased <= 19


def test_a_randaugment_that_is_not_understood():
    with pytest.raises(
        UserError, match="^augment.randaugment: 'rand-q3' is unknown, expected timm's form"
    ):
        TrainTransform(Store(), Augment(randaugment="rand-q3"), 16, GREY, GREY, key=5)


@pytest.mark.parametrize("key", ["views", "images"])
def test_workers_change_nothing(key):
    store = Store(11)
    makers = {
        "views": MultiCropTransform(store, Views(crops=CROPS, size=16), GREY, GREY, seed=0),
        "images": TrainTransform(store, Augment(), 16, GREY, GREY, key=0),
    }
    plan = BatchPlan(11, 4, 2, seed=0)
    first, *others = (list(training_batches(makers[key], plan, workers)) for workers in (0, 1, 2))
    for other in others:
        assert len(other) == len(first) == 6
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a["index"], b["index"])
            assert all(map(torch.equal, a[key], b[key]))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_vanishes_is_one_line(workers):
    def broken(epoch, indices):
        raise RunError("data.root: 'a.png' was fine when loaded, but now: gone")

    with pytest.raises(RunError, match=r"^data.root: 'a.png' was fine when loaded, but now: gone$"):
        list(training_batches(broken, BatchPlan(4, 2, 1, seed=0), workers))


def test_too_little_shared_memory_falls_back_to_no_workers():
    workers, reason = worker_count(2, 2**45)
    assert workers == 0
    assert "data.workers 2 would need" in reason
    assert "none used instead" in reason
    assert worker_count(3, 10) == (3, None)
    assert 0 <= worker_count(None, 10)[0] <= 16


def dynamic(name="vit_tiny_patch16_224", size=16, **kwargs):
    with seeded(0):
        return create_backbone(name, size, dynamic_size=True, **kwargs)


@pytest.mark.parametrize(
    "name, sizes, kwargs",
    [
        ("vit_tiny_patch16_224", (32, 16), VIT),
        ("deit_tiny_distilled_patch16_224", (32, 16), VIT),
        (
            "swin_tiny_patch4_window7_224",
            (64, 32),
            dict(
                embed_dim=24,
                depths=(1, 1),
                num_heads=(1, 2),
            ),
        ),
        ("resnet10t", (64, 32), {}),
    ],
)
def test_a_backbone_of_two_sizes_has_the_weights_of_a_plain_one(name, sizes, kwargs):
    model = dynamic(name, sizes[0], **kwargs)
    assert try_size(model, name, sizes[1]).shape == (1, model.feature_width)
    assert model.training
    plain = create_backbone(name, sizes[0], **kwargs)
    plain.load_state_dict(model.state_dict(), strict=True)
    images = torch.randn(2, 3, sizes[0], sizes[0])
    assert torch.equal(model.eval()(images), plain.eval()(images))
