"""Views made on the device against those of the loader, operation by operation and in whole
runs."""

import numpy as np
import pytest
import torch
from helpers import (
    Together,
    flags,
    inside,
    inside_ok,
    logged,
    metrics,
    read,
    same,
    state,
)
from test_cuda_paths import NoWaiting
from test_gpu import DEVICE
from test_resume import PLACE, stop_at
from test_views import draw_group
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from idmm.config import METHODS, Augment, CropGroup, Views
from idmm.data import device_views, views
from idmm.data.device_views import DeviceImages, DeviceViews
from idmm.data.view_plan import ViewPlan
from idmm.data.views import MultiCropTransform, TrainTransform
from idmm.seeding import derive
from idmm.training import loop

NO_COLOURS = dict(jitter_prob=0.0, grey_prob=0.0, blur_prob=0.0, solarize_prob=0.0)
TURNS = dict(vflip=0.5, rotate90=True)
IDMM = Views(crops=list(METHODS["idmm"].CROPS), size=112)


class Store:
    """Images of uneven sizes: noise, or black and white with edges."""

    def __init__(
        self,
        channels=3,
        dtype=np.uint8,
        low=8,
        high=300,
        edges=False,
        count=8,
    ):
        rng = np.random.default_rng(low)
        self.sizes = rng.integers(low, high + 1, (count, 2))
        self.channels = channels
        self.labels = np.arange(count) % 3
        self.decodes = False
        self.stored_size = None
        self.images = []
        top = np.iinfo(dtype).max
        for h, w in self.sizes:
            pixels = rng.integers(0, top, (h, w, channels), dtype=dtype, endpoint=True)
            if edges:
                block = int(rng.integers(1, 9))
                tiles = top * rng.integers(0, 2, pixels.shape, dtype=dtype)
                pixels = tiles.repeat(block, axis=0).repeat(block, axis=1)[:h, :w]
            self.images.append(torch.from_numpy(pixels).permute(2, 0, 1))
        self.pixel_bytes = np.array([image.element_size() * channels for image in self.images])
        self.high_bit = count if dtype == np.uint16 else 0

    def image(self, i):
        return self.images[i]


KINDS = {
    "RGB": dict(channels=3),
    "grey": dict(channels=1),
    "5 channels": dict(channels=5),
    "RGB of 16 bits": dict(channels=3, dtype=np.uint16),
    "5 channels of 16 bits": dict(channels=5, dtype=np.uint16),
}
kinds = pytest.mark.parametrize("kind", KINDS)
TOLERANCES = {"RGB": 2.01 / 255}


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(("low", "high"), [(8, 20), (20, 600)])
@kinds
def test_crops_are_those_of_the_loader(kind, low, high, edges):
    store = Store(**KINDS[kind], low=low, high=high, edges=edges)
    indices = np.arange(8)
    images = DeviceImages(store, DEVICE)
    for size in (16, 112):
        group = CropGroup(count=4, scale=[0.05, 1.0], **NO_COLOURS, **TURNS)
        plan = draw_group(group, Views(), derive(low, "crops", size), indices, store.sizes)
        assert len(set(plan.turns)) == 4
        unchanged = ([0.0] * store.channels, [1.0] * store.channels)
        expected = views.make_views(store.images, plan, size, *unchanged).flatten(0, 1)
        # GPUs resize RGB of 8 bits in float16
        for dtype in [torch.float32, torch.float16] if kind == "RGB" else [torch.float32]:
            images.dtype = dtype
            crops = images.crops(plan, np.repeat(indices, 4), size).cpu()
            assert float((crops - expected).abs().max()) <= TOLERANCES.get(kind, 1e-4)


def plan_of(count, **values):
    """A plan that changes nothing but ``values``."""
    no = np.zeros(count, bool)
    zero = np.zeros(count, np.int64)
    unchanged = dict.fromkeys(("flip", "jitter", "grey", "solarize", "vflip"), no)
    unchanged |= dict.fromkeys(("order", "turns", "sigma"), zero)
    factors = np.tile([1.0, 1.0, 1.0, 0.0], (count, 1))
    box = np.zeros((count, 4), np.int64)
    return ViewPlan(**{**unchanged, "factors": factors, "box": box, **values})


def operations(count):
    """Plans of one operation each, and of all adjustments in each order."""
    rng = np.random.default_rng(0)
    some = np.arange(count) % 2 == 0
    factors = rng.random((count, 4)) * [2, 2, 2, 1] - [0, 0, 0, 0.5]
    order = np.arange(count) % 24
    for number in range(4):  # brightness, contrast, saturation, hue
        alone = plan_of(count).factors
        alone[:, number] = factors[:, number]
        yield plan_of(count, jitter=~np.zeros(count, bool), order=order, factors=alone)
    yield plan_of(count, jitter=some, order=order, factors=factors)
    yield plan_of(count, grey=some)
    yield plan_of(count, sigma=np.where(some, 0.1 + 1.9 * rng.random(count), 0))
    yield plan_of(count, solarize=some)


