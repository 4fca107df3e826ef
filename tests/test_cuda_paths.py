"""What runs on a GPU, tried without one: shapes and devices alone (fake tensors), and what a copy
of a model holds.

Under FakeTensorMode a tensor has a device and no values. An operation on tensors of two devices
raises, and so does whatever asks for a value (``.item()``, ``float``, ``bool``), which on a GPU
waits for all that it has still to do. So does a plain copy from the CPU (``torch.tensor(value,
device=...)`` makes one), which :class:`NoWaiting` refuses.
"""

import pytest
import tiny
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from idmm import config
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.models import create_backbone

PRETRAINING = {
    "idmm cosine": dict(name="idmm", classifier="cosine", projection=True),
    "joint": dict(name="idmm", label_weight=1.0, classes=3),
    "drloc": dict(name="idmm", drloc=config.DrLoc(weight=0.1)),
    "drloc reg": dict(name="idmm", drloc=config.DrLoc(weight=0.1, mode="reg", pairs=2)),
    "drloc l1_all": dict(name="idmm", drloc=config.DrLoc(weight=0.1, mode="l1_all")),
}
WAIT = ("simclr", "mocov2", "dino")  # lightly's losses ask for values
SIZES = {"t2t_vit_7": 64, "cvt_13": 64, "pvt_v2_b0": 64, "resnet10t": 64}
SIZES["swin_tiny_patch4_window7_224"] = 224


class NoWaiting(TorchDispatchMode):
    """Refuses copies between CPU and GPU that wait for the GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and not (kwargs or {}).get("non_blocking"):
            assert args[0].device.type == out.device.type, "a copy waits for the device"
        return out


def test_drlocs_head_is_built_where_the_backbone_is():
    """A classifier that starts from features has moved it already."""
    assert Localization(tiny.backbone().to("meta"), config.DrLoc(weight=0.1), 16, 3)


@pytest.fixture
def mode(monkeypatch):
    """Fake tensors, those that are made on the CPU included; pinning, which needs a driver, does
    nothing."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def sent(module, mode):
    """The module with its tensors on a GPU that is not there."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = mode.from_tensor(parameter.detach()).to("cuda")
                part._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else mode.from_tensor(buffer).to("cuda")
    return module


def to_gpu(batch, mode):
    return tiny.moved(batch, lambda tensor: mode.from_tensor(tensor).to("cuda"))


def step(method, batch):
    """What the loop does with a method, but for the backward pass, which wants a driver."""
    with NoWaiting():
        out = method(batch, 5, 0)
    assert all(value.device.type == "cuda" for value in out.values()), out
    with NoWaiting():
        method.before_step(0)
        method.after_step(0)


@pytest.mark.parametrize("name", [*PRETRAINING, "idmm", "supcon", "supervised", "mocov3", *WAIT])
def test_pretraining_stays_on_the_device(name, request):
    settings = {"name": name, "classes": 0} | PRETRAINING.get(name, {})
    backbone = tiny.backbone(num_classes=settings.pop("classes"))
    method = tiny.make(**settings, of=backbone)
    if name in WAIT:
        method.loss.forward = lambda rows, *_, **__: torch.stack([*rows]).sum()
    batch = tiny.batch(*tiny.GROUPS.get(name, (2, 1)), double=False)
    mode = request.getfixturevalue("mode")  # what is made above is real
    step(sent(method, mode), to_gpu(batch, mode))


@pytest.mark.parametrize("backbone", SIZES)
def test_backbones_stay_on_the_device(backbone, request):
    size = SIZES[backbone]
    method = Finetune(create_backbone(backbone, size, num_classes=3), config.Augment()).train()
    batch = {
        "images": torch.randn(4, 3, size, size),
        "label": torch.tensor([2, 0, 2, 1]),
    }
    mode = request.getfixturevalue("mode")
    step(sent(method, mode), to_gpu(batch, mode))
