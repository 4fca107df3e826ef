"""docs/ as a site: it builds without a warning and holds every page, flag and docstring."""

import re
import subprocess
import sys

import pytest
from helpers import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages; warnings are errors, as in 'make docs'."""
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        f"{out}/trees",
        "docs",
        f"{out}/html",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


def test_every_page_is_there(site):
    """Pages that no list of contents names would be a warning, but also none is lost."""
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page


def test_flags_and_docstrings_are_there(site):
    """Reference pages come from the classes and docstrings themselves."""
    text = (site / "reference.html").read_text()
    for word in ("idmm pretrain", "method.label_smoothing", "idmm data check", "idmm transfer"):
        assert word in text, word
    for name in ("instance_discrimination_loss", "load_backbone", "DenseRelativeLocalization"):
        assert re.search(rf'id="idmm\.[\w.]*{name}"', text), name
