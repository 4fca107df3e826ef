"""Everything that a grid's results (what grid.json holds) are turned into: tables, a page, pictures, a summary."""

import base64
import hashlib
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from idmm.files import write_csv, write_text
from idmm.progress import aligned
from idmm.report.page import page_data, run_texts, tone
from idmm.report.sections import Sections, sections
from idmm.report.stats import Estimate
from idmm.report.table import (
    BELOW_PIXELS,
    BELOW_START,
    MISSING,
    NO_BETTER,
    SOME_FAILED,
    Table,
    format_gain,
    format_number,
    run_label,
)

COLUMNS = ("source", "method", "backbone", "target", "pretrain_seed", "seed", "top1", "top5", "seconds", "status")
MORE_COLUMNS = ("metric", "value")  # of a grid that measures more than accuracy
WIDTH = 100  # letters of a terminal's line
MOST = 12  # lines of each part of the summary


def write(out: Path, grid: dict) -> Sections:
    """Writes the tables, page and pictures of a grid (what ``grid.json`` holds) into its folder, each whole or not at
    all (RunError); returns what they say, for :func:`text`.

    Pictures that the grid has nothing for are taken away: those of an earlier start would tell of another one.
    """
    found = sections(grid)
    write_csv(out / "grid.csv", csv_rows(found.own))
    for name in ("grid.md", "grid.tex", "grid.html"):
        write_text(out / name, render(name, found))
    for name, draw in _pictures(found).items():
        if draw:
            draw(out / name)
        else:
            (out / name).unlink(missing_ok=True)
    return found


def _pictures(found: Sections) -> dict[str, Callable[[Path], None] | None]:
    """What draws each picture; None where the grid has nothing for it."""
    if not any(found.own):
        return dict.fromkeys(("grid.png", "insight.png", "size.png"))
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
    """Returns the text of ``grid.md``, ``grid.tex``, ``grid.html`` or ``summary.txt``."""
    environment = ENVIRONMENTS[name.rpartition(".")[2]]
    given = dict(vars(found))
    if name.endswith(".html"):
        given |= {"page": page_data(found), "style": source("base.css", "grid.css"), "script": source("grid.js")}
    return environment.get_template(f"{name}.j2").render(given)


def source(*names: str) -> str:
    """Returns files that pages hold as they are, one after the other."""
    environment = ENVIRONMENTS["html"]
    return "".join(environment.loader.get_source(environment, name)[0] for name in names)


def text(found: Sections) -> str:
    """Returns what a terminal shows of a grid, about a screen."""
    parts = [part.split("\n") for part in render("summary.txt", found).rstrip("\n").split("\n\n")]
    shown = [lines[:MOST] + [f"  … and {len(lines) - MOST} more"] * (len(lines) > MOST) for lines in parts]
    return "\n\n".join("\n".join(lines) for lines in shown)


# ------------------------------------------------------------------ text that is not markup
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "`": "{`}", "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", "−": "$-$", "→": r"$\to$", "…": r"\dots{}", MISSING: "---", SOME_FAILED: r"$^\dagger$",
    NO_BETTER: r"$^\ddagger$", BELOW_PIXELS: r"$^\S$", BELOW_START: r"$\downarrow$",
}  # fmt: skip


def tex_escape(text: str) -> str:
    """A label as text that LaTeX prints as it is; brackets and stars are kept from what stands before them."""
    text = "".join(c for c in " ".join(text.split()) if c.isprintable())
    return "".join(_TEX.get(c, c) for c in re.sub("-(?=-)", "-{}", text).replace("-{}", "\0")).replace("\0", "-{}")


def md_escape(text: str) -> str:
    """A label or an error as one line of plain text, whatever is in it."""
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _one_line(text: str) -> str:
    """For a terminal; the mark that the templates put between columns stays theirs."""
    return " ".join(text.replace("⇥", " ").split())


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _columns(text: str) -> str:
    """Lines of cells with ⇥ between them, as cells below each other."""
    rows = [[_cut(cell, 60) for cell in line.split("⇥")] for line in text.splitlines()]
    return "".join(f"  {line}\n" for line in aligned(rows))


def _csp_hash(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style that may stand in the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _environment(escaped: Callable[[str], str], **delimiters: str) -> Environment:
    """Templates of a format: all that they print of the data is escaped as that format needs it."""

    def finalize(value: object) -> Markup:
        if hasattr(value, "__html__"):
            return value
        return Markup(escaped(format_gain(value) if isinstance(value, Estimate) else str(value)))

    environment = Environment(
        loader=PackageLoader("idmm.report"), autoescape=True, undefined=StrictUndefined, finalize=finalize,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, **delimiters,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters |= {
        "number": format_number, "tone": tone, "run_label": run_label, "run_texts": run_texts,
        "columns": _columns, "cut": _cut, "csp_hash": _csp_hash,
        "fold": partial(textwrap.fill, width=WIDTH, subsequent_indent="  "),
    }  # fmt: skip
    return environment


_BESIDE_TEX = {
    "block_start_string": "<%", "block_end_string": "%>", "variable_start_string": "<<", "variable_end_string": ">>",
    "comment_start_string": "<#", "comment_end_string": "#>",
}  # fmt: skip
ENVIRONMENTS = {
    "md": _environment(md_escape),
    "tex": _environment(tex_escape, **_BESIDE_TEX),  # braces are LaTeX's own
    "html": _environment(escape),
    "txt": _environment(_one_line),
}
