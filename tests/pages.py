"""What a page of a report shows."""

import re
from html import unescape
from html.parser import HTMLParser


class Reader(HTMLParser):
    """A page: its elements with their attributes, and all text of the body, with single spaces."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)
        body = re.sub(r"<[^>]*>", " ", text.partition("<body>")[2])
        self.text = " ".join(unescape(body).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]
