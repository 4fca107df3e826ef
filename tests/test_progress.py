"""What people read of times and sizes."""

import pytest

from idmm.progress import duration


@pytest.mark.parametrize(
    "seconds, text",
    [(45, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (4 * 3600 - 5, "4 h 0 min"), (2 * 86_400, "2.0 days")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text
