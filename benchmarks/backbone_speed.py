"""Training speed of small backbones at small images (docs/backbones.md), side by side.

    python benchmarks/backbone_speed.py --out speed.json

Each round times one forward and backward pass of each model, with a linear classifier, in an order that turns; what
counts is the median over rounds, in images a second. On the CPU these are seconds of this process's own processor time
on one thread, so that other programs on the machine matter less. A model that has used up ``--seconds`` sits out the
rest after three rounds. Images are random: their content costs no time. 'map' is what an image becomes, [h, w] of
tokens or of the last feature map. The small ViT is that of configs/digits/pretrain.yaml.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from side_by_side import head, now, row, turns, where, write

from idmm.models import create_backbone, feature_width, token_grid

DIGITS = Path(__file__).parents[1] / "configs/digits/pretrain.yaml"
MODELS = {  # label: timm's name and kwargs
    "small ViT": None,
    **{name: (name, {}) for name in ("pvt_v2_b0", "resnet10t", "resnet14t", "mobilenetv3_small_050", "ghostnet_050")},
    **{name: (name, {}) for name in ("convnext_atto", "edgenext_xx_small", "test_convnext", "test_resnet")},
}


class Trainer:
    """A backbone with a linear classifier on a fixed batch."""

    def __init__(self, label: str, size: int, batch: int, classes: int, device: str, layout: torch.memory_format):
        model = yaml.safe_load(DIGITS.read_text())["model"]
        name, kwargs = MODELS[label] or (model["name"], model["kwargs"])
        torch.manual_seed(0)
        self.backbone = create_backbone(name, size, drop_path=0.0, **kwargs).to(device, memory_format=layout)
        self.head = torch.nn.Linear(feature_width(self.backbone), classes).to(device)
        self.images = torch.randn(batch, 3, size, size, device=device).contiguous(memory_format=layout)
        self.label, self.device = torch.randint(classes, (batch,), device=device), device
        self.millions = sum(p.numel() for p in self.backbone.parameters()) / 1e6
        with torch.no_grad():
            self.map = tuple(token_grid(self.backbone.eval(), self.images[:1]).shape[-2:])
        self.backbone.train()
        self.rates: list[float] = []

    def step(self) -> float:
        """Seconds of one pass forward and backward."""
        start = now(self.device)
        F.cross_entropy(self.head(self.backbone(self.images)), self.label).backward()
        seconds = now(self.device) - start
        self.backbone.zero_grad()
        return seconds


def measure(labels: list[str], size: int, given) -> list[dict]:
    """Rows of the table for images of one size (pixels)."""
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    trainers = {label: Trainer(label, size, given.batch, given.classes, given.device, layout) for label in labels}
    spent = {label: trainer.step() for label, trainer in trainers.items()}  # a first one, not counted
    for number, label in turns(labels, given.rounds):
        if number < 3 or spent[label] < given.seconds:
            seconds = trainers[label].step()
            spent[label] += seconds
            trainers[label].rates.append(given.batch / seconds)
    return [
        {
            "model": label,
            "size": size,
            "millions": round(trainer.millions, 3),
            "map": trainer.map,
            "images_per_s": statistics.median(trainer.rates),
            "rounds": len(trainer.rates),
        }
        for label, trainer in trainers.items()
    ]


def main() -> None:
    """Prints a table for each size, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64], help="sides of the images (pixels)")
    parser.add_argument("--batch", type=int, default=32, help="images a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=15.0, help="of steps, after which a model sits out")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--channels_last", action="store_true", help="weights and images with the channels last")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--out", type=Path, help="a JSON file of all rows")
    given = parser.parse_args()
    torch.set_num_threads(1)
    what = where(given.device, threads=1) + (", channels last" if given.channels_last else "")
    print(f"batch {given.batch}, fp32, {what}")
    rows = []
    for size in given.sizes:
        print("\n" + head(f"{size} px", "parameters", "map", "images/s", "rounds"))
        found = sorted(measure(given.models, size, given), key=lambda each: -each["images_per_s"])
        for each in found:
            height, width = each["map"]
            cells = (f"{each['millions']:.2f}M", f"{height}x{width}", f"{each['images_per_s']:.0f}", each["rounds"])
            print(row(each["model"], *cells), flush=True)
        rows += found
    write(given.out, where=what, batch=given.batch, rows=rows)


if __name__ == "__main__":
    main()
