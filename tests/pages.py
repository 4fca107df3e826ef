"""What a page of a report shows."""

import re
from html import unescape
from html.parser import HTMLParser


class Reader(HTMLParser):
    """A page.

    Attributes:
        tags: Elements with their attributes.
        rows: Of all tables, each cell's text.
        text: All text of the body, with single spaces.
    """

    def __init__(self, text):
        super().__init__()
        self.tags, self.rows, self._cell = [], [], False
        self.feed(text)
        body = re.sub(r"<[^>]*>", " ", text.partition("<body>")[2])
        self.text = " ".join(unescape(body).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell and data.strip():
            self.rows[-1][-1] = " ".join(f"{self.rows[-1][-1]} {data}".split())

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]
