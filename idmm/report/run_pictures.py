"""Pictures of several runs: their accuracies over epochs, and over the number of parameters."""

from pathlib import Path

from idmm.report.charts import Points, accuracy_curves
from idmm.report.page import Picture
from idmm.report.run_page import RunFacts
from idmm.report.table import millions

Panels = dict[str, dict[str, Points]]  # title -> label -> points


def compare(runs: list[RunFacts], out: Path) -> list[Picture]:
    """Draw the pictures for which there are enough runs on the same data into ``out``, and return them."""
    pictures = []
    over_epochs: Panels = {}
    over_parameters: Panels = {}
    ticks = {}
    for run in runs:
        for name, points in run.curves.items():
            over_epochs.setdefault(f"{run.data}: {name}", {})[run.label] = points
        if "backbone_params" in run.result and "top1" in run.result:
            size = run.result["backbone_params"] / 1e6
            ticks[size] = f"{run.model}\n{millions(run.result['backbone_params'])}"
            curves = over_parameters.setdefault(run.data, {})
            curves.setdefault(run.method, []).append((size, run.result["top1"], 0.0))
    over_epochs = {title: curves for title, curves in over_epochs.items() if len(curves) > 1}
    if over_epochs:
        pictures.append(Picture(out / "curves.png", "Accuracy over epochs"))
        accuracy_curves(over_epochs, pictures[-1].path, ("epoch", "accuracy (%)"))
    if len(ticks) > 1:
        pictures.append(Picture(out / "params.png", "Accuracy over parameters"))
        labels = "parameters without the classifier", "top-1 accuracy (%)"
        accuracy_curves(over_parameters, pictures[-1].path, labels, ticks)
    return pictures
