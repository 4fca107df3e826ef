"""What is wrong with boxes and masks, collected so that it is told together."""

from collections.abc import Collection

from idmm.errors import UserError, capped


class Faults:
    """Collects faults.

    Args:
        lenient: Whether single images and objects that cannot be used are left out; ``left_out`` then says which.
    """

    def __init__(self, lenient: bool):
        self.lenient, self.lines, self.left_out = lenient, [], []

    def add(self, line: str, details: Collection[str] = ()) -> None:
        """Notes a fault that must be mended, with details a line each."""
        self.lines += _with_details(line, details)

    def unusable(self, source: str, total: str, reasons: Collection[str]) -> None:
        """Notes what can be left out.

        Args:
            source: The file or folder that it is in.
            total: How much there is, e.g. ``20 images``.
            reasons: What is wrong, one each.
        """
        if reasons:
            how = "" if self.lenient else " (--data.on_error skip leaves them out)"
            line = f"data.root: '{source}': {len(reasons)} of {total} cannot be used{how}"
            (self.left_out if self.lenient else self.lines).extend(_with_details(line, reasons))

    def refuse(self) -> None:
        """Raises UserError with all that was noted; nothing without faults."""
        if self.lines:
            raise UserError(*self.lines)


def _with_details(line: str, details: Collection[str]) -> list[str]:
    return [f"{line}{':' if details else ''}", *capped([f"  {detail}" for detail in details])]
