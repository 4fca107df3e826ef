"""Everything that a grid's results (what grid.json holds) become: CSV, Markdown, LaTeX, a figure, a page."""

import re
from collections.abc import Iterable
from pathlib import Path

from idmm.files import write_csv, write_text
from idmm.progress import drawing
from idmm.report.page import Cell, Picture, Section, TableOf, environment, html
from idmm.report.sections import Sections, sections
from idmm.report.stats import Estimate, format_number
from idmm.report.table import (
    BELOW_BASELINE,
    MISSING,
    NO_BETTER,
    SOME_FAILED,
    Table,
    TableCell,
    legend,
)

COLUMNS = ("source", "method", "backbone", "target", "pretrain_seed", "seed", "top1", "top5", "seconds", "status")
MORE_COLUMNS = ("metric", "value")  # of a grid that measures more than accuracy
FIGURE = "Accuracy and gain over training from scratch"


def write(out: Path, grid: dict) -> str:
    """Writes the tables, figure and page of a grid (what ``grid.json`` holds) into its folder, each whole or not at all
    (RunError); returns the text of ``grid.md``."""
    found = sections(grid)
    write_csv(out / "grid.csv", csv_rows(found.own))
    texts = {name: render(name, found) for name in ("grid.md", "grid.tex")}
    for name, text in texts.items():
        write_text(out / name, text)
    if any(found.own):
        with drawing("grid.png"):
            draw(found.own, out / "grid.png")
    write_text(out / "grid.html", page(out, found))
    return texts["grid.md"]


def draw(tables: list[Table], path: Path) -> None:
    """Draws ``grid.png``."""
    from idmm.report.grid_pictures import heat_maps  # matplotlib takes a second

    heat_maps(tables, path)


def csv_rows(tables: list[Table]) -> list[Iterable]:
    """Returns the long form: a line for each run, after the header; with its ``metric`` and the ``value`` where there
    are others than accuracy."""
    rows = [([run[name] for name in COLUMNS], [t.metric, run.get(t.metric)]) for t in tables for run in t.runs]
    if all(table.metric == "top1" for table in tables):
        return [COLUMNS, *(row for row, _ in rows)]
    return [COLUMNS + MORE_COLUMNS, *(row + more for row, more in rows)]


def render(name: str, found: Sections) -> str:
    """Returns the text of ``grid.md`` or ``grid.tex``."""
    return ENVIRONMENTS[name.rpartition(".")[2]].get_template(f"{name}.j2").render(found._asdict())


# ------------------------------------------------------------------ the page
def page(out: Path, found: Sections) -> str:
    """Returns the text of ``grid.html``, with the figures that ``out`` has."""
    intro = "Below a mean: its gain over training from scratch with its 95 % interval. Blue is a gain, orange a loss, "
    intro += "without colour is no difference that these runs can show."
    tables = [_page_table(table, backbone) for table in found.tables for backbone in table.backbones]
    parts = [Section("Results", [*tables, legend(found.tables)])]
    if (path := out / "grid.png").exists():
        parts.append(Section("Figure", [Picture(path, FIGURE, FIGURE)]))
    for block in found.blocks:
        rows = [
            [Cell(str(one), tone=_tone(one)) if isinstance(one, Estimate) else one for one in r] for r in block.rows
        ]
        table = [TableOf(list(block.heads), rows)] if rows else []
        parts.append(Section(block.title, [*block.lines, *table, *block.items]))
    lines = [*(table.progress for table in found.own), intro]
    return html("Transfer grid", lines, parts)


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


# ------------------------------------------------------------------ Markdown and LaTeX
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "`": "{`}", "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", "−": "$-$", "→": r"$\to$", "…": r"\dots{}", MISSING: "---", SOME_FAILED: r"$^\dagger$",
    NO_BETTER: r"$^\ddagger$", BELOW_BASELINE: r"$^\S$",
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
