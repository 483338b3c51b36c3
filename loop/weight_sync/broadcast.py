"""Weights sent by torch.distributed from the trainer's first process to those where engines run.

Who needs a version asks for it; the sender makes a process group of itself and all who are asking
at that moment, apart from any other group, and broadcasts the tensors' bytes, bucket by bucket:
with gloo, or with NCCL where each has a GPU of its own. Who asks and dies costs the others one
bounded wait. Whoever reaches the port can ask: it is for networks that are trusted, as
torch.distributed itself is.
"""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ...store.errors import JobError
from ..models.digest import weights_digest
from ..models.weights import Weights
from .memory import WeightCache
from .process_groups import Groups, buckets

BUCKET_BYTES = 64 << 20
"""Bytes that are sent at once."""
SECONDS = 20.0
"""Longest wait for others to meet, and for each bucket."""
IDLE_SECONDS = 7 * 24 * 3600.0
"""How long the sender waits for someone to ask."""
ATTEMPTS = 3
"""How often a version is asked for."""
_ASKS = "rlake/asks"

_log = logging.getLogger(__name__)


class Sender:
    """Sends what lies on a shelf to those who ask, in a thread of its own."""

    def __init__(
        self,
        shelf: WeightCache,
        *,
        host: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        seconds: float = SECONDS,
    ) -> None:
        """Listen at a port that is free; `host` is where others reach this process."""
        self._shelf, self._bucket_bytes, self._seconds = shelf, bucket_bytes, seconds
        self._host = host or own_address()
        self._store = TCPStore(
            self._host, 0, None, is_master=True, timeout=timedelta(seconds=seconds)
        )
        self._groups = Groups(seconds)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where to ask."""
        return f"{self._host}:{self._store.port}"

    def close(self) -> None:
        """Answer nobody any more."""
        self._is_closed = True
        self._store.queue_push(_ASKS, "null")  # wakes it up
        self._thread.join(2 * self._seconds)

    def _serve(self) -> None:
        store = self._client()
        while not self._is_closed:
            asks = [json.loads(store.queue_pop(_ASKS))]
            while store.queue_len(_ASKS):
                asks.append(json.loads(store.queue_pop(_ASKS)))
            asks = [ask for ask in asks if ask is not None]
            for version, digest in dict.fromkeys((a["version"], a["digest"]) for a in asks):
                message = [a for a in asks if (a["version"], a["digest"]) == (version, digest)]
                try:
                    self._send(store, version, digest, message)
                except RuntimeError as error:  # who is still there asks again
                    _log.warning("version %d was not sent: %s", version, _line(error))
                    self._groups.clear()
                    store = self._client()  # an answer to what timed out may still come to the old

    def _client(self) -> TCPStore:
        idle = timedelta(seconds=IDLE_SECONDS)
        return TCPStore(self._host, self._store.port, None, is_master=False, timeout=idle)

    def _send(
        self, store: TCPStore, version: int, digest: str, asks: Sequence[Mapping[str, Any]]
    ) -> None:
        state = self._shelf.get(version, digest)
        if state is None:
            for ask in asks:
                _answer(store, ask, {"error": f"version {version} is not held any more"})
            return
        names = sorted(state)
        manifest = [[n, str(state[n].dtype).partition(".")[2], list(state[n].shape)] for n in names]
        gpus = [_gpu(), *(ask["gpu"] for ask in asks)]
        backend = "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"
        known = set.intersection(*(set(ask["groups"]) for ask in asks))
        group = self._groups.name_of(backend, [ask["member"] for ask in asks], known=known)
        terms = {
            "group": group,
            "backend": backend,
            "size": len(gpus),
            "bucket_bytes": self._bucket_bytes,
            "manifest": manifest,
        }
        for i, ask in enumerate(asks):
            _answer(store, ask, {**terms, "rank": i + 1})
        found = self._groups.of(store, group, backend, rank=0, size=len(gpus))
        for views in buckets([state[name] for name in names], self._bucket_bytes):
            found.send(torch.cat(views))


class Receiver:
    """Asks one sender for versions, one at a time."""

    def __init__(self, address: str, *, seconds: float = SECONDS) -> None:
        """Meet the sender; raises JobError when nobody is there."""
        self._address, self._seconds = address, seconds
        self._member, self._asked = uuid4().hex, 0
        self._lock = threading.Lock()
        self._groups = Groups(seconds)
        host, _, port = address.rpartition(":")
        try:
            # an answer may come behind one to somebody who died
            wait = timedelta(seconds=3 * seconds)
            self._store = TCPStore(host, int(port), None, is_master=False, timeout=wait)
        except RuntimeError as error:
            raise JobError(f"nobody sends weights at {address}: {_line(error)}") from error

    def receive(self, version: int, digest: str) -> dict[str, Tensor]:
        """Return a version's tensors; raises JobError when they do not come, or are others."""
        reason = ""
        with self._lock:
            for _ in range(ATTEMPTS):
                try:
                    state = self._receive(version, digest)
                except RuntimeError as error:
                    reason = _line(error)
                    self._groups.clear()
                    continue
                if (found := weights_digest(state)) != digest:
                    raise JobError(
                        f"what came as version {version} has digest {found}, its row says {digest}"
                    )
                return state
        raise JobError(
            f"version {version} did not come from {self._address} in {ATTEMPTS} attempts; the "
            f"last: {reason}; is the trainer alive?"
        )

    def ask(self, version: int, digest: str) -> None:
        """Ask for a version; who does must take what comes."""
        self._asked += 1
        ask = {
            "member": self._member,
            "number": self._asked,
            "version": version,
            "digest": digest,
            "gpu": _gpu(),
            "groups": self._groups.known,
        }
        self._store.queue_push(_ASKS, json.dumps(ask))

    def _receive(self, version: int, digest: str) -> dict[str, Tensor]:
        self.ask(version, digest)
        terms = self._answer()
        if "error" in terms:
            raise JobError(terms["error"])
        state = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in terms["manifest"]
        }
        group = self._groups.of(
            self._store, terms["group"], terms["backend"], rank=terms["rank"], size=terms["size"]
        )
        for views in buckets(list(state.values()), terms["bucket_bytes"]):
            sizes = [len(view) for view in views]
            for view, part in zip(views, group.receive(sum(sizes)).split(sizes), strict=True):
                view.copy_(part)
        return state

    def _answer(self) -> dict[str, Any]:
        while True:
            answer = json.loads(self._store.queue_pop(f"rlake/answers/{self._member}"))
            if answer["number"] == self._asked:  # not one to an ask that was given up
                return answer


async def fetch(weights: Weights) -> Weights:
    """Return weights that an engine here can take in: those that are only sent are received.

    Raises JobError when they do not come, or are not what their row says.
    """
    if weights.state is not None or weights.address is None or _is_here(weights):
        return weights
    state = await asyncio.to_thread(_received, weights.address, weights.version, weights.digest)
    return replace(weights, state=state, folder=None)


_receivers: dict[str, Receiver] = {}
"""Of this process, by address: who asks again is known already."""


def _received(address: str, version: int, digest: str) -> dict[str, Tensor]:
    if address not in _receivers:
        _receivers[address] = Receiver(address)
    return _receivers[address].receive(version, digest)


def _is_here(weights: Weights) -> bool:
    from ..models.weights import file_of

    return weights.folder is not None and file_of(weights.folder).is_file()


def own_address() -> str:
    """Return the address under which other machines reach this one; loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses a way out
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _gpu() -> str | None:
    """Return which GPU this process would receive on."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _answer(store: TCPStore, ask: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    message = {"number": ask["number"], **answer}
    store.queue_push(f"rlake/answers/{ask['member']}", json.dumps(message))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
