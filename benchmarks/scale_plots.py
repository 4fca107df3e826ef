"""The pictures of docs/scale.md; drawn by scale.py."""

from pathlib import Path

import matplotlib.pyplot as plt
import scale_model as model
from scale_model import Step
from scale_sampling import SAMPLERS


def draw_memory(path: Path, d: int) -> None:
    """Memory of a rank over N."""
    sizes = [10**n for n in range(4, 10)]
    figure, axes = plt.subplots(figsize=(6, 4), dpi=90)
    for ranks, colour in zip((1, 8, 64), ("C0", "C1", "C2"), strict=True):
        steps = [Step(n, d, model.batch_of(ranks), ranks=ranks) for n in sizes]
        fixed = [step.backbone_states() + step.logits(held=False) for step in steps]
        for way, style, what in ((False, "--", "whole"), (True, "-", "sharded")):
            if (ranks, way) != (1, True) and (ranks, way) != (64, False):
                total = [(s.states(way) + s.features(way) + f) / 1e9 for s, f in zip(steps, fixed, strict=True)]
                label = "1 rank" if ranks == 1 else f"{what}, {ranks} ranks" + (" or more" if not way else "")
                axes.loglog(sizes, total, style, color=colour, label=label)
    for device in (model.H100, model.H200):
        axes.axhline(device.memory / 1e9, color="grey", linewidth=0.8)
        axes.text(sizes[0], device.memory / 1e9 * 1.08, device.name, fontsize=8, color="grey")
    axes.set(xlabel="images N", ylabel="GB a rank", title=f"N-way layer, AdamW and DeiT-Tiny, d = {d}, logits in tiles")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def draw_errors(path: Path, found: list[dict]) -> None:
    """Gradient error over M, a panel for each trained state and one of the start."""
    names = [state for state in dict.fromkeys(entry["state"] for entry in found) if state != "start, cosine x 16"]
    figure, panels = plt.subplots(1, len(names), figsize=(10, 3.2), dpi=80, sharey=True)
    for axes, name in zip(panels, names, strict=True):
        for kind in SAMPLERS:
            of = [e for e in found if e["state"] == name and e["sampler"] == kind]
            axes.loglog([e["M"] for e in of], [e["z error"] for e in of], "o-", markersize=3, label=kind)
        axes.set_title(name, fontsize=8)
        axes.set_xlabel("rows drawn, M")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of the gradient by z")
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
