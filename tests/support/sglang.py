"""A real SGLang server on this CPU, in an environment of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlake.loop.config.engines import SglangEngine as Settings
from rlake.loop.inference.sglang_engine.engine import SglangEngine

PYTHON = Path(sys.prefix) / "sglang" / "bin" / "python"
needs_sglang = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs SGLang; `make test-sglang` installs it"
)
SERVE = Path(__file__).parents[1] / "files" / "sglang" / "serve.py"
START_SECONDS = 300.0


@dataclass
class SglangServer:
    """A server of the model in a folder, which can be killed and started again."""

    model: Path
    place: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def engine(self, **settings: Any) -> SglangEngine:
        """Connect an engine to it."""
        return SglangEngine(self.model, Settings(urls=(self.url,), **settings))

    def start(self, *, is_awaited: bool = True) -> None:
        """Start it, and wait until it answers."""
        arguments = {
            "model-path": self.model,
            "host": "127.0.0.1",
            "port": self.port,
            "device": "cpu",
            "dtype": "float32",
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "max-total-tokens": 16384,
        }
        flags = ("disable-overlap-schedule", "disable-cuda-graph", "skip-server-warmup")
        command = [str(PYTHON), str(SERVE), *(f"--{flag}" for flag in flags)]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        env = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=log, start_new_session=True
            )
        if is_awaited:
            self.await_answer()

    def await_answer(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, f"no server after {START_SECONDS} s: {self.said()}"
            try:
                httpx.get(f"{self.url}/model_info", timeout=5).raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.2)
            else:
                return

    def kill(self) -> None:
        """End it and its processes at once."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def get(self, path: str, **body: Any) -> dict[str, Any]:
        """Return what it answers."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        return answer.raise_for_status().json()

    @property
    def log(self) -> Path:
        return self.place / "server.log"

    def said(self) -> str:
        """Return the end of its log."""
        return self.log.read_text()[-3000:]


def served(model: Path, place: Path) -> SglangServer:
    """Return a server that is not started yet, at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return SglangServer(model, place, free.getsockname()[1])


@contextmanager
def running(model: Path, place: Path) -> Iterator[SglangServer]:
    """Run a server of a tiny Qwen3, and end it."""
    file = model / "config.json"
    names_class = {**json.loads(file.read_text()), "architectures": ["Qwen3ForCausalLM"]}
    file.write_text(json.dumps(names_class))
    made = served(model, place)
    made.start()
    try:
        yield made
    finally:
        made.kill()
