"""How results and predictions look in a notebook."""

import html
from collections.abc import Iterable, Sequence

from idmm.files import Json
from idmm.progress import aligned


class Result(Json):
    """The content of a ``result.json`` or ``train.json``. Notebooks show it as a table."""

    def _repr_html_(self) -> str:
        return html_table([*self.get("result", self).items()])


def html_table(rows: Sequence[Iterable[object]], most: int = 20) -> str:
    """Return at most ``most`` rows of cells as HTML for notebooks."""
    cells = [[str(cell) for cell in row] for row in rows[:most]]
    text = "\n".join([*aligned(cells), f"{len(rows)} in all"])
    return f"<pre>{html.escape(text)}</pre>"
