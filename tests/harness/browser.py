"""A headless Chromium, through its DevTools protocol over a pair of pipes: no port, no driver, no other package.

https://chromedevtools.github.io/devtools-protocol/; messages are JSON, each ended by a NUL byte
(``--remote-debugging-pipe``: the browser reads file descriptor 3 and writes file descriptor 4).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--no-sandbox",
)  # fmt: skip
PATIENCE = 60  # seconds for one answer


def find_chromium() -> str:
    """Return the path of a Chromium; a test that needs one fails without it, it is never skipped."""
    for name in (os.environ.get("CKPT_CHROMIUM"), *NAMES):
        if name and (path := shutil.which(name)):
            return path
    raise RuntimeError(
        f"no Chromium found ({', '.join(NAMES)}): as root, apt-get install chromium-headless-shell (tools/setup does "
        "where it can), or set CKPT_CHROMIUM=/path/to/chromium"
    )


class Page:
    """One tab. ``requests``: URLs that it asked for; ``complaints``: console messages, exceptions, refused things."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number, self._session = to_browser, from_browser, b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that come before it are taken note of."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until it is drawn."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._read()
        self.settle()

    def settle(self) -> None:
        """Wait until two pictures were drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def press(self, key: str) -> None:
        """Press a key such as ``ArrowRight`` or ``Tab``."""
        codes = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])
        self.settle()

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {PATIENCE} s")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise RuntimeError("Chromium is gone")
            self._rest += data
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str([one.get("value") for one in params["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {params['message']}")


def _high_pipe() -> list[int]:
    """Return a pipe whose numbers are out of the way of 3 and 4."""
    pipe = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pipe]
    for end in pipe:
        os.close(end)
    return high


@contextmanager
def browser() -> Iterator[Page]:
    """Run a browser with one tab."""
    (read_here, write_there), (read_there, write_here) = _high_pipe(), _high_pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # its helpers may outlive it by a moment
        command = [find_chromium(), *FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_there} 4>&{write_there}', "bash", *command],
            pass_fds=(read_there, write_there), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        try:
            yield Page(write_here, read_here)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with its helper processes
            process.wait()
            os.close(read_here)
            os.close(write_here)
