"""Views made on the device against those that are made one by one from the same draws, and runs by both."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import distance, flags, inside, logged, metrics, refused, same, state, state_file
from test_resume import stop_at
from torch.utils._python_dispatch import TorchDispatchMode

from idmm.config import Augment, CropGroup, Views
from idmm.config.recipes import default_crops
from idmm.data import device_images, device_views
from idmm.data.augment import TrainTransform
from idmm.data.device_images import DeviceImages, images_on
from idmm.data.device_views import DeviceViews, ViewDraws, interpolation_weights
from idmm.data.loaders import BatchPlan, training_batches
from idmm.data.views import MultiCropTransform
from idmm.errors import UserError

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
DEVICES = ["cpu", CUDA]
TURNS = dict(vflip=0.5, rotate90=True)
EVERYTHING = dict(jitter_prob=0.9, solarize_prob=0.3, channel_jitter=[0.5, 0.4], channel_drop=0.3, **TURNS)
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


def on_device(transform, epoch, indices, device="cpu"):
    images = DeviceImages(transform.store, torch.device(device))
    batch = ViewDraws(transform)(epoch, indices)
    for drawn in batch["drawn"]:
        drawn.update((name, value.to(device)) for name, value in drawn.items() if torch.is_tensor(value))
    return DeviceViews(transform, images)(batch)


def assert_close(made, wanted, rgb8):
    """Compares normalised views: resized bytes may be another by one, which colours amplify; floats may not."""
    assert made.shape == wanted.shape and made.dtype == torch.float32
    apart = (made.cpu() - wanted).abs()
    most, mean = (0.05, 1e-3) if rgb8 else (5e-5, 1e-6)
    assert float(apart.max()) < most and float(apart.mean()) < mean, (float(apart.max()), float(apart.mean()))


def assert_same_views(make, indices, epoch=5, device="cpu"):
    wanted, made = make(epoch, indices), on_device(make, epoch, indices, device)
    assert made.keys() == wanted.keys()
    assert torch.equal(made["index"], wanted["index"]) and torch.equal(made["label"], wanted["label"])
    rgb8 = (make.store.channels, 3) == (3, make.store.pixel_bytes.min())
    for ours, theirs in zip(made["views"], wanted["views"], strict=True):
        assert_close(ours, theirs, rgb8)
    return made


CASES = [(3, (8,)), (3, (16,)), (3, (8, 16)), (1, (8,)), (2, (16,)), (5, (8, 16)), (13, (8,))]


# ------------------------------------------------------------------ whole views
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("channels", "bits"), CASES)
def test_views_are_those_of_the_per_image_path(channels, bits, device):
    crops = [CropGroup(count=2, scale=[0.14, 1.0]), CropGroup(count=3, scale=[0.01, 0.4], size=17)]
    crops.append(CropGroup(count=1, scale=[0.01, 0.4], blur_prob=1.0, blur_sigma=[2.0, 6.0], **EVERYTHING))
    config = Views(size=24, crops=crops)
    make = MultiCropTransform(Store(channels, bits), config, *norms(channels), seed=3)
    assert_same_views(make, np.array([4, 11, 0, 3, 7, 8, 1, 2]), device=device)


OPERATIONS = {
    "flip": dict(flip=0.5),
    "brightness": dict(jitter=[0.8, 0, 0, 0], jitter_prob=0.8),
    "contrast": dict(jitter=[0, 0.8, 0, 0], jitter_prob=0.8),
    "saturation": dict(jitter=[0, 0, 0.8, 0], jitter_prob=0.8),
    "hue": dict(jitter=[0, 0, 0, 0.5], jitter_prob=0.8),
    "strong": dict(jitter=[2.0, 2.0, 2.0, 0.5], jitter_prob=1.0),  # factors below 0 and beyond 2
    "grey": dict(grey_prob=0.5),
    "blur": dict(blur_prob=0.7),
    "wide blur": dict(blur_prob=1.0, blur_sigma=[5.0, 9.0]),  # kernels wider than the crop
    "solarize": dict(solarize_prob=0.5),
    "vflip": dict(vflip=0.5),
    "rotate90": dict(rotate90=True),
    "channel_jitter": dict(jitter=[0.0] * 4, jitter_prob=0.8, channel_jitter=[0.8, 0.8]),
    "channel_drop": dict(channel_drop=0.5),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(("channels", "bits"), [(3, (16,)), (2, (8,))])
def test_each_operation_is_that_of_the_per_image_path(name, channels, bits):
    colours = {**NOTHING, **OPERATIONS[name]}
    config = Views(size=15, crops=[CropGroup(count=4, scale=[0.1, 1.0])], **colours)
    make = MultiCropTransform(Store(channels, bits), config, *norms(channels), seed=1)
    plain = MultiCropTransform(make.store, Views(size=15, crops=config.crops, **NOTHING), *norms(channels), seed=1)
    indices = np.arange(12)
    made = assert_same_views(make, indices)["views"][0]
    none = channels != 3 and name in ("saturation", "hue", "grey")
    assert torch.equal(made, on_device(plain, 5, indices)["views"][0]) is none


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_tiny_boxes_and_grey_models(mode):
    store = Store(low=1, high=9)
    config = Views(size=16, crops=[CropGroup(count=4, scale=[0.01, 1.0])], interpolation=mode)
    assert_same_views(MultiCropTransform(store, config, [0.4], [0.25], seed=2), np.arange(12))


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [1, 7, 16, 40])
def test_weights_are_those_of_antialiased_interpolation(mode, size):
    lengths = torch.tensor([1.0, 2, 3, 7, 16, 31, 90])
    flip = torch.arange(7) % 2 == 1
    made = interpolation_weights(lengths, flip, size, 90, mode)  # [7, size, 90]
    for weights, length, turned in zip(made, lengths.int().tolist(), flip.tolist(), strict=True):
        eye = torch.eye(length)[None, None]  # each pixel alone
        wanted = F.interpolate(eye, (length, size), mode=mode, antialias=True)[0, 0].T  # [size, length]
        torch.testing.assert_close(weights[:, :length], wanted.flip(0) if turned else wanted, atol=2e-6, rtol=0)
        assert not weights[:, length:].any()


def test_little_memory_makes_more_parts_of_the_same_views(monkeypatch):
    store = Store(bits=(8, 16))
    make = MultiCropTransform(store, Views(size=16, crops=default_crops("idmm")), *norms(3), seed=0)
    whole = on_device(make, 1, np.arange(12))["views"]
    monkeypatch.setattr(device_views, "WORKING", 2**19)
    (drawn,) = ViewDraws(make)(1, np.arange(12))["drawn"]
    parts = drawn["layout"].parts
    chunks = [chunk for part in parts for chunk in part.chunks]
    assert len(parts) == 3 and len(chunks) > 8 and max(c.height * c.width for c in chunks) < 90 * 90
    covered = [v for chunk in chunks for v in range(chunk.views.start, chunk.views.stop)]
    assert covered == list(range(72)) and sorted(drawn["places"][:, 2].tolist()) == covered
    for ours, theirs in zip(on_device(make, 1, np.arange(12))["views"], whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


class Unsynchronised(TorchDispatchMode):
    """Fails on operations that wait for a GPU: what they return depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name == "index" and any(getattr(i, "dtype", None) == torch.bool for i in args[1])
        assert not masks and name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_device():
    config = Views(size=12, crops=[CropGroup(count=2, **EVERYTHING)])
    make = MultiCropTransform(Store(bits=(8, 16)), config, *norms(3), seed=0)
    finish, batch = DeviceViews(make, DeviceImages(make.store, torch.device("cpu"))), ViewDraws(make)(0, np.arange(12))
    with Unsynchronised():
        finish(batch)
        for wait in (lambda x: x[x > 0], lambda x: float(x.sum())):
            with pytest.raises(AssertionError):
                wait(torch.ones(2))


