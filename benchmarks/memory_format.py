"""Training steps with the channels of a pixel side by side (channels last) against one plane a channel, on one core.

    python benchmarks/memory_format.py

A forward and a backward pass on 64 random images and AdamW's step, in fp32 and in bf16 autocast; the two ways take
turns, and the ratio is the median over rounds, by the process's own time. The rule that follows from it is
``prefers_channels_last`` in idmm/models/build.py.
"""

import argparse
import statistics
import time

import torch

from idmm.models.build import create_backbone, prefers_channels_last

NETS = [
    ("resnet10t", {"channels": [32, 64, 128, 256]}, 64),
    ("resnet18", {}, 64),
    ("mobilenetv4_conv_small_050", {}, 64),
    ("efficientnet_b0", {}, 64),
    ("convnext_atto", {}, 64),
    ("cct_2_3x2_32", {}, 32),
    ("pvt_v2_b0", {}, 64),
    ("deit_tiny_patch16_224", {"embed_dim": 96, "depth": 4, "num_heads": 3, "patch_size": 8}, 64),
]


def seconds(model: torch.nn.Module, images: torch.Tensor, optimizer: torch.optim.Optimizer, bf16: bool) -> float:
    """Makes a step; returns its time (seconds)."""
    began = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        features = model(images).float()  # [B, d]
    features.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - began


def ratio(name: str, kwargs: dict, size: int, bf16: bool, rounds: int) -> tuple[float, float]:
    """Returns the seconds of a step with a plane a channel, and how many times as fast channels last are."""
    ways = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = create_backbone(name, size, num_classes=0, **kwargs).train().to(memory_format=memory_format)
        ways.append((model, torch.randn(64, 3, size, size), torch.optim.AdamW(model.parameters(), fused=True), bf16))
    times = [[seconds(*way) for way in ways] for _ in range(rounds + 1)][1:]  # the first warms up
    return statistics.median(planes for planes, _ in times), statistics.median(planes / last for planes, last in times)


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(
        "| model | px | chosen | fp32, s a step | channels last | bf16, s a step | channels last |\n" + "|---" * 7 + "|"
    )
    for name, kwargs, size in NETS:
        chosen = "yes" if prefers_channels_last(create_backbone(name, size, num_classes=0, **kwargs)) else ""
        found = [
            f"{step:.3f} | {times:.2f}" for step, times in (ratio(name, kwargs, size, b, rounds) for b in (False, True))
        ]
        print(f"| `{name}` | {size} | {chosen} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
