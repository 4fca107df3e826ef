"""The cost of drloc in a training step, with and without it (benchmarks/results/speed.md).

    python benchmarks/drloc_overhead.py --rounds 30

Each round times one optimizer step (forward, backward, AdamW) of each model without drloc, with it, and without again,
in rotating order. The ratio is of the same round, with a bootstrap interval of the median (95 %). Images are random.
The paper (supplement, Table 14, batches of 1,024 on unnamed GPUs) has +2.43 % (CvT-13), +2.36 % (Swin-T) and
+1.77 % (T2T-ViT-14).
"""

import argparse
import statistics
import time

import numpy as np
import torch
from side_by_side import head, row, turns, wait, where

MODELS = {"Swin-T": ("swin_tiny_patch4_window7_224", 0.5), "T2T-ViT-14": ("t2t_vit_14", 0.1), "CvT-13": ("cvt_13", 0.1)}


class Trainer:
    """A method with its optimizer on a fixed batch."""

    def __init__(self, name: str, weight: float, batch: int, size: int, classes: int, device: str):
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
        images = torch.randn(batch, 3, size, size, device=device)
        self.batch = {"images": images, "label": torch.randint(classes, (batch,), device=device)}
        self.device, self.number = device, 0

    def step(self) -> float:
        """Seconds of one optimizer step."""
        wait(self.device)
        start = time.perf_counter()
        self.number += 1
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.method(self.batch, self.number, 0)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait(self.device)
        return time.perf_counter() - start


def measure(name: str, weight: float, args) -> dict[str, list[float]]:
    """Seconds of each round's steps: ``plain``, ``drloc``, and ``again``, which is plain once more."""
    sizes = (args.batch, args.size, args.classes, args.device)
    plain, drloc = Trainer(name, 0.0, *sizes), Trainer(name, weight, *sizes)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"batch {args.batch}, {args.size} px, {args.rounds} rounds, {where(args.device, threads)}\n")
    print(head("model", "s a step", "with drloc", "overhead (95 %)", "plain against itself"))
    for label in args.models:
        seconds = measure(*MODELS[label], args)
        with_it = [
            2 * d / (p + a) for d, p, a in zip(seconds["drloc"], seconds["plain"], seconds["again"], strict=True)
        ]
        more = overhead(with_it, [1.0] * len(with_it))
        none = overhead(seconds["again"], seconds["plain"])
        plain, drloc = (statistics.median(seconds[job]) for job in ("plain", "drloc"))
        shown = [f"{m:+.2f} % ({low:+.2f} to {high:+.2f})" for m, low, high in (more, none)]
        print(row(label, f"{plain:.3f}", f"{drloc:.3f}", *shown), flush=True)


if __name__ == "__main__":
    main()