@pytest.mark.parametrize("channels", [3, 1, 5])
def test_each_colour_operation_is_that_of_the_loader(channels):
    count = 48
    for size in (8, 57):
        generator = torch.Generator().manual_seed(size)
        before = torch.rand(count, channels, size, size, generator=generator)
        before[::3] = before[::3].round()  # saturated, with ties between channels
        for number, plan in enumerate(operations(count)):
            after = device_views.recolour(before.clone().to(DEVICE), plan).cpu()
            for v in range(count):
                expected = recoloured(before[v].numpy().copy(), plan, v)
                assert np.abs(after[v].numpy() - expected).max() <= 1e-4, (
                    number,
                    size,
                    v,
                )


def recoloured(planes, plan, v):
    """A view [C, S, S] after the loader's operations, which take colours as [S, S, 3]."""
    if len(planes) != 3:
        return views.colour_bands(planes, plan, v)
    view = np.ascontiguousarray(planes.transpose(1, 2, 0))
    return views.colour_rgb(view, plan, v).transpose(2, 0, 1)


@pytest.mark.parametrize("is_grey", [False, True])
@kinds
def test_whole_views_are_those_of_the_loader(kind, is_grey):
    store = Store(**KINDS[kind])
    indices = np.arange(8)
    channels = 1 if is_grey and store.channels == 3 else store.channels
    mean = [0.1 * (1 + c) for c in range(channels)]
    std = [0.2 + 0.1 * c for c in range(channels)]
    crops = [
        CropGroup(count=2),
        CropGroup(
            count=4,
            scale=[0.05, 0.4],
            solarize_prob=0.5,
            jitter=[0.2] * 4,
            **TURNS,
        ),
    ]
    by_loader = MultiCropTransform(store, Views(crops=crops, size=64), mean, std, seed=3)
    expected = by_loader(2, indices)
    batch = DeviceViews(by_loader, DEVICE)(2, indices)
    for name in ("index", "label"):
        assert torch.equal(batch[name].cpu(), expected[name])
    for group, other in zip(batch["views"], expected["views"], strict=True):
        assert group.dtype == other.dtype
        difference = (group.cpu() - other).abs() * torch.tensor(std)[:, None, None]
        assert float(difference.mean((2, 3, 4)).max()) <= 1 / 255


def test_light_crops_of_fine_tuning_are_those_of_the_loader():
    def transform(augment):
        return TrainTransform(Store(), augment, 48, [0.5] * 3, [0.25] * 3, key=5)

    by_loader = transform(Augment(randaugment=None, jitter_prob=0.5, grey_prob=0.3, **TURNS))
    assert not by_loader.needs_workers
    expected = by_loader(1, np.arange(8))["images"]
    images = DeviceViews(by_loader, DEVICE)(1, np.arange(8))["images"].cpu()
    assert images.shape == expected.shape == (8, 3, 48, 48)
    assert float((images - expected).abs().mean()) <= 0.25 / 255
    for augment in (Augment(), Augment(randaugment=None, random_erasing=0.5)):
        assert transform(augment).needs_workers


def test_a_view_does_not_depend_on_the_others_of_its_batch(monkeypatch):
    transform = idmm_views(Store(), DEVICE)
    batch = transform(3, np.arange(8))["views"]
    monkeypatch.setattr(device_views, "WORKING_BYTES", 1)  # each view in a part of its own
    for group, alone in zip(batch, transform(3, np.array([6, 2]))["views"], strict=True):
        torch.testing.assert_close(group[[6, 2]], alone, atol=1e-4, rtol=0)


def idmm_views(store, device):
    return DeviceViews(MultiCropTransform(store, IDMM, [0.5] * 3, [0.5] * 3, seed=1), device)


class Memory(TorchDispatchMode):
    """The most bytes of all tensors that lived at once."""

    def __init__(self):
        super().__init__()
        self.tensors = torch.utils.weak.WeakIdKeyDictionary()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.tensors[out] = True
        storages = {tensor.untyped_storage() for tensor in self.tensors}
        self.most = max(self.most, sum(storage.nbytes() for storage in storages))
        return out


