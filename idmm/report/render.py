"""The reports of a grid: CSV, Markdown, LaTeX, a figure and a page."""

import re
from collections.abc import Iterable
from pathlib import Path

from idmm.files import write_csv, write_text
from idmm.progress import drawing
from idmm.report.page import Cell, Picture, Section, TableOf, environment, html
from idmm.report.sections import Sections, sections
from idmm.report.stats import Estimate
from idmm.report.table import BELOW_BASELINE, MISSING, NO_BETTER, SOME_FAILED, Table, TableCell

COLUMNS = (
    "source",
    "method",
    "backbone",
    "target",
    "pretrain_seed",
    "seed",
    "top1",
    "top5",
    "seconds",
    "status",
)
FIGURES = {"grid.png": "Accuracy", "params.png": "Accuracy over parameters"}


def write(out: Path, grid: dict) -> str:
    """Write the tables, the figure and the page of a grid (``grid.json``) into its folder, each
    atomically (RunError). Return the text of ``grid.md``."""
    content = sections(grid)
    markdown = render("grid.md", content)
    write_csv(out / "grid.csv", csv_rows(content.table))
    write_text(out / "grid.md", markdown)
    write_text(out / "grid.tex", render("grid.tex", content))
    if content.table.cells:
        with drawing("grid.png"):
            from idmm.report import grid_pictures  # matplotlib takes a second

            grid_pictures.bars(content.table, out / "grid.png")
            grid_pictures.parameters(content.table, out / "params.png")
    write_text(out / "grid.html", page(out, content))
    return markdown


def csv_rows(table: Table) -> list[Iterable]:
    """Return a row for each run, after the header."""
    return [COLUMNS, *([run[name] for name in COLUMNS] for run in table.runs)]


def render(name: str, content: Sections) -> str:
    """Return the text of ``grid.md`` or ``grid.tex``."""
    return (
        ENVIRONMENTS[name.rpartition(".")[2]].get_template(f"{name}.j2").render(content._asdict())
    )


def page(out: Path, content: Sections) -> str:
    """Return the text of ``grid.html``, with the figures in ``out``."""
    intro = "Below a mean is its gain over training from scratch with its 95 % interval. "
    intro += "Blue is a gain, orange a loss. Without colour these runs show no difference."
    tables = [_page_table(content.table, backbone) for backbone in content.table.backbones]
    parts = [Section("Results", [*tables, content.table.legend()])]
    pictures = [
        Picture(out / name, caption) for name, caption in FIGURES.items() if (out / name).exists()
    ]
    if pictures:
        parts.append(Section("Figures", pictures))
    for block in content.blocks:
        rows = []
        for row in block.rows:
            rows.append(
                [Cell(str(v), tone=_tone(v)) if isinstance(v, Estimate) else v for v in row]
            )
        table = [TableOf(list(block.heads), rows)] if rows else []
        parts.append(Section(block.title, [*block.lines, *table, *block.items]))
    return html("Transfer grid", [content.table.progress, intro], parts)


def _page_table(table: Table, backbone: str) -> TableOf:
    rows = []
    for row in table.rows_of(backbone):
        cells = table.cells_of(backbone, row)
        rows.append([*row.heads, *(_page_cell(cell) if cell else "" for cell in cells)])
    caption = f"{table.name_of(backbone)}: {table.caption()}"
    return TableOf(["source", "method", *table.targets], rows, caption)


def _page_cell(cell: TableCell) -> Cell:
    if cell.stats.mean is None:
        return Cell(cell.mean, tone="failed" if cell.stats.failed else "level")
    text = " ".join([cell.mean, *cell.spread])
    return Cell(text, str(cell.gain or ""), _tone(cell.gain), cell.best_of_column, cell.signs)


def _tone(value: Estimate | None) -> str:
    if value is None:
        return ""
    if value.excludes_zero:
        return "up" if value.value > 0 else "down"
    return "level"


_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "`": "{`}", "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", "−": "$-$", "→": r"$\to$", "…": r"\dots{}", MISSING: "---", SOME_FAILED: r"$^\dagger$",
    NO_BETTER: r"$^\ddagger$", BELOW_BASELINE: r"$^\S$",
}  # fmt: skip


def tex_escape(text: str) -> str:
    """Return a label as text that LaTeX prints literally. Brackets and stars are separated from a
    command before."""
    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return "".join(
        _TEX.get(c, c) for c in re.sub("-(?=-)", "-{}", text).replace("-{}", "\0")
    ).replace("\0", "-{}")


def md_escape(text: str) -> str:
    """Return a label or an error as one line of literal text."""
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_TEX_DELIMITERS = {
    "block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<", "variable_end_string": ">>",
    "comment_start_string": "<#", "comment_end_string": "#>",
}  # fmt: skip
ENVIRONMENTS = {"md": environment(md_escape), "tex": environment(tex_escape, **_TEX_DELIMITERS)}
