"""What a page says, and a headless Chromium, driven through DevTools over a pipe: clicks, keys and pictures."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from html.parser import HTMLParser

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0  # seconds for one answer; starting takes most
KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39}


class Reader(HTMLParser):
    """A page with scripts off.

    Attributes:
        tags: Elements with their attributes.
        sections: The text of each section by its id.
        rows: Of the table ``grid``, each cell's text.
    """

    def __init__(self, text):
        super().__init__()
        self.tags, self.sections, self.rows, self._open, self._cell = [], {"": ""}, [], [""], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section" or dict(attrs).get("id") == "grid":
            self._open.append(dict(attrs)["id"])
            self.sections[self._open[-1]] = ""
        elif self._open[-1] == "grid" and tag == "tr":
            self.rows.append([])
        elif self._open[-1] == "grid" and tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        if tag == "section" or (tag == "table" and self._open[-1] == "grid"):
            self._open.pop()
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.sections[self._open[-1]] += f" {data.strip()}" if data.strip() else ""
        if self._cell:
            self.rows[-1][-1] += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


class Page:
    """A tab.

    Attributes:
        requests: Addresses that were asked for.
        complaints: What the console said of errors.
    """

    def __init__(self, commands, answers):
        self._commands, self._answers, self._number, self._rest = commands, answers, 0, b""
        self._session, self.requests, self.complaints = None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self):
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._answers, 1 << 20)
            assert got, "the browser is gone"
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(message["params"]["exceptionDetails"])
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"])
        return message

    def open(self, path, scripts=True):
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=path.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _middle(self, node):
        box = self.run(
            f"(n => {{ n.scrollIntoView({{block: 'center'}}); const b = n.getBoundingClientRect();"
            f" return [b.x + b.width / 2, b.y + b.height / 2]; }})({node})"
        )
        return dict(zip("xy", box, strict=True))

    def hover(self, node):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **self._middle(node))

    def click(self, node):
        place = self._middle(node)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def press(self, key):
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def picture(self, path, width=1200, height=900, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@pytest.fixture(scope="module")
def browser():
    """Starts a browser and yields its page; skips where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="idmm-browser-", ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        command = [program, *flags, "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
        # the protocol wants commands at descriptor 3 and answers at 4
        shell = ["bash", "-c", f'exec "$@" 3<&{their_in} 4>&{their_out}', "bash", *command]
        process = subprocess.Popen(shell, pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL)
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(our_out, our_in)
        finally:
            process.terminate()
            process.wait()
            os.close(our_out)
            os.close(our_in)
