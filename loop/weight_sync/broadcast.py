"""Broadcast weights from the trainer's rank 0 to the processes of engines.

A receiver requests a version. The sender forms a group with all receivers that are asking at that
moment, separate from the trainer's process groups, and sends the tensors' bytes in buckets: by
NCCL if each member has its own GPU, or by TCP. A receiver that dies costs the others one bounded
wait. Nothing is authenticated: like torch.distributed, it is for trusted networks.
"""

import asyncio
import json
import logging
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

from ...store.errors import JobError, message_of
from ..models.state_dict import weights_digest
from ..models.weights import Weights
from ..runs.own_address import own_address
from .groups import Groups, buckets
from .memory import WeightCache

BUCKET_BYTES = 64 << 20
"""Bytes of one bucket."""
SECONDS = 20.0
"""Timeout for forming a group, and for each bucket."""
IDLE_SECONDS = 7 * 24 * 3600.0
"""How long the sender waits for a request."""
ATTEMPTS = 3
"""How often a version is requested before it fails."""
_ASKS = "rlake/asks"

_log = logging.getLogger(__name__)


class WeightsLostError(JobError):
    """A version could not be received; what has other weights may go on with them."""


class Sender:
    """Sends cached versions to the processes that request them, in a background thread."""

    def __init__(
        self,
        cache: WeightCache,
        *,
        host: str | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        seconds: float = SECONDS,
    ) -> None:
        """Listen on a free port; `host` is the address at which others reach this process."""
        self._cache, self._bucket_bytes, self._seconds = cache, bucket_bytes, seconds
        self._host = host or _host()
        self._store = TCPStore(
            self._host, 0, None, is_master=True, timeout=timedelta(seconds=seconds)
        )
        self._groups = Groups(seconds)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The address for receivers."""
        return f"{self._host}:{self._store.port}"

    def close(self) -> None:
        """Stop answering requests."""
        self._is_closed = True
        self._store.queue_push(_ASKS, "null")  # wakes the thread
        self._thread.join(2 * self._seconds)

    def _serve(self) -> None:
        store = self._client()
        while not self._is_closed:
            # All requests that wait are taken together: one broadcast serves many receivers.
            asks = [json.loads(store.queue_pop(_ASKS))]
            while store.queue_len(_ASKS):
                asks.append(json.loads(store.queue_pop(_ASKS)))
            asks = [ask for ask in asks if ask is not None]
            for version, digest in dict.fromkeys((a["version"], a["digest"]) for a in asks):
                same = [a for a in asks if (a["version"], a["digest"]) == (version, digest)]
                try:
                    self._send(store, version, digest, same)
                except (RuntimeError, OSError) as error:  # receivers that are alive ask again
                    _log.warning("version %d was not sent: %s", version, message_of(error))
                    self._groups.clear()
                    # A new connection: a late reply to a call that timed out may come to the old.
                    store = self._client()

    def _client(self) -> TCPStore:
        idle = timedelta(seconds=IDLE_SECONDS)
        return TCPStore(self._host, self._store.port, None, is_master=False, timeout=idle)

    def _send(
        self, store: TCPStore, version: int, digest: str, asks: Sequence[Mapping[str, Any]]
    ) -> None:
        state = self._cache.get(version, digest)
        if state is None:
            for ask in asks:
                _answer(store, ask, {"error": f"version {version} is not held any more"})
            return
        names = sorted(state)  # the order in which bytes are sent, as the manifest lists them
        manifest = [[n, str(state[n].dtype).partition(".")[2], list(state[n].shape)] for n in names]
        gpus = [_gpu(), *(ask["gpu"] for ask in asks)]
        # NCCL needs a different GPU for each member of a group.
        backend = "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "tcp"
        # A group can be used again only if no member has dropped it.
        known = set.intersection(*(set(ask["groups"]) for ask in asks))
        group = self._groups.name_of(backend, [ask["member"] for ask in asks], known=known)
        terms = {"group": group, "backend": backend, "size": len(gpus)}
        terms |= {"bucket_bytes": self._bucket_bytes, "manifest": manifest}
        for i, ask in enumerate(asks):
            _answer(store, ask, {**terms, "rank": i + 1})
        found = self._groups.of(store, group, backend, rank=0, size=len(gpus))
        for views in buckets([state[name] for name in names], self._bucket_bytes):
            found.send(torch.cat(views))


class Receiver:
    """Requests versions from one sender, one at a time."""

    def __init__(self, address: str, *, seconds: float = SECONDS) -> None:
        """Connect to the sender. Raises WeightsLostError if that fails."""
        self._address, self._seconds = address, seconds
        self._member, self._asked = uuid4().hex, 0
        self._lock = threading.Lock()
        self._groups = Groups(seconds)
        host, _, port = address.rpartition(":")
        try:
            # An answer may come after the timeout of one for a receiver that died.
            wait = timedelta(seconds=3 * seconds)
            self._store = TCPStore(host, int(port), None, is_master=False, timeout=wait)
        except RuntimeError as error:
            raise WeightsLostError(
                f"no sender of weights at {address}: {message_of(error)}"
            ) from error

    def receive(self, version: int, digest: str) -> dict[str, Tensor]:
        """Return a version's tensors.

        Raises WeightsLostError if they do not arrive, JobError if they are not these.
        """
        reason = ""
        with self._lock:  # answers arrive in one queue per member, so requests must not interleave
            for _ in range(ATTEMPTS):
                try:
                    state = self._receive(version, digest)
                except (RuntimeError, OSError) as error:
                    reason = message_of(error)
                    self._groups.clear()
                    continue
                # Not retried: all bytes came, so the sender has other weights than the row.
                if (found := weights_digest(state)) != digest:
                    raise JobError(
                        f"what came as version {version} has digest {found}, its row says {digest}"
                    )
                return state
        raise WeightsLostError(
            f"version {version} did not come from {self._address} in {ATTEMPTS} attempts; the "
            f"last: {reason}; is the trainer alive?"
        )

    def ask(self, version: int, digest: str) -> None:
        """Request a version; the caller must then join the group of the answer."""
        self._asked += 1
        ask = {"member": self._member, "number": self._asked, "gpu": _gpu()}
        ask |= {"version": version, "digest": digest, "groups": self._groups.known}
        self._store.queue_push(_ASKS, json.dumps(ask))

    def answer(self) -> dict[str, Any]:
        """Return the answer to the newest request: the group to join, or an error."""
        while True:
            answer = json.loads(self._store.queue_pop(f"rlake/answers/{self._member}"))
            if answer["number"] == self._asked:  # others are to requests that were given up
                return answer

    def _receive(self, version: int, digest: str) -> dict[str, Tensor]:
        self.ask(version, digest)
        terms = self.answer()
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


async def fetch(weights: Weights) -> Weights:
    """Return weights with a folder or tensors in this process, receiving them if necessary.

    Raises WeightsLostError if they do not arrive, JobError if they do not match their recorded
    digest.
    """
    is_written = weights.folder is not None and weights.file.is_file()
    if weights.state is not None or weights.address is None or is_written:
        return weights
    state = await asyncio.to_thread(_received, weights.address, weights.version, weights.digest)
    return replace(weights, state=state)


_receivers: dict[str, Receiver] = {}
"""The receivers of this process by address, which keep their groups."""


def _received(address: str, version: int, digest: str) -> dict[str, Tensor]:
    if address not in _receivers:
        _receivers[address] = Receiver(address)
    return _receivers[address].receive(version, digest)


def _host() -> str:
    """Return the address of this machine; loopback without a network."""
    try:
        return own_address()
    except OSError:
        return "127.0.0.1"


def _gpu() -> str | None:
    """Return the GPU on which this process would receive, if it has one."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _answer(store: TCPStore, ask: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    message = {"number": ask["number"], **answer}
    store.queue_push(f"rlake/answers/{ask['member']}", json.dumps(message))
