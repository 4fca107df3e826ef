"""The grid as one HTML file: a sortable table that needs no network, and is a plain table where scripts are off."""

import base64
import hashlib
import json
from html import escape
from urllib.parse import quote

from idmm.progress import duration
from idmm.transfer.insight import picks, previews, ranking
from idmm.transfer.page import SCRIPT, STYLE
from idmm.transfer.summary import (
    FAILED,
    SCRATCH,
    SOME_FAILED,
    Entry,
    Row,
    Table,
    called,
    fixed,
    names,
    over_scratch,
    own_cells,
    place,
    tables,
)
from idmm.transfer.tables import preview_line, ranked_by

FIRST = ("readout", "backbone", "source", "method")
RUN = {
    "pretrain_seed": "pretraining seed", "seed": "seed", "status": "status", "top1": "top-1", "top5": "top-5",
    "mean_per_class": "mean per class", "knn": "kNN", "pretrain_seconds": "pretraining time", "seconds": "time",
    "error": "error", "log": "log", "folder": "folder",
}  # fmt: skip


def page(grid: dict) -> str:
    """Returns the whole file."""
    found = tables(grid)
    targets = list(dict.fromkeys(target for table in found for target in table.targets))
    configs = Configs(grid["cells"])
    data: list[dict] = []
    rows = [
        _row(table, backbone, row, targets, data, configs)
        for table in found
        for backbone in table.backbones
        for row in table.rows_of(backbone)
    ]
    parts = [
        f"<h1>Transfer grid</h1>\n<p>{_counts(grid)}</p>",
        *(f"<p>{escape(table.caption())}</p>" for table in found),
        *(f"<p>{escape(table.legend())}</p>" for table in found[:1]),
        _filters(found),
        _grid(targets, rows) if rows else "<p>It has no cells.</p>",
        '<aside id="details" aria-live="polite" aria-label="Details of a cell" hidden></aside>',
        *(_sources(table) for table in found[:1]),
        _previews(grid),
        _runs(grid),
        configs.shared(),
    ]
    return _document("\n".join(part for part in parts if part), data, grid["version"])


def _document(body: str, data: list[dict], version: str) -> str:
    """The page around its parts; nothing may be loaded, and no script may run but its own."""
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}"
    )
    # JSON in a script element ends at the first '</', whatever it says there
    safe = (
        json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="idmm {escape(version)}">
<title>Transfer grid</title>
<style>{STYLE}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{safe}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _counts(grid: dict) -> str:
    cells = own_cells(grid)
    counts = {status: sum(cell["status"] == status for cell in cells) for status in ("ok", "failed", "missing")}
    done = f"{counts['ok']} of {len(cells)} runs are done"
    rest = [f"{counts[status]} {word}" for status, word in (("failed", "failed"), ("missing", "not run yet"))]
    return (
        f"{done}, {', '.join(rest)}. A cell's seeds, time and config: hover, or Tab and arrow keys; Enter keeps them."
    )


def _filters(found: list[Table]) -> str:
    """Choices that the script shows; without it all rows stay."""
    backbones = list(dict.fromkeys(backbone for table in found for backbone in table.backbones))
    selects = ""
    for name, labels in (("readout", [table.label for table in found]), ("backbone", backbones)):
        options = '<option value="">all</option>'
        for label in labels:
            selected = " selected" if name == "readout" and label == labels[0] else ""
            options += f'<option value="{escape(label)}"{selected}>{escape(label)}</option>'
        selects += f'<label>{name} <select name="{name}" autocomplete="off">{options}</select></label>'
    return f'<div id="filters" hidden>{selects}<span id="status" role="status" class="quiet"></span></div>'


# ------------------------------------------------------------------ configs
class Configs:
    """The configs of all cells, taken apart into what they share and what is a cell's own."""

    def __init__(self, cells: list[dict]):
        flat = [_flat_config(cell) for cell in cells]
        keys = dict.fromkeys(key for config in flat for key in config)
        seen = {key: {config[key] for config in flat if key in config} for key in keys}
        self._shared = {key: next(iter(values)) for key, values in seen.items() if len(values) == 1}

    def own(self, cells: tuple[dict, ...]) -> list[tuple[str, str]]:
        """Keys that differ between cells of the grid, with the values that these have."""
        flat = [_flat_config(cell) for cell in cells]
        keys = dict.fromkeys(key for config in flat for key in config if key not in self._shared)
        return [(key, " / ".join(dict.fromkeys(config[key] for config in flat if key in config))) for key in keys]

    def shared(self) -> str:
        """The rest, as a list that folds."""
        lines = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in self._shared.items())
        return f"<details><summary>Config that all runs share</summary>\n<dl>{lines}</dl>\n</details>" if lines else ""


