"""What grid.html shows beside the sections: every cell's runs, the config that they share, and what is their own."""

import json
from urllib.parse import quote

from idmm.progress import duration
from idmm.report.sections import Sections
from idmm.report.table import Row, Table, TableCell, run_label

FIELDS = {
    "pretrain_seed": "pretraining seed", "seed": "seed", "status": "status", "top1": "top-1", "top5": "top-5",
    "mean_per_class": "mean per class", "knn": "kNN", "pretrain_seconds": "pretraining time", "seconds": "time",
    "error": "error", "log": "log", "folder": "folder",
}  # fmt: skip


def page(found: Sections) -> dict:
    """Returns the table's lines in order, with the details of each cell by its number, and all runs as texts."""
    configs = Configs(found.grid["cells"])
    targets = list(dict.fromkeys(target for table in found.tables for target in table.targets))
    rows, details = [], []
    for table in found.tables:
        for backbone, row in ((b, row) for b in table.backbones for row in table.rows_of(b)):
            cells = []
            for target in targets:
                cell = table.cells.get((backbone, row, target))
                text = _sentence(table, cell) if cell else ""
                cells.append((len(details), cell, text))
                if cell:
                    title = f"{row.label} → {target} ({backbone})"
                    details.append(
                        {"title": title, "said": text, **_runs(cell), "config": configs.own(cell.stats.runs)}
                    )
            rows.append(
                {"table": table, "backbone": backbone, "row": row, "cells": cells, **_averages(table, backbone, row)}
            )
    return {
        "readouts": [table.label for table in found.tables],
        "backbones": list(dict.fromkeys(backbone for table in found.tables for backbone in table.backbones)),
        "targets": targets,
        "rows": rows,
        "details": details,
        "runs": [(run_label(run), run_texts(run)) for run in found.grid["cells"]],
        "shared_config": configs.shared,
    }


def _averages(table: Table, backbone: str, row: Row) -> dict[str, float | None]:
    """Over all targets; of some alone it would be another number."""
    cells = table.cells_of(backbone, row)
    means = [cell and cell.stats.mean for cell in cells]
    gains = [cell and cell.gain and cell.gain.mean for cell in cells]
    averages = [None if None in values else sum(values) / len(values) for values in (means, gains)]
    return dict(zip(("average", "average_gain"), averages, strict=True))


def _sentence(table: Table, cell: TableCell) -> str:
    """A cell in a line."""
    stats, gain = cell.stats, cell.gain
    if stats.mean is None:
        return f"{stats.failed} of {len(stats.runs)} runs failed" if stats.failed else "not run yet"
    parts = [f"{table.label}: mean {stats.mean:.2f}, n = {stats.n} of {len(stats.runs)}"]
    if stats.half is not None:
        parts.append(f"95 % interval {stats.mean - stats.half:.2f} to {stats.mean + stats.half:.2f}")
    if gain is not None:
        half = "" if gain.half is None else f" (95 % interval ± {gain.half:.2f})"
        parts.append(f"gain over scratch {gain.mean:+.2f}{half}")
    seconds = sum(run["seconds"] or 0 for run in stats.runs)
    return "; ".join([*parts, *([f"{duration(seconds)} in all"] if seconds else [])])


def _runs(cell: TableCell) -> dict[str, list]:
    """A cell's runs as rows of texts under their columns; columns that are empty are left out."""
    runs = [run_texts(run) for run in cell.stats.runs]
    kept = [name for name in FIELDS if any(run[name] for run in runs)]
    return {"columns": [FIELDS[name] for name in kept], "runs": [[run[name] for name in kept] for run in runs]}


def run_texts(run: dict) -> dict[str, str]:
    """Returns a run's fields as texts; files are links beside the page."""
    out = {}
    for name in FIELDS:
        value = run.get(name)
        if value is None or (name == "folder" and run["status"] != "ok"):
            out[name] = ""
        elif name in ("seconds", "pretrain_seconds"):
            out[name] = duration(value)
        elif name in ("log", "folder"):
            out[name] = f"./{quote(str(value))}"  # whatever a path is called, it is no address of anything else
        else:
            out[name] = f"{value:.2f}" if isinstance(value, float) else str(value)
    return out


class Configs:
    """The configs of all runs, taken apart into what they share and what is a run's own.

    Args:
        runs: All of the grid.

    Attributes:
        shared: Dotted key -> value.
    """

    def __init__(self, runs: list[dict]):
        seen: dict[str, set[str]] = {}
        for run in runs:
            for key, value in _flat_config(run).items():
                seen.setdefault(key, set()).add(value)
        self.shared = {key: next(iter(values)) for key, values in seen.items() if len(values) == 1}

    def own(self, runs: tuple[dict, ...]) -> list[tuple[str, str]]:
        """Returns keys that differ between runs of the grid, with the values that these have."""
        values: dict[str, dict[str, None]] = {}
        for run in runs:
            for key, value in _flat_config(run).items():
                if key not in self.shared:
                    values.setdefault(key, {})[value] = None
        return [(key, " / ".join(found)) for key, found in values.items()]


def _flat_config(run: dict) -> dict[str, str]:
    """Dotted keys of the run, and those of its pretraining under 'pretrain.'."""
    return {**_flat(run.get("config") or {}), **_flat(run.get("pretrain_config") or {}, "pretrain.")}


def _flat(tree: dict, prefix: str = "") -> dict[str, str]:
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            out[f"{prefix}{key}"] = (
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            )
    return out