def test_workers_draw_the_same_numbers():
    make = MultiCropTransform(Store(), Views(size=8, crops=default_crops("idmm")), *norms(3), seed=0)
    finish = DeviceViews(make, DeviceImages(make.store, torch.device("cpu")))
    runs = [list(training_batches(ViewDraws(make), BatchPlan(12, 5, 2, seed=0), workers)) for workers in (0, 1)]
    for a, b in zip(*runs, strict=True):
        assert a["weight"] == b["weight"] and a["index"].tolist() == b["index"].tolist()
        assert all(torch.equal(x, y) for x, y in zip(finish(a)["views"], finish(b)["views"], strict=True))


# ------------------------------------------------------------------ stage 2
@pytest.mark.parametrize(("channels", "bits"), [(3, (8,)), (3, (16,)), (4, (8,))])
def test_training_images_are_drawn_and_made_as_views(channels, bits):
    config = Augment(randaugment=None, jitter_prob=0.8, grey_prob=0.3 * (channels == 3), **TURNS, channel_drop=0.3)
    make, indices = TrainTransform(Store(channels, bits), config, 20, *norms(channels), key=7), np.array([3, 1, 8])
    made = on_device(make, 2, indices)
    assert made["images"].shape == (3, channels, 20, 20) and made["label"].tolist() == (indices % 3).tolist()
    assert_close(made["images"], make(2, indices)["images"], (channels, bits) == (3, (8,)))


# ------------------------------------------------------------------ who makes them
def maker(backend="auto", **config):
    return MultiCropTransform(Store(), Views(size=8, crops=default_crops("idmm"), backend=backend), *norms(3), seed=0)


def test_auto_means_workers_where_there_is_no_gpu_unless_a_run_began_on_one(caplog):
    caplog.set_level(logging.INFO, "idmm")
    assert images_on(torch.device("cpu"), maker()) is None
    assert images_on(torch.device("cpu"), maker("workers"), kept=True) is None
    assert not caplog.records
    assert images_on(torch.device("cpu"), maker(), kept=True) is not None
    assert images_on(torch.device("cpu"), maker("device")).store.channels == 3
    assert "views: made on cpu, " in caplog.text


