"""What only a GPU shows; benchmarks/gpu.sh runs these on one. Elsewhere they run on the CPU, which
keeps them right."""

import os

import numpy as np
import pytest
import tiny
import torch
from helpers import Process, inside, inside_ok, metrics, same, state
from test_resume import PLACE, stop_at

from idmm.losses import instance_discrimination_loss

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# other versions of libraries warn of other things
pytestmark = pytest.mark.filterwarnings("ignore")
gpu_alone = pytest.mark.skipif(not ON_GPU, reason="asks for CUDA itself")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
HERE = {"train__device": DEVICE}
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "1",
]


@pytest.fixture
def deterministic():
    """The switch that docs/runs.md names."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_tf32(monkeypatch):
    """Convolutions in fp32, as products are: torch lets cuDNN round their factors to 10 bits."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def stopped(patch, stage, out, **changes):
    """A run that was stopped in mid-epoch."""
    with patch.context() as inner:
        stop_at(inner, *PLACE[stage])
        assert inside(stage, out, **changes) == 130
    return out


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_resumed_run_ends_with_the_same_weights(stage, tmp_path, monkeypatch, deterministic):
    inside_ok(stage, tmp_path / "whole", **HERE)
    stopped(monkeypatch, stage, tmp_path / "cut", **HERE)
    inside_ok(stage, tmp_path / "cut", **HERE)
    assert same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_fp16_goes_on_with_its_scaler(stage, tmp_path, monkeypatch):
    half = {
        **HERE,
        "train__precision": "fp16" if ON_GPU else "bf16",
        "train__clip_grad": 1.0,
    }
    scaler = state(stopped(monkeypatch, stage, tmp_path / "a", **half))["scaler"]
    assert not ON_GPU or scaler["scale"] > 1
    inside_ok(stage, tmp_path / "a", **half)
    assert all(np.isfinite(record["loss"]) for record in metrics(tmp_path / "a"))


def test_bf16_with_workers_that_are_forked_beside_cuda(tmp_path):
    changes = {
        **HERE,
        "train__precision": "bf16",
        "data__workers": 2,
        "train__ema": 0.9,
    }
    inside_ok("pretrain", tmp_path / "a", **changes)
    assert metrics(tmp_path / "a")[-1]["loss"] < metrics(tmp_path / "a")[0]["loss"] + 0.5


@gpu_alone
def test_auto_takes_the_gpu_and_bf16(tmp_path):
    auto = {
        "train__device": "auto",
        "train__precision": "auto",
        "train__epochs": 1,
    }
    inside_ok("pretrain", tmp_path / "a", **auto)
    assert state(tmp_path / "a")["precision"] == (
        "bf16" if torch.cuda.is_bf16_supported(False) else "fp16"
    )


def test_losses_are_those_of_the_cpu(tmp_path, no_tf32):
    one = {
        "model__drop_path": 0.0,
        "train__epochs": 1,
    }  # nothing that the device draws
    inside_ok("pretrain", tmp_path / "cpu", **one, train__device="cpu")
    inside_ok("pretrain", tmp_path / "gpu", **one, **HERE)
    expected, loss = (metrics(tmp_path / name)[0]["loss"] for name in ("cpu", "gpu"))
    assert loss == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name",
    ["idmm", "simclr", "supcon", "supervised", "mocov2", "mocov3", "dino"],
)
def test_a_step_of_each_method(name, precision):
    if name not in ("idmm", "supervised"):
        pytest.importorskip("lightly")
    method = tiny.make(name).to(DEVICE)
    batch = tiny.batch(*tiny.GROUPS.get(name, (2, 1)), double=False)
    batch = tiny.moved(batch, lambda tensor: tensor.to(DEVICE))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
        out = method(batch, 5, 0)
    out["loss"].backward()
    method.before_step(0)
    method.after_step(0)
    for p in method.parameters():
        assert p.grad is None or bool(torch.isfinite(p.grad).all())
    assert torch.isfinite(method.embed(torch.randn(3, 16, device=DEVICE))).all()


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_nway_loss_is_that_of_the_cpu(chunk, mixed, deterministic):
    generator = torch.Generator().manual_seed(0)
    n = 1000
    width = 48
    rows = 120

    def loss_and_gradients(device):
        generator.manual_seed(1)
        z, w = (
            torch.randn(count, width, generator=generator).to(device).requires_grad_()
            for count in (rows, n)
        )
        target = (torch.arange(rows) % 7).to(device)  # each several times
        other = target.flip(0) if mixed else None
        loss = instance_discrimination_loss(z, w, target, other, 0.7, chunk_size=chunk)
        return loss.detach().cpu(), *(grad.cpu() for grad in torch.autograd.grad(loss, (z, w)))

    values, again, expected = (loss_and_gradients(device) for device in (DEVICE, DEVICE, "cpu"))
    for one, other, truth in zip(values, again, expected, strict=True):
        torch.testing.assert_close(one, truth, rtol=1e-4, atol=1e-6)
        assert torch.equal(one, other)


def test_processes_talk_over_the_device(tmp_path):
    """One process: rows are gathered over NCCL, flags over gloo."""
    script = tmp_path / "talk.py"
    script.write_text(
        "import sys, torch\n"
        "from accelerate import PartialState\n"
        "from idmm import distributed\n"
        "device = sys.argv[1]\n"
        "PartialState(cpu=device == 'cpu')\n"
        "assert ('nccl' in torch.distributed.get_backend()) == (device == 'cuda')\n"
        "rows = torch.randn(3, 4, device=device, requires_grad=True)\n"
        "(found,) = distributed.all_gather(rows)\n"
        "found.square().sum().backward()\n"
        "assert torch.equal(found, rows) and torch.allclose(rows.grad, 2 * rows)\n"
        "values = [None]\n"
        "torch.distributed.all_gather_object(values, 5, group=distributed._control_group())\n"
        "assert values == [5] and not distributed.several_gpus()\n"
    )
    with Process([*TORCHRUN, script, DEVICE], tmp_path / "err") as run:
        run.succeed()