def test_a_batch_waits_for_no_gpu_and_needs_less_than_a_gigabyte(monkeypatch):
    """256 photographs at the store's bound, on a GPU that is not there."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    store = Store(low=300, high=560, count=4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        transform = idmm_views(store, "cuda")
        with NoWaiting(), Memory() as memory:
            batch = transform(0, np.tile(np.arange(4), 64))
    assert [group.shape[:2] for group in batch["views"]] == [
        (256, 2),
        (256, 4),
    ]
    for tensor in (*batch["views"], batch["index"], batch["label"]):
        assert tensor.device.type == "cuda"
    assert 2**28 < memory.most < 10**9


# ---------------------------------------------------------------------- whole runs
STAGES = {"pretrain": {}, "finetune": {"augment__randaugment": "null"}}
both = pytest.mark.parametrize("stage", list(STAGES))
WARNING = "views: the device ran out of memory. Loader workers make them from now on"


def has_room(patch, free=2**30):
    """Gives the CPU the free memory of a GPU."""
    patch.setattr(device_views, "free_memory", lambda _: free)


def place(out):
    """Where the views of a finished run were made, which its state and its result must agree on."""
    assert state(out)["views"] == read(out / "result.json")["views"]
    return state(out)["views"]


@both
def test_a_run_keeps_its_path_and_resumes_exactly(stage, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    with monkeypatch.context() as patch:
        has_room(patch)
        inside_ok(stage, whole, **STAGES[stage])
        stop_at(patch, *PLACE[stage])
        assert inside(stage, cut, **STAGES[stage]) == 130
    assert "views: made on cpu, which holds the images (" in logged(whole)
    inside_ok(stage, cut, **STAGES[stage])  # there is no room any more
    assert place(whole) == place(cut) == "device"
    assert metrics(whole) == metrics(cut)
    assert same(whole, cut)


@both
def test_a_run_of_the_loader_stays_there_on_a_gpu(stage, tmp_path, monkeypatch, whole):
    with monkeypatch.context() as patch:
        stop_at(patch, *PLACE[stage])
        assert inside(stage, tmp_path / "cut") == 130
    has_room(monkeypatch)
    inside_ok(stage, tmp_path / "cut")
    assert place(tmp_path / "cut") == place(whole[stage]) == "loader"
    assert same(whole[stage], tmp_path / "cut")


HALF = 2 * 96 * 64 * 3 - 1  # bytes: twice those of the images, but for one


@pytest.mark.parametrize(
    ("stage", "free", "reason"),
    [
        ("finetune", 2**30, "RandAugment or RandomErasing runs there"),
        (
            "pretrain",
            HALF,
            "the images take more than half of the GPU's free memory",
        ),
    ],
)
def test_the_log_has_the_reason_for_loader_workers(stage, free, reason, tmp_path, monkeypatch):
    has_room(monkeypatch, free)
    inside_ok(stage, tmp_path, train__epochs=1)
    assert f"views: made by loader workers, because {reason}\n" in logged(tmp_path)
    assert place(tmp_path) == "loader"


def run_out(function, call):
    """A function whose n-th call runs out of memory."""
    calls = []

    def limited(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*args, **kwargs)

    return limited


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (DeviceImages, "__init__", 1),
        (DeviceViews, "_made", 9),
        (loop.Loop, "_backward", 1),
        (loop.Loop, "_backward", 9),
    ],
    ids=["images", "views", "first step", "later step"],
)
def test_out_of_memory_falls_back_to_the_loader_once(
    owner, name, call, whole, tmp_path, monkeypatch, capsys
):
    """A run that leaves the device before or in its first step is the loader's, to the last bit."""
    has_room(monkeypatch)
    monkeypatch.setattr(owner, name, run_out(getattr(owner, name), call))
    inside_ok("pretrain", tmp_path)
    assert place(tmp_path) == "loader"
    assert len(metrics(tmp_path)) == 3
    assert capsys.readouterr().err.count(WARNING) == 1
    if call == 1:
        assert same(whole["pretrain"], tmp_path)
        assert metrics(whole["pretrain"]) == metrics(tmp_path)


def test_a_second_lack_of_memory_is_an_error(tmp_path, monkeypatch, capsys):
    def never(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    has_room(monkeypatch)
    monkeypatch.setattr(loop.Loop, "_backward", never)
    assert inside("pretrain", tmp_path) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("out of memory with a batch of 20 images: try --train.accumulate 4 ")


def test_two_processes_make_the_views_of_one(tmp_path, monkeypatch):
    one = tmp_path / "one"
    two = tmp_path / "two"
    changes = {
        "model__drop_path": 0.0,
        "train__accumulate": 1,
        "method__cutmix_alpha": 0.0,
    }
    with monkeypatch.context() as patch:
        has_room(patch)
        inside_ok("pretrain", one, **changes)
        stop_at(patch, 1, 0, 1)
        assert inside("pretrain", two, **changes) == 130
    argv = ["pretrain", *flags("pretrain", two, **changes)]
    with Together(argv, tmp_path / "err") as processes:
        processes.succeed()
    assert place(two) == "device"
    for expected, record in zip(metrics(one), metrics(two), strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-4)
