"""Nearest rows of the N-way layer next to nearest features (section 3.1 of IDMM's paper)."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from idmm.data.split import spread
from idmm.evaluation import similarity
from idmm.inference.explore_tables import NEXT, QUERIES, Similarities
from idmm.report.sheets import BLUE, ORANGE, SheetRow, caption_sheet

WEIGHT = "classifier.weight"  # W in the state of a run of IDMM


def instance_rows(run: Path) -> NDArray[np.float32] | None:
    """Return W of a run's last checkpoint, float32 [N, d]. None if the run has none."""
    file = run / "last" / "state.pt"
    if not file.exists():
        return None
    state = torch.load(file, map_location="cpu", weights_only=True)
    weights: dict[str, torch.Tensor] = state["method"]
    if WEIGHT not in weights:
        return None
    return weights[WEIGHT].float().numpy()


def write_rows(similarities: Similarities, rows: NDArray[np.float32], out: Path) -> list[str]:
    """Draw images with the nearest rows of W and with the nearest features.

    Args:
        similarities: Those of the images of the run, the images of training first.
        rows: W, float32 [N, d], of the N training images.
        out: Folder of ``rows.png``.

    Returns:
        The printed lines.
    """
    images = similarities.images[: len(rows)]
    labels = [image.label for image in images]
    nearest = {
        "features": similarity.nearest(similarities.unit[: len(rows)], NEXT).index,
        "rows of W": similarity.nearest(similarity.unit_rows(rows), NEXT).index,
    }
    sheet = []
    for i in spread(len(images), QUERIES).tolist():
        image = images[i]
        for kind, index in nearest.items():
            tiles = [similarities.tile(image, image.name, BLUE)]
            for j in index[i].tolist():
                neighbour = images[j]
                frame = None
                if None not in (image.label, neighbour.label) and image.label != neighbour.label:
                    frame = ORANGE
                tiles.append(similarities.tile(neighbour, neighbour.name, frame))
            sheet.append(SheetRow(kind, tiles))
    note = "Blue: a sample of the images. Orange: of another class"
    caption_sheet(sheet, out / "rows.png", "Nearest features and nearest rows of W", note)
    lines = ["Nearest rows of W: rows.png shows them next to the nearest features."]
    for kind, index in nearest.items():
        share = _equal_classes(index, labels)
        if share is not None:
            lines.append(f"  {kind}: {100 * share:.1f} % of the {NEXT} nearest have the same class")
    return lines


def _equal_classes(index: NDArray[np.int64], labels: list[str | None]) -> float | None:
    """Return the share of neighbours [N, k] that have the class of their image.

    None: no image with a label has a neighbour with one.
    """
    classes = np.array([label or "" for label in labels])
    neighbours = classes[index]  # [N, k]
    labelled = (classes[:, None] != "") & (neighbours != "")
    if not labelled.any():
        return None
    return float((neighbours == classes[:, None])[labelled].mean())
