"""The cost of drloc in a training step, with and without it (benchmarks/results/speed.md).

    python benchmarks/drloc_overhead.py --rounds 30
    python benchmarks/drloc_overhead.py --device cuda    # batches of 1,024 in passes of 128, as in
    Table 14

Each round times one optimizer step (forward, backward, AdamW) of each model without drloc, with it,
and without again, in rotating order. The ratio is of the same round, with a bootstrap interval of
the median (95 %). Images are random. The paper (supplement, Table 14, batches of 1,024 on unnamed
GPUs) has +2.43 % (CvT-13), +2.36 % (Swin-T) and +1.77 % (T2T-ViT-14).
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from side_by_side import head, row, turns, wait, where

MODELS = {
    "Swin-T": ("swin_tiny_patch4_window7_224", 0.5),
    "T2T-ViT-14": ("t2t_vit_14", 0.1),
    "CvT-13": ("cvt_13", 0.1),
}


class Trainer:
    """A method with its optimizer on a fixed batch, which goes through the network in ``passes``
    equal parts."""

    def __init__(
        self,
        name: str,
        weight: float,
        batch: int,
        passes: int,
        size: int,
        classes: int,
        device: str,
    ):
        from idmm.config import Augment, DrLoc, FinetuneTrain
        from idmm.methods.drloc import Localization
        from idmm.methods.finetune import Finetune
        from idmm.models import create_backbone
        from idmm.training.optim import create_optimizer

        torch.manual_seed(0)
        backbone = create_backbone(name, size, num_classes=classes)
        self.method = Finetune(backbone, Augment())
        if weight:
            self.method.localization = Localization(backbone, DrLoc(weight=weight), size, 3)
        self.method.to(device).train()
        others = {"localization": (self.method.localization, 1.0)} if weight else {}
        self.optimizer = create_optimizer(backbone, others, FinetuneTrain(), lr=1e-4)
        images = torch.randn(batch // passes, 3, size, size, device=device)
        self.batch = {
            "images": images,
            "label": torch.randint(classes, (len(images),), device=device),
        }
        self.device = device
        self.passes = passes
        self.number = 0

    def step(self) -> float:
        """Seconds of one optimizer step."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(self.passes):
            self.number += 1
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
                loss = self.method(self.batch, self.number, 0)["loss"] / self.passes
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait(self.device)
        return time.perf_counter() - start


def measure(name: str, weight: float, args) -> dict[str, list[float]]:
    """Seconds of each round's steps: ``plain``, ``drloc``, and ``again``, which is plain once
    more."""
    sizes = (args.batch, args.passes, args.size, args.classes, args.device)
    plain = Trainer(name, 0.0, *sizes)
    drloc = Trainer(name, weight, *sizes)
    jobs = {"plain": plain, "drloc": drloc, "again": plain}
    for trainer in (plain, drloc) * args.warmup:
        trainer.step()
    seconds = {job: [] for job in jobs}
    for _, job in turns(list(jobs), args.rounds):
        seconds[job].append(jobs[job].step())
    return seconds


def overhead(slow: list[float], fast: list[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios in percent over 1, with a bootstrap interval."""
    ratios = 100 * (np.array(slow) / np.array(fast) - 1)
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, help="images of a step, by default 8, on a GPU 1,024")
    parser.add_argument("--passes", type=int, help="parts of a batch, by default 1, on a GPU 8")
    parser.add_argument("--out", type=Path, help="JSON file to write, with images per second")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.batch = args.batch or (1024 if on_gpu else 8)
    args.passes = args.passes or (8 if on_gpu else 1)
    threads = torch.get_num_threads()
    found = {"rates": {}, "seconds": {}, "overhead": {}}
    line = f"batch {args.batch} in {args.passes} passes, {args.size} px, {args.rounds} rounds"
    print(f"{line}, {where(args.device, threads)}\n")
    print(head("model", "s a step", "with drloc", "overhead (95 %)", "plain against itself"))
    for label in args.models:
        seconds = measure(*MODELS[label], args)
        with_it = [
            2 * d / (p + a)
            for d, p, a in zip(seconds["drloc"], seconds["plain"], seconds["again"], strict=True)
        ]
        more = overhead(with_it, [1.0] * len(with_it))
        none = overhead(seconds["again"], seconds["plain"])
        plain, drloc = (statistics.median(seconds[job]) for job in ("plain", "drloc"))
        shown = [f"{m:+.2f} % ({low:+.2f} to {high:+.2f})" for m, low, high in (more, none)]
        print(row(label, f"{plain:.3f}", f"{drloc:.3f}", *shown), flush=True)
        found["rates"][f"drloc {label}"] = [args.batch / each for each in seconds["drloc"]]
        found["seconds"][label], found["overhead"][label] = seconds, more
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
