"""A headless Chromium, driven over its debugging pipe: pages and clicks."""

import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

OPTIONS = (
    *("--headless", "--disable-gpu", "--no-sandbox", "--no-first-run", "--hide-scrollbars"),
    *("--remote-debugging-pipe", "--disable-background-networking", "--disable-dev-shm-usage"),
)
PATIENCE = 60.0
# The browser reads from descriptor 3 and writes to descriptor 4.
JOIN = """
import os, sys, fcntl
read, write = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 50) for one in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium():
    names = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
    found = next(filter(None, map(shutil.which, names)), None)
    if found:
        return found
    own = Path.home() / ".cache" / "ms-playwright"
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", own))
    patterns = ("chromium*/chrome-*/chrome", "chromium*/chrome-*/*headless*shell")
    return next((str(path) for p in patterns for path in sorted(cache.glob(p))), None)


class Browser:
    """One browser with one page. `messages`: of its console; `requests`: addresses it asked for."""

    def __init__(self, home):
        read_there, self._write = os.pipe()
        self._read, write_there = os.pipe()
        options = [*OPTIONS, f"--user-data-dir={home}", "about:blank"]
        joined = [sys.executable, "-c", JOIN, str(read_there), str(write_there), chromium()]
        self._process = subprocess.Popen(
            [*joined, *options],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read_there)
        os.close(write_there)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.messages, self.requests = [], []
        try:
            self._attach()
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise

    def _attach(self):
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self._session = None
        with contextlib.suppress(OSError):
            self._tell("Browser.close")
        for pipe in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(pipe)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _tell(self, method, **parameters):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return number

    def call(self, method, **parameters):
        number = self._tell(method, **parameters)
        until = time.monotonic() + PATIENCE
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _next(self, until):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise EOFError("the browser has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(one.get("value", one)) for one in params["args"]))
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            self.messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def run(self, script):
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition):
        until = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < until, (condition, self.run("document.body.innerText"))
            time.sleep(0.05)

    def text(self, name):
        return self.run(f"document.getElementById({name!r}).innerText")

    def click(self, x, y):
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def look(self, *, width=1200, height=900):
        """The size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
