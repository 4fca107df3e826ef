"""What is wrong with boxes and masks, collected so that it is told together."""

import logging
from collections.abc import Collection

from idmm.errors import UserError, capped

log = logging.getLogger(__name__)


class Faults:
    """Collects faults.

    Args:
        lenient: Whether single images and objects that cannot be used are left out, which is logged
            (``data.on_error`` 'skip').
    """

    def __init__(self, lenient: bool):
        self.lenient, self.lines = lenient, []

    def add(self, line: str, details: Collection[str] = ()) -> None:
        """Notes a fault that must be mended, with details a line each."""
        self.lines += [f"data.root: {line}{':' if details else ''}", *capped([f"  {detail}" for detail in details])]

    def unusable(self, source: str, total: str, reasons: Collection[str]) -> None:
        """Notes what can be left out.

        Args:
            source: The file or folder that it is in.
            total: How much there is, e.g. ``20 images``.
            reasons: What is wrong, one each.
        """
        if not reasons:
            return
        count = f"{len(reasons)} of {total}"
        if not self.lenient:
            self.add(f"'{source}': {count} cannot be used (--data.on_error skip leaves them out)", reasons)
            return
        lines = "\n".join(capped([f"  {reason}" for reason in reasons]))
        log.warning("data.root: '%s': left out %s that cannot be used:\n%s", source, count, lines)

    def refuse(self) -> None:
        """Raises UserError with all that was noted; nothing without faults."""
        if self.lines:
            raise UserError(*self.lines)
