"""Chromium without a window, driven by the DevTools protocol over a pair of pipes."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# The browser reads from descriptor 3 and writes to 4, whatever ours are.
_ON_PIPES = """
import fcntl, os, sys
theirs, out = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(theirs, 3)
os.dup2(out, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """One page of a browser."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self.exceptions: list[str] = []  # that the page's script did not catch, and breaches of its policy
        self._write_to = write_to
        self._read_from = read_from
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while (answer := self._read(deadline)).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, id_: str) -> str:
        """The visible text of an element."""
        found: str = self.value(f"document.getElementById({id_!r}).innerText")
        return found

    def wait_for(self, expression: str, timeout_s: float = 30) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression}; the page says:\n{self.value('document.body.innerText')}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, as a person does; `code`: Windows' number of it."""
        what = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", **what, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **what)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read_from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._read_from, 1 << 16)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.exceptions.append(json.dumps(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["source"] in (
            "security",
            "violation",
        ):
            self.exceptions.append(event["params"]["entry"]["text"])


@contextmanager
def browsing(program: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, with an empty profile in a folder."""
    theirs, write_to = os.pipe()
    read_from, out = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
    command = [sys.executable, "-c", _ON_PIPES, str(theirs), str(out), program, *flags]
    process = subprocess.Popen(
        command, pass_fds=(theirs, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(theirs)
    os.close(out)
    try:
        tab = Tab(write_to, read_from)
        yield tab
        with suppress(AssertionError, OSError):
            tab.call("Browser.close")
    finally:
        os.close(write_to)
        os.close(read_from)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
