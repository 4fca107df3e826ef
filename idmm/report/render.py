"""The reports of a grid: CSV, Markdown, LaTeX, a figure and a page."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from idmm.files import write_csv, write_text
from idmm.progress import drawing
from idmm.report.page import Cell, Picture, Section, TableOf, environment, html
from idmm.report.sections import Sections, sections
from idmm.report.stats import Grid
from idmm.report.table import (
    BELOW_BASELINE,
    FAILED,
    MISSING,
    NO_BETTER,
    SOME_FAILED,
    Table,
    TableCell,
)

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
TONES = {FAILED: "failed", MISSING: "level"}  # of cells without a mean
FIGURES = {"grid.png": "Accuracy", "params.png": "Accuracy over parameters"}


INTRO = (
    "Below a mean is its gain over training from scratch with its 95 % interval. "
    "Blue is a gain, orange a loss. Without colour these runs show no difference."
)


def write(out: Path, grid: Grid) -> str:
    """Write the tables, the figures and the page of a grid (``grid.json``) into its folder.

    Each is written atomically.

    Returns:
        The text of ``grid.md``.

    Raises:
        RunError: A file cannot be written.
    """
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


def csv_rows(table: Table) -> Iterator[Sequence[Any]]:
    """Yield the header and a row for each run."""
    yield COLUMNS
    for run in table.runs:
        yield [run[name] for name in COLUMNS]


def render(name: str, content: Sections) -> str:
    """Return the text of ``grid.md`` or ``grid.tex``."""
    template = ENVIRONMENTS[name].get_template(f"{name}.j2")
    return template.render(content._asdict())


def page(out: Path, content: Sections) -> str:
    """Return the text of ``grid.html``, with the figures in ``out``."""
    tables = [_page_table(content.table, backbone) for backbone in content.table.backbones]
    parts = [Section("Results", [*tables, content.table.legend()])]
    pictures = []
    for name, caption in FIGURES.items():
        if (out / name).exists():
            pictures.append(Picture(out / name, caption))
    if pictures:
        parts.append(Section("Figures", pictures))
    for block in content.blocks:
        tables = []
        if block.rows:
            tables.append(TableOf(list(block.rows[0]), [list(row.values()) for row in block.rows]))
        parts.append(Section(block.title, [*block.lines, *tables, *block.items]))
    return html("Transfer grid", [content.table.progress, INTRO], parts)


def _page_table(table: Table, backbone: str) -> TableOf:
    rows = []
    for row in table.rows_of(backbone):
        cells = map(_page_cell, table.cells_of(backbone, row))
        rows.append([*row.heads, *cells])
    caption = f"{table.name_of(backbone)}: {table.caption()}"
    return TableOf(["source", "method", *table.targets], rows, caption)


def _page_cell(cell: TableCell | None) -> str | Cell:
    if cell is None:
        return ""
    tone = TONES.get(cell.mean, "")
    if cell.gain is not None:
        tone = cell.gain.direction
    return Cell(cell.number, str(cell.gain or ""), tone, cell.best_of_column, cell.signs)


_TEX = str.maketrans(
    {
        "\0": "{}",  # between hyphens
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        "`": "{`}",
        "[": "{[}",
        "]": "{]}",
        "*": "{*}",
        "±": r"$\pm$",
        "−": "$-$",
        "→": r"$\to$",
        "…": r"\dots{}",
        MISSING: "---",
        SOME_FAILED: r"$^\dagger$",
        NO_BETTER: r"$^\ddagger$",
        BELOW_BASELINE: r"$^\S$",
    }
)


def tex_escape(text: str) -> str:
    """Return a label as text that LaTeX prints literally.

    Brackets and stars are separated from a command before, hyphens from each other.
    """
    printed = "".join(filter(str.isprintable, " ".join(text.split())))
    return re.sub("-(?=-)", "-\0", printed).translate(_TEX)


def md_escape(text: str) -> str:
    """Return a label or an error as one line of literal text."""
    return escape(re.sub(r"([\\`*_\[\]|~$])", r"\\\1", " ".join(text.split())))


ENVIRONMENTS = {
    "grid.md": environment(md_escape),
    "grid.tex": environment(
        tex_escape,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    ),
}
