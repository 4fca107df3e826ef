"""Extensions of the site: equations as MathML, and tables of all flags from the classes that
'--help' reads."""

import re

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.utils.math import MathError, latex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import nodes as sphinx_nodes

from idmm.cli import COMMANDS, Command
from idmm.config.schema import flags_of


# ------------------------------------------------------------------ equations
def _mathml(node: nodes.Element, block: bool) -> str:
    try:
        return latex2mathml.tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        raise ExtensionError(
            f"{sphinx_nodes.get_node_line(node)}: {node.astext()}: {error}"
        ) from None


def _inline(writer, node: nodes.math) -> None:
    writer.body.append(_mathml(node, False))
    raise nodes.SkipNode


def _block(writer, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="math">{_mathml(node, True)}</div>\n')
    raise nodes.SkipNode


# ------------------------------------------------------------------ commands and their flags
class Commands(Directive):
    """The directive ``{commands}``: all commands, each with a table of its flags."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each command."""
        return [_section(words, command) for words, command in COMMANDS.items()]


def _section(words: str, command: Command) -> nodes.section:
    section = nodes.section(ids=[f"idmm-{nodes.make_id(words)}"], names=[f"idmm {words}"])
    section += nodes.title("", f"idmm {words}")
    section += nodes.paragraph("", command.help)
    groups: dict[type, list] = {}
    for leaf in flags_of(command.config):
        groups.setdefault(leaf.owner, []).append(leaf)
    for owner, leaves in groups.items():
        if owner is not command.config:
            name = nodes.strong("", f"{leaves[0].key.rpartition('.')[0]}: ")
            section += nodes.paragraph(
                "", "", name, nodes.Text(" ".join((owner.__doc__ or "").split()))
            )
        section += _table(leaves)
    return section


def _table(leaves: list) -> nodes.table:
    group = nodes.tgroup("", *(nodes.colspec(colwidth=width) for width in (27, 16, 57)), cols=3)
    group += nodes.thead(
        "", _row(*(nodes.Text(title) for title in ("key, flag", "default", "what it is")))
    )
    body = nodes.tbody()
    for leaf in leaves:
        default = (
            nodes.emphasis("", "required")
            if leaf.required
            else nodes.literal("", leaf.default or "null")
        )
        text = nodes.paragraph("", leaf.help)
        body += _row(nodes.literal("", leaf.key), default, text, nodes.literal("", leaf.metavar))
    group += body
    return nodes.table("", group, classes=["flags"])


def _row(*cells: nodes.Node) -> nodes.row:
    key, default, *text = cells
    entries = [nodes.entry("", nodes.paragraph("", "", cell)) for cell in (key, default)]
    wrapped = [
        cell if isinstance(cell, nodes.paragraph) else nodes.paragraph("", "", cell)
        for cell in text
    ]
    return nodes.row("", *entries, nodes.entry("", *wrapped))


def _files_outside(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn links to Markdown files outside of docs into links to the files, because they are no
    pages of the site."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)(#[^)]*)?\)", r"](path:\1)", source[0])


def setup(app: Sphinx) -> dict:
    """Register the extensions."""
    app.connect("source-read", _files_outside)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