def _flat_config(cell: dict) -> dict[str, str]:
    """Dotted keys of the cell's run, and those of its pretraining under 'pretrain.'."""
    return {**_flat(cell.get("config") or {}), **_flat(cell.get("pretrain_config") or {}, "pretrain.")}


def _flat(tree: dict, prefix: str = "") -> dict[str, str]:
    out = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out.update(_flat(value, f"{prefix}{key}."))
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            out[f"{prefix}{key}"] = text
    return out


# ------------------------------------------------------------------ the table
def _grid(targets: list[str], rows: list[str]) -> str:
    heads = [f'<th scope="col">{name}</th>' for name in FIRST]
    heads += [f'<th scope="col" class="number">{escape(name)}</th>' for name in (*targets, "average", "average gain")]
    head = f"<thead><tr>{''.join(heads)}</tr></thead>"
    body = "\n".join(rows)
    return f'<div class="scroll"><table id="grid">{head}\n<tbody>\n{body}\n</tbody></table></div>'


def _row(table: Table, backbone: str, row: Row, targets: list[str], data: list[dict], configs: Configs) -> str:
    labels = f'data-readout="{escape(table.label)}" data-backbone="{escape(backbone)}"'
    kind = ' class="scratch"' if row == SCRATCH else ""
    source, method = map(escape, names(row))
    cells = [f"<td>{escape(table.label)}</td><td>{escape(backbone)}</td>"]
    cells.append(f'<th scope="row">{source}</th><td>{method}</td>')
    for target in targets:
        entry = table.entries.get((backbone, row, target))
        if entry is None:
            cells.append('<td class="number"></td>')
            continue
        cells.append(_cell(table, backbone, row, target, entry, len(data)))
        data.append(_details(table, backbone, row, target, entry, configs))
    means = [table.mean(backbone, row, target) for target in table.targets]
    gains = [table.gain(backbone, row, target) for target in table.targets]
    cells.append(_average(means))
    cells.append(_average([gain and gain.mean for gain in gains], sign=True))
    return f"<tr {labels}{kind}>{''.join(cells)}</tr>"


def _average(values: list[float | None], sign: bool = False) -> str:
    """Over all targets; of some alone it would be another number."""
    if None in values:
        return '<td class="number"></td>'
    mean = sum(values) / len(values)
    return f'<td class="number" data-value="{mean!r}">{fixed(mean, sign)}</td>'


def _cell(table: Table, backbone: str, row: Row, target: str, entry: Entry, count: int) -> str:
    shown = table.shown(backbone, row, target)
    text = escape(shown.mean)
    text = f"<b>{text}</b>" if shown.best_of_column else text
    text = f"<u>{text}</u>" if shown.best_of_cell else text
    spread = [f"± {shown.std}"] * bool(shown.std) + [shown.n] * bool(shown.n) + [SOME_FAILED] * shown.some_failed
    gain = table.gain(backbone, row, target)
    # both are there even where they are empty, so that the numbers of a column stand below each other
    text += f" <small>{' '.join(spread)}</small>" if table.usual_n > 1 or spread else ""
    text += f" <small>{f'({fixed(gain.mean, sign=True)})' if gain else ''}</small>" if SCRATCH in table.rows else ""
    value = "" if entry.mean is None else f' data-value="{entry.mean!r}"'
    kind = "number failed" if shown.mean == FAILED else "number"
    return f'<td class="{kind}" data-cell="{count}"{value} title="{escape(_said(table, gain, entry))}">{text}</td>'


def _said(table: Table, gain, entry: Entry) -> str:
    """An entry in a line."""
    if entry.mean is None:
        return f"{entry.failed} of {len(entry.cells)} runs failed" if entry.failed else "not run yet"
    parts = [f"{table.label}: mean {entry.mean:.2f}, n = {entry.n} of {len(entry.cells)}"]
    if entry.half is not None:
        parts.append(f"95 % interval {entry.mean - entry.half:.2f} to {entry.mean + entry.half:.2f}")
    if gain is not None:
        half = "" if gain.half is None else f" (95 % interval ± {gain.half:.2f})"
        parts.append(f"gain over scratch {gain.mean:+.2f}{half}")
    seconds = sum(cell["seconds"] or 0 for cell in entry.cells)
    return "; ".join([*parts, *([f"{duration(seconds)} in all"] if seconds else [])])


