"""Pictures of several runs: their accuracies over epochs, and over the number of parameters."""

from collections import defaultdict
from pathlib import Path

from idmm.report.charts import Network, accuracy_curves, over_parameters
from idmm.report.page import Picture
from idmm.report.run_page import RunFacts


def compare(runs: list[RunFacts], out: Path) -> list[Picture]:
    """Draw the pictures for which there are enough runs on the same data into ``out``, and return
    them."""
    networks = []
    pictures = []
    panels = defaultdict(dict)
    for run in runs:
        if run.curve:
            panels[run.data][run.label] = run.curve
        if "backbone_params" in run.result and "top1" in run.result:
            result = run.result
            networks.append(
                Network(run.data, run.method, run.model, result["backbone_params"], result["top1"])
            )
    panels = {data: curves for data, curves in panels.items() if len(curves) > 1}
    if panels:
        pictures.append(Picture(out / "curves.png", "Accuracy over epochs"))
        accuracy_curves(panels, out / "curves.png", ("epoch", "top-1 accuracy (%)"))
    if over_parameters(networks, out / "params.png"):
        pictures.append(Picture(out / "params.png", "Accuracy over parameters"))
    return pictures
