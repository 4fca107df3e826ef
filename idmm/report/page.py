"""What grid.html shows beside the sections: the runs of each cell, and their configs."""

import json
from collections.abc import Iterable
from urllib.parse import quote

from idmm.config.parsing import flatten
from idmm.progress import duration
from idmm.report.sections import Sections
from idmm.report.stats import Estimate, average
from idmm.report.table import Table, TableCell, format_gain, legend

FIELDS = {
    "pretrain_seed": "pretraining seed", "seed": "seed", "status": "status", "top1": "top-1", "top5": "top-5",
    "ap": "AP", "ap50": "AP50", "ap75": "AP75", "mask_ap": "mask AP", "mask_ap50": "mask AP50",
    "mask_ap75": "mask AP75", "miou": "mIoU", "macc": "mean accuracy of classes", "pixel_accuracy": "pixel accuracy",
    "mean_per_class": "mean per class", "knn": "kNN", "largest_class": "largest class", "pixel_knn": "kNN on pixels",
    "start_top1": "top-1 before the first step", "start_knn": "kNN before the first step",
    "test_size": "test images", "pretrain_seconds": "pretraining time", "seconds": "time",
    "error": "error", "log": "log", "folder": "folder",
}  # fmt: skip
ALWAYS, MEASURES = ("top1", "top5", "knn"), ("ap", "mask_ap", "miou")  # what runs are listed with; where there are any


def page_data(found: Sections) -> dict:
    """Returns the lines of the table, the details of each cell in the order of their numbers, and the shared config."""
    configs = config_values(found.grid["cells"])
    targets = list(dict.fromkeys(target for table in found.tables for target in table.targets))
    lines, details = [], []
    for table, backbone, row in [(t, b, row) for t in found.tables for b in t.backbones for row in t.rows_of(b)]:
        cells = []
        for target in targets:
            cell = table.cells.get((backbone, row, target))
            sentence = cell and _sentence(table, cell)
            cells.append((cell, len(details), sentence))
            if cell:
                values = config_values(cell.stats.runs).items()
                own = [(key, " / ".join(some)) for key, some in values if len(configs[key]) > 1]
                title = f"{row.label} → {target} ({backbone})"
                details.append({"title": title, "said": sentence, **_runs(cell), "config": own})
        means = [table.mean(backbone, row, target) for target in table.targets]
        mean = None if None in means else sum(means) / len(means)
        gains = average([cell and cell.gain for cell in table.cells_of(backbone, row)])
        lines.append((table, backbone, row, cells, mean, gains))
    shared = {key: values[0] for key, values in configs.items() if len(values) == 1}
    there = [name for name in MEASURES if any(run.get(name) is not None for run in found.grid["cells"])]
    measures = {name: FIELDS[name] for name in (*ALWAYS, *there)}
    whole = {"targets": targets, "lines": lines, "details": details, "shared_config": shared}
    return {**whole, "measures": measures, "legend": legend(found.own)}


def tone(value: object) -> str:
    """The classes of a difference: up or down where the runs show it, level where they do not."""
    if not isinstance(value, Estimate):
        return ""
    return f"gain {('up' if value.value > 0 else 'down') if value.shown else 'level'}"


def _sentence(table: Table, cell: TableCell) -> str:
    """A cell in a line."""
    stats, gain = cell.stats, cell.gain
    if stats.mean is None:
        return f"{stats.failed} of {len(stats.runs)} runs failed" if stats.failed else "not run yet"
    parts = [f"{table.label}: mean {stats.mean:.2f}, n = {stats.n} of {len(stats.runs)}"]
    if stats.half is not None:
        parts.append(f"95 % interval over seeds {stats.mean - stats.half:.2f} to {stats.mean + stats.half:.2f}")
    if stats.images is not None:
        below, above = stats.images
        parts.append(f"over test images {stats.mean - below:.2f} to {stats.mean + above:.2f}")
    if cell.no_better:
        parts.append("no better than naming the largest class for every image")
    if cell.below_pixels:
        parts.append("below kNN on raw pixels")
    if cell.start is not None:
        parts.append(f"{cell.start:.2f} before the first step of fine-tuning")
    if gain is not None:
        said = "" if gain.shown else ", no difference that these runs can show"
        parts.append(f"gain over scratch {format_gain(gain)}{said}")
    seconds = sum(run.get("seconds") or 0 for run in stats.runs)
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


def as_text(value) -> str:
    """Returns a value of a config as people would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def config_values(runs: Iterable[dict]) -> dict[str, list[str]]:
    """Returns the different values of each dotted key of the runs' configs, 'pretrain.' before those of pretraining."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        pretraining = flatten(run.get("pretrain_config") or {}, "pretrain.")
        for key, value in {**flatten(run.get("config") or {}), **pretraining}.items():
            found.setdefault(key, {})[as_text(value)] = None
    return {key: list(values) for key, values in found.items()}
