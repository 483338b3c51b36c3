"""A real server of Tinker's API on this CPU: SkyRL's JAX backend, in an environment of its own."""

import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load
from support.tiny_models import config, tiny
from torch import Tensor

from rlake.loop.config import RunConfig
from rlake.loop.models.atomic_folder import save_settings
from rlake.loop.models.lora import from_peft

PYTHON = Path(sys.prefix) / "tinker" / "bin" / "python"
needs_skyrl = pytest.mark.skipif(
    not PYTHON.exists(), reason="needs SkyRL's server; `make test-tinker` installs it"
)
UV = Path(__file__).parents[1] / "files" / "tinker"
BACKEND = '{"max_lora_adapters": 24, "max_lora_rank": 8, "sample_max_num_sequences": 16}'
"""Each shape is compiled, so that samples come in batches of one size."""


@dataclass(frozen=True)
class TinkerServer:
    """A server, and the folder of the model that it trains."""

    url: str
    model: Path

    def post(self, path: str, **body: Any) -> None:
        """Send a request that the client does not send."""
        httpx.post(f"{self.url}/api/v1/{path}", json=body).raise_for_status()

    def adapter(self, path: str) -> dict[str, Tensor]:
        """Return weights that were saved for sampling, by the names that peft gives them here."""
        model, *_, name = path.removeprefix("tinker://").split("/")
        at = f"{self.url}/api/v1/training_runs/{model}/checkpoints/{name}/archive"
        got = httpx.get(at, follow_redirects=True).raise_for_status()
        with tarfile.open(fileobj=io.BytesIO(got.content)) as archive:
            [member] = [m for m in archive.getmembers() if m.name.endswith(".safetensors")]
            file = archive.extractfile(member)
            assert file is not None
            return from_peft(load(file.read()))

    def run(self, **changes: Any) -> RunConfig:
        """Return the configuration of a GRPO run whose policy is trained there."""
        trainer = {"backend": self.backend(), **changes.pop("trainer", {})}
        explorer = {"engine": "tinker", **changes.pop("explorer", {})}
        model = {"from_scratch": None, "path": str(self.model)}
        return config(model=model, trainer=trainer, explorer=explorer, **changes)

    def backend(self, **settings: Any) -> dict[str, Any]:
        """Return the section `trainer.backend`."""
        return {"tinker": {"base_url": self.url, "rank": 4, "loss_reduction": "mean"} | settings}


@contextmanager
def serving(place: Path) -> Iterator[TinkerServer]:
    """Serve the tiny model, which is written to a folder, until the block ends."""
    model, tokenizer = tiny()
    folder = place / "model"
    model.save_pretrained(folder)
    save_settings(model, tokenizer, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(UV / "uv"), "run", "--", "python", "-m", "skyrl.tinker.api"),
        *("--base-model", str(folder), "--backend", "jax", "--backend-config", BACKEND),
        *("--host", "127.0.0.1", "--port", str(port), "--checkpoints-base", str(place / "kept")),
        *("--database-url", f"sqlite:///{place / 'tinker.db'}"),
    ]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(PYTHON.parents[1] / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "PATH": f"{UV}{os.pathsep}{os.environ['PATH']}",
        "SKYRL_PYTHON": str(PYTHON),
    }
    with (place / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(process, f"http://127.0.0.1:{port}", place / "server.log")
        yield TinkerServer(f"http://127.0.0.1:{port}", folder)
    finally:
        # The server, its engine, and the shell above it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            httpx.get(f"{url}/api/v1/healthz", timeout=5).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"no server after {seconds} s: {log.read_text()[-3000:]}")
