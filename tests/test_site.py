"""docs/ as a site: it builds without a warning, holds every page, and opens without a network."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from helpers import ENVIRONMENT, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages; warnings are errors, as in 'make docs'."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", f"{out}/trees", "docs", f"{out}/html"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "html"


class Requests(HTMLParser):
    """Collects what a browser would fetch by itself to show a page."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        loads = tag == "link" and attrs.get("rel") in ("stylesheet", "preload", "icon", "preconnect")
        if tag in ("script", "img", "iframe", "source", "video") or loads:
            self.found += [value for name in ("src", "href", "srcset") if (value := attrs.get(name))]


def test_every_page_is_there(site):
    """Pages that no list of contents names would be a warning, but also none is lost."""
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page


def test_nothing_is_fetched_from_elsewhere(site):
    """Scripts, styles, fonts and pictures are the site's own."""
    for page in site.glob("*.html"):
        asked = Requests(page.read_text()).found
        assert asked and not [url for url in asked if re.match(r"(https?:)?//", url)], page
        for url in asked:
            assert url.startswith("data:") or (site / url.partition("?")[0].partition("#")[0]).exists(), (page, url)
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style


def test_equations_are_drawn(site):
    """As MathML, which browsers know; no TeX is left over."""
    text = (site / "method.html").read_text()
    assert text.count("<math ") > 40 and text.count('display="block"') >= 10
    assert "\\frac" not in text and "$$" not in text


def test_flags_and_docstrings_are_there(site):
    """Reference pages come from the classes and docstrings themselves."""
    options = (site / "options.html").read_text()
    for word in ("idmm pretrain", "method.label_smoothing", "idmm data check", "idmm transfer", "epsilon of Eq. 17"):
        assert word in options, word
    api = (site / "api.html").read_text()
    for name in ("instance_discrimination_loss", "load_backbone", "DenseRelativeLocalization"):
        assert re.search(rf'id="idmm\.[\w.]*{name}"', api), name
    assert "Keys of the config" not in api  # the list that help(idmm.pretrain) shows
