"""``idmm transfer``: fills a grid, or with ``status OUT`` tells where one stands."""

from idmm.errors import UserError, nearest
from idmm.transfer.config import GridConfig


def grid(given: GridConfig) -> int:
    """Fills a grid; returns the exit code, 1 where a cell has no result."""
    from idmm.transfer.grid import transfer  # torch, which a grid's status does without

    cells = transfer(given)["cells"]
    return int(not given.plan and any(cell["status"] != "ok" for cell in cells))


def status(argv: list[str]) -> str:
    """Returns what ``idmm transfer WORD ...`` says."""
    if argv[0] != "status":
        raise UserError(f"transfer: got {argv[0]!r}, wanted 'status' or flags{nearest(argv[0], ['status'])}")
    if argv[1:] in (["--help"], ["-h"]):
        return "usage: idmm transfer status OUT\n\nPrints the cells of the grid in OUT and its jobs under way."
    if len(argv) != 2 or argv[1].startswith("-"):
        raise UserError(f"transfer status: got {' '.join(argv[1:]) or 'nothing'}, wanted the folder of a grid")
    from idmm.transfer.status import status

    return status(argv[1])