def _details(table: Table, backbone: str, row: Row, target: str, entry: Entry, configs: Configs) -> dict:
    """What the script shows of an entry; columns that are empty are left out."""
    runs = [_run(cell) for cell in entry.cells]
    kept = [name for name in RUN if any(run[name] for run in runs)]
    start = "from scratch" if row == SCRATCH else f"{row.source}, {row.method}"
    return {
        "title": f"{start} → {target} ({backbone})",
        "said": _said(table, table.gain(backbone, row, target), entry),
        "columns": [RUN[name] for name in kept],
        "runs": [[run[name] for name in kept] for run in runs],
        "config": configs.own(entry.cells),
    }


def _run(cell: dict) -> dict[str, str]:
    """A cell's fields as texts; files are links beside this one."""
    out = {}
    for name in RUN:
        value = cell.get(name)
        if value is None:
            out[name] = ""
        elif name in ("seconds", "pretrain_seconds"):
            out[name] = duration(value)
        elif name in ("log", "folder"):
            out[name] = _link(value) if name == "log" or cell["status"] == "ok" else ""
        else:
            out[name] = f"{value:.2f}" if isinstance(value, float) else str(value)
    return out


def _link(path: str) -> str:
    """A path under the grid's folder; whatever it is called, it is no address of anything else."""
    return f"./{quote(str(path))}"


# ------------------------------------------------------------------ below the table
def _plain_table(caption: str, heads: list[str], rows: list[list[str]]) -> str:
    """Rows are markup already."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
    said = f'<p class="quiet">{escape(caption)}</p>' if caption else ""
    return f'{said}<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def _sources(table: Table) -> str:
    found = picks(table)
    if not found:
        return ""
    rows = []
    for pick in found:
        gain = over_scratch(pick.gain)
        lead = "" if pick.lead is None else f"{fixed(pick.lead.mean, sign=True)} over {escape(pick.second.source)}"
        best = f"{escape(pick.row.source)}, {escape(pick.row.method)}"
        rows.append([escape(pick.backbone), escape(pick.target), best, fixed(pick.found.mean), gain, lead])
    heads = ["backbone", "target", "best source", "accuracy", "gain over scratch", "lead over the next source"]
    parts = ["<h2>Which source to pretrain on</h2>", _plain_table("", heads, rows)]
    ranked = ranking(table)
    if ranked.standings:
        rows = []
        for one in ranked.standings:
            rank = fixed(one.rank) + _span(one.rank_interval)
            gain = "" if one.gain is None else fixed(one.gain, sign=True) + _span(one.gain_interval, sign=True)
            rows.append([escape(called(one.source)), rank, fixed(one.average), gain])
        parts.append(_plain_table(ranked_by(ranked), ["source", "mean rank", "average", "mean gain"], rows))
    return "\n".join(parts)


def _span(interval, sign: bool = False) -> str:
    low_high = interval and f"{fixed(interval.low, sign)} to {fixed(interval.high, sign)}"
    return f" <small>({low_high})</small>" if interval else ""


def _previews(grid: dict) -> str:
    lines = "".join(f"<li>{escape(preview_line(one))}</li>" for one in previews(grid))
    return f"<h2>Preview against fine-tuning</h2>\n<ul>{lines}</ul>" if lines else ""


def _runs(grid: dict) -> str:
    """Every run in a table, for whoever has no script and for searching."""
    if not grid["cells"]:
        return ""
    rows = []
    for cell in grid["cells"]:
        run = _run(cell)
        link = f'<a href="{escape(run["folder"])}">folder</a>' if run["folder"] else ""
        log = f' <a href="{escape(run["log"])}">log</a>' if run["log"] else ""
        texts = [place(cell), *(run[name] for name in ("status", "top1", "top5", "knn", "seconds", "error"))]
        rows.append([*map(escape, texts), link + log])
    heads = ["run", "status", "top-1", "top-5", "kNN", "time", "error", "files"]
    return f"<details><summary>All {len(rows)} runs</summary>\n{_plain_table('', heads, rows)}\n</details>"
