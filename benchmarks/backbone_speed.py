"""Speed of backbones (benchmarks/results/speed.md), side by side: training of small ones.

    python benchmarks/backbone_speed.py --out speed.json
    python benchmarks/backbone_speed.py --in_use photos drawings --rounds 12 --out in_use.json

Each round times one forward and backward pass of each model, with a linear classifier, in an order
that turns. The table has the median over rounds: images per second with one plane per channel, and
how many times as fast the same pass is with channels last (the rule of ``prefers_channels_last`` in
idmm/models/build.py). On the CPU these are seconds of this process's own processor time on one
thread, so that other programs on the machine matter less. A model that has used up ``--seconds``
skips the rest after three rounds. Images are random: their content costs no time. 'map' is what an
image becomes, [h, w] of tokens or of the last feature map. The small ViT is that of
configs/digits/pretrain.yaml.

With ``--in_use`` it is the speed of ``--init imagenet`` at its own size on a folder of images, as
``idmm predict`` runs it, against the same network with one plane per channel. Each round has a
batch of its own. Classes that change are counted over all batches.
"""

import argparse
import copy
import random
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from side_by_side import head, now, ratios, row, turns, where, write

from idmm.config.commands import UseConfig
from idmm.data.folder import images_at
from idmm.evaluation.network import Network
from idmm.models import create_backbone, feature_width, token_grid
from idmm.models.weights import read_checkpoint
from idmm.training.precision import autocast

DIGITS = Path(__file__).parents[1] / "configs/digits/pretrain.yaml"
MODELS = {  # label: timm's name and kwargs
    "small ViT": None,
    **{
        name: (name, {})
        for name in ("pvt_v2_b0", "resnet10t", "resnet14t", "mobilenetv3_small_050", "ghostnet_050")
    },
    **{
        name: (name, {})
        for name in ("convnext_atto", "edgenext_xx_small", "test_convnext", "test_resnet")
    },
}


class Trainer:
    """A backbone with a linear classifier on a fixed batch."""

    def __init__(
        self, label: str, size: int, args: argparse.Namespace, layout: torch.memory_format
    ):
        model = yaml.safe_load(DIGITS.read_text())["model"]
        name, kwargs = MODELS[label] or (model["name"], model["kwargs"])
        torch.manual_seed(0)
        self.device = args.device
        self.bf16 = args.bf16
        self.backbone = create_backbone(name, size, drop_path=0.0, **kwargs).to(
            self.device, memory_format=layout
        )
        self.head = torch.nn.Linear(feature_width(self.backbone), args.classes).to(self.device)
        images = torch.randn(args.batch, 3, size, size, device=self.device)
        self.images = images.contiguous(memory_format=layout)
        self.label = torch.randint(args.classes, (args.batch,), device=self.device)
        self.millions = sum(p.numel() for p in self.backbone.parameters()) / 1e6
        with torch.no_grad():
            self.map = tuple(token_grid(self.backbone.eval(), self.images[:1]).shape[-2:])
        self.backbone.train()
        self.seconds: list[float] = []

    def step(self) -> float:
        """Seconds of one pass forward and backward."""
        start = now(self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            logits = self.head(self.backbone(self.images))  # [B, K]
        F.cross_entropy(logits.float(), self.label).backward()
        seconds = now(self.device) - start
        self.backbone.zero_grad()
        return seconds


LAYOUTS = {"planes": torch.contiguous_format, "channels last": torch.channels_last}


def measure(size: int, args: argparse.Namespace) -> list[dict]:
    """Rows of the table for images of one size (pixels)."""
    trainers = {
        (label, layout): Trainer(label, size, args, LAYOUTS[layout])
        for label in args.models
        for layout in LAYOUTS
    }
    spent = {key: trainer.step() for key, trainer in trainers.items()}  # a first one, not counted
    for number, key in turns(list(trainers), args.rounds):
        if number < 3 or spent[key[0], "planes"] < args.seconds:
            seconds = trainers[key].step()
            spent[key] += seconds
            trainers[key].seconds.append(seconds)
    rows = []
    for label in args.models:
        planes, last = (trainers[label, layout].seconds for layout in LAYOUTS)
        rounds = min(len(planes), len(last))
        row = {"model": label, "size": size, "map": trainers[label, "planes"].map, "rounds": rounds}
        row["millions"] = round(trainers[label, "planes"].millions, 3)
        row["images_per_s"] = args.batch / statistics.median(planes)
        rows.append(row | {"channels_last": ratios(planes[:rounds], last[:rounds]).median})
    return rows


def in_use(args: argparse.Namespace) -> list[dict]:
    """Rows of the table of a network in use, of which the first is the one compared with."""
    batch = UseConfig.batch_size
    plain = Network.from_checkpoint(read_checkpoint("imagenet"), 1000, "cpu", batch)
    files = images_at(args.in_use, "images")
    random.Random(0).shuffle(files)
    files = files[: batch * args.rounds]
    batches = list(plain.file_batches(files, files, {}))
    planes = copy.deepcopy(plain.model)
    last = plain.in_precision("fp32").model
    ways = {"planes, fp32": (planes, "fp32"), "fp32": (last, "fp32"), "bf16": (last, "bf16")}
    seconds = {way: [] for way in ways}
    classes = {way: [] for way in ways}
    for number, way in turns(list(ways), len(batches)):
        model, precision = ways[way]
        start = now("cpu")
        with torch.no_grad(), autocast("cpu", precision):
            logits = model(batches[number]["images"])  # [B, 1000]
        seconds[way].append(now("cpu") - start)
        classes[way].append(logits.argmax(1))
    first, *_ = ways
    truth = torch.cat(classes[first])
    rows = []
    for way in ways:
        changed = int((torch.cat(classes[way]) != truth).sum())
        row = {"way": way, "times_as_fast": ratios(seconds[first], seconds[way])}
        row |= {"changed": changed, "images": len(truth), "rounds": len(batches)}
        rows.append(row | {"images_per_s": batch / statistics.median(seconds[way])})
    return rows


def main() -> None:
    """Print a table for each size and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[32, 64], help="sides of the images (pixels)"
    )
    parser.add_argument("--batch", type=int, default=32, help="images per step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of steps, after which a model skips the rest"
    )
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--in_use", nargs="+", help="folders of images")
    parser.add_argument("--out", type=Path, help="a JSON file of all rows")
    args = parser.parse_args()
    torch.set_num_threads(1)
    what = where(args.device, threads=1)
    if args.in_use:
        print(head("lite0, 224 px", "times as fast", "classes that change"))
        rows = in_use(args)
        for one in rows:
            print(row(one["way"], one["times_as_fast"], f"{one['changed']} of {one['images']}"))
        write(args.out, where=what, rows=rows)
        return
    print(f"batch {args.batch}, {'bf16' if args.bf16 else 'fp32'}, {what}")
    rows = []
    for size in args.sizes:
        print("\n" + head(f"{size} px", "parameters", "map", "images/s", "channels last", "rounds"))
        for found in sorted(measure(size, args), key=lambda each: -each["images_per_s"]):
            height, width = found["map"]
            cells = (
                f"{found['millions']:.2f}M",
                f"{height}x{width}",
                f"{found['images_per_s']:.0f}",
            )
            print(
                row(found["model"], *cells, f"{found['channels_last']:.2f}", found["rounds"]),
                flush=True,
            )
            rows.append(found)
    write(args.out, where=what, batch=args.batch, rows=rows)


if __name__ == "__main__":
    main()
