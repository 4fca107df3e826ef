"""Everything that a grid's results (what grid.json holds) become: CSV, Markdown, LaTeX, figures, a page, a summary."""

import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from idmm.files import write_csv, write_text
from idmm.progress import aligned, duration
from idmm.report.page import Cell, Picture, Section, TableOf, environment, html
from idmm.report.sections import Sections, sections
from idmm.report.stats import Estimate, format_number
from idmm.report.table import (
    BELOW_PIXELS,
    MISSING,
    NO_BETTER,
    SOME_FAILED,
    Table,
    TableCell,
    legend,
    run_label,
)

COLUMNS = ("source", "method", "backbone", "target", "pretrain_seed", "seed", "top1", "top5", "seconds", "status")
MORE_COLUMNS = ("metric", "value")  # of a grid that measures more than accuracy
MEASURES = {"top1": "top-1", "top5": "top-5", "knn": "kNN", "ap": "AP", "mask_ap": "mask AP", "miou": "mIoU"}
WIDTH = 100  # letters of a terminal's line
MOST = 12  # lines of each part of the summary
FIGURES = {
    "grid.png": "Accuracy and gain over training from scratch", "insight.png": "Mean rank of each source",
    "size.png": "Accuracy over the size of the source",
}  # fmt: skip


def write(out: Path, grid: dict) -> Sections:
    """Writes the tables, figures and page of a grid (what ``grid.json`` holds) into its folder, each whole or not at
    all (RunError); returns what they hold, for :func:`text`.

    Figures that the grid has nothing for are removed: they are of an earlier start.
    """
    found = sections(grid)
    write_csv(out / "grid.csv", csv_rows(found.own))
    for name in ("grid.md", "grid.tex"):
        write_text(out / name, render(name, found))
    for name, draw in _pictures(found).items():
        if draw:
            draw(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    write_text(out / "grid.html", page(out, found))
    return found


def _pictures(found: Sections) -> dict[str, Callable[[Path], None] | None]:
    """What draws each figure; None if the grid has nothing for it."""
    if not any(found.own):
        return dict.fromkeys(FIGURES)
    from idmm.report import grid_pictures as draw  # matplotlib takes a second

    return {
        "grid.png": partial(draw.heat_maps, found.own),
        "insight.png": partial(draw.source_ranks, found.ranking) if found.ranking.ranks else None,
        "size.png": partial(draw.size_curves, found.tables[0], found.curves) if found.curves else None,
    }


def csv_rows(tables: list[Table]) -> list[Iterable]:
    """Returns the long form: a line for each run, after the header; with its ``metric`` and the ``value`` where there
    are others than accuracy."""
    rows = [([run[name] for name in COLUMNS], [t.metric, run.get(t.metric)]) for t in tables for run in t.runs]
    if all(table.metric == "top1" for table in tables):
        return [COLUMNS, *(row for row, _ in rows)]
    return [COLUMNS + MORE_COLUMNS, *(row + more for row, more in rows)]


def render(name: str, found: Sections) -> str:
    """Returns the text of ``grid.md`` or ``grid.tex``."""
    return ENVIRONMENTS[name.rpartition(".")[2]].get_template(f"{name}.j2").render(vars(found))


def text(found: Sections) -> str:
    """Returns what a terminal shows of a grid, about a screen."""
    head = [
        f"transfer grid, {table.protocol}: {table.counts['ok']} of {table.counts.total()} cells done"
        + "".join(f", {table.counts[status]} {status}" for status in ("failed", "missing") if table.counts[status])
        for table in found.tables if table.is_main
    ]  # fmt: skip
    parts = [head or ["transfer grid: it has no cells"]]
    for block in found.blocks:
        lines = [line for text in block.lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]
        rows = [[textwrap.shorten(str(cell), 60, placeholder=" …") for cell in row] for row in block.rows]
        lines += [f"  {line}" for line in aligned([block.heads, *rows])] if rows else []
        parts.append([block.title, *lines, *(textwrap.shorten(item, 240, placeholder=" …") for item in block.items)])
    shown = [lines[:MOST] + [f"  … and {len(lines) - MOST} more"] * (len(lines) > MOST) for lines in parts]
    return "\n\n".join("\n".join(lines) for lines in shown)


# ------------------------------------------------------------------ the page
def page(out: Path, found: Sections) -> str:
    """Returns the text of ``grid.html``, with the figures that ``out`` has."""
    counts = found.counts
    intro = (
        f"{counts['ok']} of {counts.total()} runs are done, {counts['failed']} failed, {counts['missing']} not run yet."
    )
    intro += (
        " Below a mean: its gain over training from scratch with its 95 % interval. Blue is a gain, orange a loss, "
    )
    intro += "without colour is no difference that these runs can show."
    tables = [_page_table(table, backbone) for table in found.tables for backbone in table.backbones]
    figures = [Picture(out / name, alt, alt) for name, alt in FIGURES.items() if (out / name).exists()]
    parts = [Section("Results", [*tables, legend(found.tables)]), Section("Figures", figures)]
    for block in found.blocks:
        rows = [
            [Cell(str(one), tone=_tone(one)) if isinstance(one, Estimate) else one for one in r] for r in block.rows
        ]
        table = [TableOf(list(block.heads), rows)] if rows else []
        parts.append(Section(block.title, [*block.lines, *table, *block.items]))
    parts.append(Section("All runs", [_runs(found.grid["cells"])] if found.grid["cells"] else ["It has no cells."]))
    return html("Transfer grid", [intro], [section for section in parts if section.parts])


def _page_table(table: Table, backbone: str) -> TableOf:
    rows = []
    for row in table.rows_of(backbone):
        cells = table.cells_of(backbone, row)
        rows.append([*row.heads, *(_page_cell(cell) if cell else "" for cell in cells)])
    caption = f"{backbone}: {table.caption(spread='95 % t-interval')}"
    return TableOf(["source", "method", *table.targets], rows, caption)


def _page_cell(cell: TableCell) -> Cell:
    if cell.stats.mean is None:
        return Cell(cell.mean, tone="failed" if cell.stats.failed else "level")
    notes = [f"± {format_number(cell.stats.half)}"] if cell.stats.half is not None else []
    notes += ([f"(n = {cell.stats.n})"] if cell.unusual_n else []) + [cell.signs]
    text = " ".join(filter(None, [cell.mean, *notes]))
    return Cell(text, str(cell.gain or ""), _tone(cell.gain), cell.best_of_column, cell.best_of_source)


def _tone(value: Estimate | None) -> str:
    if value is None:
        return ""
    return ("up" if value.value > 0 else "down") if value.shown else "level"


def _runs(runs: list[dict]) -> TableOf:
    names = [name for name in MEASURES if any(run.get(name) is not None for run in runs)]
    rows = [
        [run_label(run), Cell(run["status"], tone="failed" if run["status"] == "failed" else ""),
         *("" if run.get(name) is None else f"{run[name]:.2f}" for name in names),
         duration(run["seconds"]) if run["seconds"] else "", run["error"] or "", run["folder"] or run["log"] or ""]
        for run in runs
    ]  # fmt: skip
    return TableOf(["run", "status", *(MEASURES[name] for name in names), "time", "error", "folder"], rows)


# ------------------------------------------------------------------ Markdown and LaTeX
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "`": "{`}", "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", "−": "$-$", "→": r"$\to$", "…": r"\dots{}", MISSING: "---", SOME_FAILED: r"$^\dagger$",
    NO_BETTER: r"$^\ddagger$", BELOW_PIXELS: r"$^\S$",
}  # fmt: skip


def tex_escape(text: str) -> str:
    """Returns a label as text that LaTeX prints as it is; brackets and stars are kept from what stands before them."""
    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return "".join(_TEX.get(c, c) for c in re.sub("-(?=-)", "-{}", text).replace("-{}", "\0")).replace("\0", "-{}")


def md_escape(text: str) -> str:
    """Returns a label or an error as one line of plain text, whatever is in it."""
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_BESIDE_TEX = {
    "block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<", "variable_end_string": ">>",
    "comment_start_string": "<#", "comment_end_string": "#>",
}  # fmt: skip
ENVIRONMENTS = {"md": environment(md_escape), "tex": environment(tex_escape, **_BESIDE_TEX)}  # braces are LaTeX's own
