"""Which of timm's models can be pretrained (docs/models.md): one step of a method for each, at its
smallest size.

    python benchmarks/timm_models.py --millions 30

Each model is built as in a run, at growing image sizes until one is accepted. The method's loss of
two random images is computed, and its gradients. That happens on torch's meta device, which has
shapes and no numbers. The CPU serves models (T2T-ViT's autocast) and methods (all but the
supervised one) that the meta device cannot run. The output has the number of models that work, the
smallest sizes, and the error of each other model at its own size.
"""

import argparse
import collections
import time
import warnings

import timm
import torch

from idmm.config import METHODS, PretrainConfig
from idmm.errors import UserError
from idmm.methods import RunInfo, create_method
from idmm.models import create_backbone

SIZES = (32, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 320, 384, 448, 512)


def own_size(name: str) -> int:
    """The side that timm has for a name (pixels)."""
    return (timm.get_pretrained_cfg_value(name, "input_size") or (3, 224, 224))[-1]


def millions(name: str) -> float:
    """Parameters without a classifier, in millions."""
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name, num_classes=0).parameters()) / 1e6


def step(name: str, size: int, method: str, device: str) -> None:
    """Build a model and a method at an image size and run them forward and backward, or raise."""
    config, _ = PretrainConfig(method=METHODS[method]()).fill_from_method()
    images = 2
    with torch.device(device):
        backbone = create_backbone(name, size, drop_path=0.1)
        made = create_method(backbone, RunInfo(16, images, 1, 1, classes=3), config.method).train()
        views = [torch.randn(images, 2, 3, size, size)]
        batch = {"views": views, "index": torch.arange(images), "label": torch.arange(images)}
        made(batch, 0, 0)["loss"].backward()
    if not any(p.grad is not None for p in backbone.parameters()):
        raise RuntimeError("no gradient reaches the backbone")


def smallest(name: str, method: str) -> tuple[int | None, str, str]:
    """Return the smallest size that works and its device, or None and the error at the model's own
    size."""
    sizes = sorted({*SIZES, own_size(name)})
    for device in ("meta", "cpu"):
        for size in sizes:
            try:
                step(name, size, method, device)
                return size, device, ""
            except UserError as error:
                fault = str(error)
            except Exception as error:  # a traceback for users: the table must say so
                fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if size == own_size(name):
                reason = fault
    return None, "", reason


def main() -> None:
    """Print the counts and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=float, default=30, help="parameters up to which models are tried"
    )
    parser.add_argument("--method", default="supervised", choices=list(METHODS))
    parser.add_argument("--models", nargs="*", help="names instead of all")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # timm's, on deprecated names
    start = time.time()
    names = args.models or timm.list_models()
    found = {name: smallest(name, args.method) for name in names if millions(name) < args.millions}
    sizes = collections.defaultdict(list)
    for name, (size, _, _) in found.items():
        sizes[size].append(name)
    failed = sizes.pop(None, [])
    cpu = [name for name, (_, device, _) in found.items() if device == "cpu"]
    versions = f"timm {timm.__version__}, torch {torch.__version__}"
    print(
        f"{versions}: {len(found)} of {len(names)} models have under "
        f"{args.millions:g}M parameters;",
        end=" ",
    )
    print(
        f"{len(found) - len(failed)} serve {args.method}, "
        f"{len(cpu)} of them tried on the CPU: {', '.join(cpu)}"
    )
    for size, fitting in sorted(sizes.items()):
        print(f"| {size} px | {len(fitting)} | {', '.join(fitting) if size > SIZES[0] else ''} |")
    for name in failed:
        print(f"| {name} | {found[name][2]} |")
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
