"""A small HTTP server that answers as SGLang 0.5.23 does, and breaks as it is told."""

import json
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

WAIT = 20.0
"""Longest wait of a test for something that takes milliseconds."""


class Standin:
    """A server that answers as SGLang does, and breaks as it is told."""

    def __init__(self, model: Path) -> None:
        self.label = "default"
        self.info: dict[str, Any] = {
            "max_req_input_len": 42,
            "model_path": str(model),
            "dtype": "float32",
        }
        self.updates: list[int] = []
        self.groups: dict[str, Any] = {}
        self.received: list[dict[str, Tensor]] = []
        """The tensors of each update that was broadcast, so far."""
        self.stamps: list[str | None] = []
        """The label that each part of these brought, if any."""
        self.is_updating = False
        self.generated = 0
        self.is_gone = False
        self.refused: tuple[int, int] = (-1, 400)
        self.statuses: list[int] = []
        """What the next requests are answered with; 0: the connection is closed."""
        self.has_request, self.goes_on = threading.Event(), threading.Event()
        self.held = ""
        """The path that is answered when it `goes_on`."""
        self.goes_on.set()
        standin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(standin.answered(self.path, {}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(standin.answered(self.path, json.loads(body)))

            def _answer(self, found: tuple[int, Any] | None) -> None:
                if found is None:
                    return
                self.send_response(found[0])
                self.end_headers()
                self.wfile.write(json.dumps(found[1]).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.goes_on.set()
        self.http.shutdown()
        self.thread.join(WAIT)
        self.http.server_close()

    def hold(self, path: str) -> None:
        self.held = path
        self.has_request.clear()
        self.goes_on.clear()

    def answered(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        label = self.label
        if path == self.held:
            self.held = ""
            self.has_request.set()
            assert self.goes_on.wait(WAIT)
        if self.is_gone:
            return None
        if path == "/server_info":
            return 200, self.info
        if path == "/model_info":
            return 200, {"is_generation": True, "model_path": "/gone", "model_type": "qwen3"}
        if path == "/update_weights_from_disk":
            return self._updated(body)
        if path == "/init_weights_update_group":
            self.groups[body["group_name"]] = _joined(body)
        if path in ("/begin_weight_update", "/end_weight_update"):
            return self._session(is_begun=path.startswith("/begin"))
        if path == "/update_weights_from_distributed":
            return self._received(body)
        if path != "/generate":
            return 200, {}
        self.generated += 1
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            why = {"message": "The request queue is full." if status == 503 else "out of memory"}
            return (status, {"error": why}) if status else None
        number = body["sampling_params"]["max_new_tokens"]
        top = body.get("top_logprobs_num", 0)
        meta = {
            "finish_reason": {"type": "length", "length": number},
            "weight_version": label,
            "output_token_logprobs": [[-0.5, 5, None]] * number,
            "output_top_logprobs": [[[-0.5, 5, None]] * top] * number,
            "weight_versions": [{"version": label, "start": 0, "end": number}],
            "input_token_logprobs": [[-1.0, 0, None] for _ in body["input_ids"]],
            "input_top_logprobs": [[[-1.0, 5, None]] * top for _ in body["input_ids"]],
        }
        return 200, {"output_ids": [5] * number, "meta_info": meta}

    def _updated(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        assert (Path(body["model_path"]) / "model.safetensors").exists()
        version = json.loads(body["weight_version"])[0]
        self.updates.append(version)
        if version == self.refused[0]:
            status = self.refused[1]
            self.refused = (-1, 0) if status == 0 else self.refused
            return (status, {"success": False, "message": "no"}) if status else None
        self.label = body["weight_version"]
        return 200, {"success": True, "message": ""}

    def _session(self, *, is_begun: bool) -> tuple[int, Any]:
        if self.is_updating == is_begun:
            return 400, {"success": False, "message": "a session is open, or none"}
        self.is_updating = is_begun
        if is_begun:
            self.received.append({})
        return 200, {"success": True, "message": ""}

    def _received(self, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            assert self.is_updating, "no session is open"
            label = body["weight_version"]
            assert label is None or json.loads(label)[0] != self.refused[0], "no"
            group, named = self.groups[body["group_name"]], {}
            for name, dtype, shape in zip(
                body["names"], body["dtypes"], body["shapes"], strict=True
            ):
                named[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                group.broadcast(named[name], 0).wait(timedelta(seconds=WAIT))
        except (AssertionError, LookupError, RuntimeError) as error:
            return 400, {"success": False, "message": f"Failed to receive weights: {error}"}
        self.received[-1] |= named
        self.stamps.append(label)
        if label is not None:
            self.label = label
            self.updates.append(json.loads(label)[0])
        return 200, {"success": True, "message": ""}


def _joined(body: dict[str, Any]) -> Any:
    """Join a group, as SGLang does through torch."""
    wait, name = timedelta(seconds=WAIT), body["group_name"]
    store: Any = TCPStore(body["master_address"], body["master_port"], timeout=wait)
    for prefix in (name, f"{name}/", "cpu/"):
        store = PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], wait)
