"""Training steps with the channels of a pixel side by side (channels last) against one plane a channel, on one core.

    python benchmarks/memory_format.py

A forward and a backward pass on 64 random images and AdamW's step, in fp32 and in bf16 autocast; the two ways take
turns, and the ratio is the median over rounds, by the process's own time. The rule that follows from it is
``prefers_channels_last`` in idmm/models/build.py.
"""

import argparse
import statistics

import torch
from side_by_side import Spread, head, now, ratios, row, turns, where

from idmm.models.build import create_backbone, prefers_channels_last

NETS = [
    ("resnet10t", {"channels": [32, 64, 128, 256]}, 64),
    ("resnet18", {}, 64),
    ("mobilenetv4_conv_small_050", {}, 64),
    ("efficientnet_b0", {}, 64),
    ("convnext_atto", {}, 64),
    ("pvt_v2_b0", {}, 64),
    ("deit_tiny_patch16_224", {"embed_dim": 96, "depth": 4, "num_heads": 3, "patch_size": 8}, 64),
]


def seconds(model: torch.nn.Module, images: torch.Tensor, optimizer: torch.optim.Optimizer, bf16: bool) -> float:
    """Makes a step; returns its time (seconds)."""
    began = now("cpu")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        features = model(images).float()  # [B, d]
    features.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return now("cpu") - began


def ratio(name: str, kwargs: dict, size: int, bf16: bool, rounds: int) -> tuple[float, Spread]:
    """Returns the seconds of a step with a plane a channel, and how many times as fast channels last are."""
    ways, times = {}, {"planes": [], "last": []}
    for way, memory_format in (("planes", torch.contiguous_format), ("last", torch.channels_last)):
        torch.manual_seed(0)
        model = create_backbone(name, size, num_classes=0, **kwargs).train().to(memory_format=memory_format)
        ways[way] = (model, torch.randn(64, 3, size, size), torch.optim.AdamW(model.parameters(), fused=True), bf16)
    for number, way in turns(list(ways), rounds + 1):
        spent = seconds(*ways[way])
        times[way] += [spent] if number else []  # the first round warms up
    return statistics.median(times["planes"]), ratios(times["planes"], times["last"])


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{where('cpu', threads=1)}\n")
    print(head("model", "px", "chosen", "fp32, s a step", "channels last", "bf16, s a step", "channels last"))
    for name, kwargs, size in NETS:
        chosen = "yes" if prefers_channels_last(create_backbone(name, size, num_classes=0, **kwargs)) else ""
        found = [ratio(name, kwargs, size, bf16, rounds) for bf16 in (False, True)]
        cells = [cell for step, times in found for cell in (f"{step:.3f}", f"{times.median:.2f}")]
        print(row(f"`{name}`", size, chosen, *cells), flush=True)


if __name__ == "__main__":
    main()