def test_auto_takes_a_gpu_where_images_fit_and_are_kept(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "idmm")
    gpu, need = torch.device("cuda", 0), device_images.image_bytes(maker().store)
    monkeypatch.setattr(device_images, "DeviceImages", lambda store, device: device)
    monkeypatch.setattr(device_images, "free_memory", lambda device: 2 * need)
    assert images_on(gpu, maker()) == gpu
    plain, randomly = (TrainTransform(Store(), Augment(randaugment=r), 8, *norms(3), 0) for r in (None, "rand-m9"))
    assert images_on(gpu, plain) == gpu
    caplog.clear()
    assert images_on(gpu, randomly) is None
    assert "views: made by loader workers: RandAugment takes one image at a time" in caplog.text
    redecoded = maker()
    redecoded.store.cache = "off"
    assert images_on(gpu, redecoded) is None and "decoded at every use (data.cache)" in caplog.text
    monkeypatch.setattr(device_images, "free_memory", lambda device: 2 * need - 1)
    assert images_on(gpu, maker()) is None
    assert f"the images need {need / 1000:.0f} kB on cuda:0, at most half of the" in caplog.text
    with pytest.raises(UserError, match=r"^views.backend: device, but the images need .* free there; wanted workers"):
        images_on(gpu, maker("device"))


def test_memory_that_torch_kept_of_an_earlier_run_is_free(monkeypatch):
    for name, value in {"mem_get_info": (30, 100), "memory_reserved": 60, "memory_allocated": 20}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert device_images.free_memory(torch.device("cuda", 0)) == 70


def test_images_lie_end_to_end_whatever_their_depth(monkeypatch):
    monkeypatch.setattr(device_images, "_PIECE", 5000)
    store = Store(2, (8, 16))
    images, starts = DeviceImages(store, torch.device("cpu")), device_images.pixel_starts(store)
    for i, (height, width) in enumerate(store.sizes):
        pixels = images.pixels[int(store.pixel_bytes[i])][starts[i] : starts[i] + height * width]
        wanted = store.image(i).permute(1, 2, 0).contiguous().view(torch.uint8).reshape(height * width, -1)
        assert torch.equal(pixels, wanted)


# ------------------------------------------------------------------ runs
RUNS = {
    "pretrain": {"views__backend": "device"},
    "finetune": {"augment__backend": "device", "augment__randaugment": "null"},
}


@pytest.fixture(scope="module")
def made_there(tmp_path_factory):
    """Whole runs of both stages with views made on the device; nothing may be written to them."""
    folder = tmp_path_factory.mktemp("device")
    for stage, given in RUNS.items():
        assert inside(stage, folder / stage, **given) == 0
    return folder


@pytest.mark.parametrize("stage", RUNS)
def test_a_stopped_run_goes_on_to_the_last_bit(stage, made_there, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 1, 2)
        assert inside(stage, out, **RUNS[stage]) == 130
    assert state(out)["views"] == "device"
    assert inside(stage, out, **RUNS[stage]) == 0
    assert same(out, made_there / stage) and metrics(out) == metrics(made_there / stage)
    assert logged(out).count("views: made on cpu, ") == 2


def test_both_ways_end_alike(made_there, tmp_path):
    out = tmp_path / "run"
    assert inside("pretrain", out, views__backend="workers") == 0
    assert state(out)["views"] == "workers" and "views: made" not in logged(out)
    ours, theirs = metrics(made_there / "pretrain"), metrics(out)
    assert [a["loss"] for a in ours] == pytest.approx([b["loss"] for b in theirs], rel=1e-4)
    assert 0 < distance(made_there / "pretrain", out) < 0.02


def test_what_auto_chose_is_kept(tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 1, 0, 1)
        assert inside("pretrain", out) == 130
    before = state(out)
    assert before["views"] == "workers"
    torch.save({**before, "views": "device"}, state_file(out))  # as one that began on a GPU
    assert inside("pretrain", out) == 0
    assert state(out)["views"] == "device" and "views: made on cpu, " in logged(out)


def test_a_run_that_ends_frees_its_images(tmp_path, monkeypatch):
    made, fill = [], DeviceImages.__init__
    monkeypatch.setattr(DeviceImages, "__init__", lambda images, *given: made.append(images) or fill(images, *given))
    assert inside("pretrain", tmp_path / "run", views__backend="device", train__epochs=1) == 0
    assert len(made) == 1 and not made[0].pixels


def test_what_cannot_be_had_is_refused(tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    said = refused(capsys, ["finetune", *flags("finetune", out, augment__backend="device")])
    assert len(said) == 1 and "augment.backend device makes no RandAugment" in said[0]
    monkeypatch.setattr(device_images, "free_memory", lambda device: 10_000)
    said = refused(capsys, ["pretrain", *flags("pretrain", out, views__backend="device")])
    wanted = "views.backend: device, but the images need 18 kB on cpu, at most half of the 10 kB that are free there"
    assert wanted in said[-1] and not out.exists()
