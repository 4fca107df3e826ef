"""Nearest rows of the N-way layer next to nearest features, to see what IDMM learned (section 3.1
of the paper)."""

from pathlib import Path

import numpy as np
import torch

from idmm.evaluation import similarity
from idmm.inference.explore_tables import NEXT, QUERIES, Similarities
from idmm.report.sheets import BLUE, ORANGE, caption_sheet

WEIGHT = "classifier.weight"  # W in the state of a run of IDMM


def instance_rows(run: Path) -> np.ndarray | None:
    """Return W of a run's last checkpoint, float32 [N, d]. None if the run has none."""
    state = run / "last" / "state.pt"
    if not state.exists():
        return None
    weight = torch.load(state, map_location="cpu", weights_only=True)["method"].get(WEIGHT)
    if weight is None:
        return None
    return weight.float().numpy()


def write_rows(found: Similarities, rows: np.ndarray, out: Path) -> list[str]:
    """Draw the images with the nearest rows of W and with the nearest features, and return the
    printed lines.

    Args:
        found: The images of the run, those of training first.
        rows: W, float32 [N, d], of the N training images.
        out: Folder of ``rows.png``.
    """
    images = found.images[: len(rows)]
    nearest = {
        "features": similarity.nearest(found.unit[: len(rows)], NEXT).index,
        "rows of W": similarity.nearest(similarity.unit_rows(rows), NEXT).index,
    }
    labels = [image.label for image in images]
    sheet = []
    for i in np.unique(np.linspace(0, len(images) - 1, QUERIES).astype(int)).tolist():
        for kind, index in nearest.items():
            tiles = [found.tile(images[i], images[i].name, BLUE)]
            for j in index[i].tolist():
                is_other = labels[i] is not None and labels[j] not in (None, labels[i])
                tiles.append(found.tile(images[j], images[j].name, ORANGE if is_other else None))
            sheet.append((kind, tiles))
    note = "Blue: a sample of the images. Orange: of another class"
    caption_sheet(sheet, out / "rows.png", "Nearest features and nearest rows of W", note)
    lines = ["Nearest rows of W: rows.png shows them next to the nearest features."]
    for kind, index in nearest.items():
        share = _equal_classes(index, labels)
        if share is not None:
            lines.append(f"  {kind}: {100 * share:.1f} % of the {NEXT} nearest have the same class")
    return lines


def _equal_classes(index: np.ndarray, labels: list[str | None]) -> float | None:
    """Return the share of neighbours [N, k] whose class is that of their image. None without
    labels."""
    matches = []
    for label, neighbours in zip(labels, index.tolist(), strict=True):
        if label is None:
            continue
        for j in neighbours:
            if labels[j] is not None:
                matches.append(labels[j] == label)
    if matches:
        return float(np.mean(matches))
    return None
