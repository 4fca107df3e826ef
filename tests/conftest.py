"""What several test files share."""

import pytest
from helpers import STAGES, outside


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Uninterrupted tiny runs of both stages, a process each; nothing may be written to them."""
    folder = tmp_path_factory.mktemp("whole")
    return {stage: outside(stage, folder / stage) for stage in STAGES}
