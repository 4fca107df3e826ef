"""Pictures of several runs: their accuracies over epochs, and over the number of parameters."""

from collections import defaultdict
from pathlib import Path

from idmm.report.charts import Network, Point, accuracy_curves, over_parameters
from idmm.report.page import Picture
from idmm.report.run_page import RunFacts


def compare(runs: list[RunFacts], out: Path) -> list[Picture]:
    """Draw the pictures for which enough runs have the same data into ``out``, and return them."""
    networks = []
    pictures = []
    curves: defaultdict[str, dict[str, list[Point]]] = defaultdict(dict)
    for run in runs:
        if run.curve:
            curves[run.data][run.label] = run.curve
        size = run.result.get("backbone_params")
        top1 = run.result.get("top1")
        if size is not None and top1 is not None:
            networks.append(Network(run.data, run.method, run.model, size, top1))
    panels = {data: of_data for data, of_data in curves.items() if len(of_data) > 1}
    if panels:
        pictures.append(Picture(out / "curves.png", "Accuracy over epochs"))
        accuracy_curves(panels, out / "curves.png", ("epoch", "top-1 accuracy (%)"))
    if over_parameters(networks, out / "params.png"):
        pictures.append(Picture(out / "params.png", "Accuracy over parameters"))
    return pictures
