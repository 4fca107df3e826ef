"""The grid as CSV, as Markdown and as a LaTeX table (booktabs) to paste into a paper."""

import csv
import io
import re

from idmm.transfer.insight import Interval, picks, previews, ranking
from idmm.transfer.summary import (
    FAILED,
    MISSING,
    SOME_FAILED,
    Shown,
    Table,
    called,
    fixed,
    names,
    over_scratch,
    own_cells,
    place,
    several,
    tables,
)  # fmt: skip

COLUMNS = ("source", "method", "backbone", "target", "pretrain_seed", "seed", "top1", "top5", "seconds", "status")


def csv_text(grid: dict) -> str:
    """Returns the long form: a line for each cell of the grid's own protocol."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(own_cells(grid))  # None is written as nothing
    return text.getvalue()


# ------------------------------------------------------------------ Markdown
def markdown(grid: dict) -> str:
    """Returns a table for each readout and backbone, what they tell, and what failed."""
    blocks = ["# Transfer grid"]
    for table in tables(grid):
        blocks += [f"## {_title(table.label)}", _lines(table.caption(), table.legend())]
        blocks += [_md_block(table, backbone) for backbone in table.backbones]
    blocks += [_md_sources(table) for table in tables(grid)[:1]]
    blocks.append(_md_previews(grid))
    failed = several(grid["cells"], "failed")
    if failed:
        lines = [f"- {_md(place(cell))}: {_md(cell['error'] or 'no reason kept')}{_md_log(cell)}" for cell in failed]
        blocks += ["## Failed", "\n".join(lines)]
    if not grid["cells"]:
        blocks.append("It has no cells.")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _title(label: str) -> str:
    return label if label == "kNN" else label.capitalize()


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def _md_block(table: Table, backbone: str) -> str:
    heads = ["source", "method", *map(_md, table.targets)]
    lines = [f"**{_md(backbone)}**", "", _md_row(heads), "|---|---" + "|--:" * len(table.targets) + "|"]
    for row in table.rows_of(backbone):
        cells = [_md_cell(table.shown(backbone, row, target)) for target in table.targets]
        lines.append(_md_row([*map(_md, names(row)), *cells]))
    return "\n".join(lines)


def _md_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md_cell(shown: Shown | None) -> str:
    if shown is None:
        return ""
    text = f"**{shown.mean}**" if shown.best_of_column else shown.mean
    text = f"<ins>{text}</ins>" if shown.best_of_cell else text
    text += f" ± {shown.std}" if shown.std else ""
    text += f" ({shown.n})" if shown.n else ""
    return text + (SOME_FAILED if shown.some_failed else "")


def _md(text: str) -> str:
    """A label or an error as one line of plain text, whatever is in it."""
    text = " ".join(str(text).split())
    text = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _md_log(cell: dict) -> str:
    return f" (log: {_md(cell['log'])})" if cell.get("log") else ""


def _md_sources(table: Table) -> str:
    """Best source of each target, and sources by mean rank."""
    found = picks(table)
    if not found:
        return ""
    lines = ["## Which source to pretrain on", "", "| backbone | target | best source | top-1 | gain over scratch |"]
    lines.append("|---|---|---|--:|--:|")
    for pick in found:
        gain = over_scratch(pick.gain)
        best = f"{pick.row.source}, {pick.row.method}"
        lines.append(_md_row([*map(_md, (pick.backbone, pick.target, best)), fixed(pick.found.mean), gain]))
    ranked = ranking(table)
    if ranked.standings:
        lines += ["", f"{ranked_by(ranked)}", "", "| source | mean rank | average | mean gain |", "|---|--:|--:|--:|"]
    for one in ranked.standings:
        gain = "" if one.gain is None else fixed(one.gain, sign=True) + _span(one.gain_interval, sign=True)
        rank = fixed(one.rank) + _span(one.rank_interval)
        lines.append(_md_row([_md(called(one.source)), rank, fixed(one.average), gain]))
    return "\n".join(lines)


def ranked_by(ranked) -> str:
    """What mean ranks are the mean of."""
    left = ranked.total - ranked.used
    rest = f"; {left} of {ranked.total} left out, where some source has no value yet" if left else ""
    among = f"{_counted(ranked.used, 'comparison')} on {_counted(ranked.targets, 'target')}"
    spans = ", 95 % bootstrap intervals over targets" if ranked.targets > 1 else ""
    return f"Mean rank (1 is best) over {among}{spans}{rest}."


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _span(interval: Interval | None, sign: bool = False) -> str:
    return "" if interval is None else f" ({fixed(interval.low, sign)} to {fixed(interval.high, sign)})"


def _md_previews(grid: dict) -> str:
    found = previews(grid)
    return "\n".join(["## Preview against fine-tuning", "", *(f"- {preview_line(one)}" for one in found)]) * bool(found)


def preview_line(one) -> str:
    """One preview as a sentence."""
    parts = []
    if one.rho is not None:
        span = "" if one.interval is None else f" ({one.interval.low:.2f} to {one.interval.high:.2f})"
        parts.append(f"Spearman's ρ within a target {one.rho:.2f}{span}")
    if one.pooled is not None:
        parts.append(f"over all {one.cells} cells {one.pooled:.2f}")
    if one.loss is not None:
        parts.append(f"its pick is {fixed(one.loss)} points below the best")
    return f"{one.label}: {'; '.join(parts) or f'too few cells to compare ({one.cells})'}"


# ------------------------------------------------------------------ LaTeX
_TEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", "`": "{`}", "[": "{[}", "]": "{]}", "*": "{*}",
    "±": r"$\pm$", "−": "$-$", "→": r"$\to$", "…": r"\dots{}", MISSING: "---", SOME_FAILED: r"$^\dagger$",
}  # fmt: skip


def tex_escape(text: str) -> str:
    """A label as text that LaTeX prints as it is; brackets and stars are kept from what stands before them."""
    text = "".join(c for c in " ".join(str(text).split()) if c.isprintable())
    return "".join(_TEX.get(c, c) for c in re.sub("-(?=-)", "-{}", text).replace("-{}", "\0")).replace("\0", "-{}")


def latex(grid: dict) -> str:
    """Returns the table of the grid's own protocol; needs booktabs alone."""
    table = Table(grid, grid["protocol"])
    columns = len(table.targets) + 2
    lines = [
        f"% written by idmm {grid['version']}; needs \\usepackage{{booktabs}}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex_escape(' '.join(filter(None, (table.caption(), table.legend()))))}}}",
        r"\label{tab:transfer}",
        rf"\begin{{tabular}}{{ll{'r' * len(table.targets)}}}",
        r"\toprule",
        _tex_row(["source", "method", *map(tex_escape, table.targets)]),
    ]
    for backbone in table.backbones:
        lines += [r"\midrule", rf"\multicolumn{{{columns}}}{{l}}{{\itshape {tex_escape(backbone)}}} \\"]
        lines += _tex_rows(table, backbone)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _tex_rows(table: Table, backbone: str) -> list[str]:
    """A line a row; a source is named once, with a little space above it."""
    lines, before = [], None
    for row in table.rows_of(backbone):
        source, method = map(tex_escape, names(row))
        if before not in (None, row.source):
            lines.append(r"\addlinespace")
        cells = [_tex_cell(table.shown(backbone, row, target)) for target in table.targets]
        lines.append(_tex_row([source if row.source != before else "", method, *cells]))
        before = row.source
    return lines


def _tex_row(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _tex_cell(shown: Shown | None) -> str:
    if shown is None or shown.mean in (MISSING, FAILED):
        return "" if shown is None else "---" if shown.mean == MISSING else rf"\textit{{{FAILED}}}"
    text = rf"\textbf{{{shown.mean}}}" if shown.best_of_column else shown.mean
    text = rf"\underline{{{text}}}" if shown.best_of_cell else text
    text += rf"$\,\pm\,${shown.std}" if shown.std else ""
    text += rf" {{\scriptsize($n={shown.n.removeprefix('n = ')}$)}}" if shown.n else ""
    return text + (r"$^\dagger$" if shown.some_failed else "")
