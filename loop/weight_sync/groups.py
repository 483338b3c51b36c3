"""Groups of processes to which weights are broadcast, and the buckets of bytes that are sent."""

import json
import socket
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from datetime import timedelta
from typing import Any, Protocol
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

KEPT = 4
"""Most groups that are kept for the next request of the same members."""


class Group(Protocol):
    """The sender and the receivers of a broadcast; bytes go from rank 0 to the others."""

    def send(self, data: Tensor) -> None:
        """Send bytes to all others."""
        ...

    def receive(self, num_bytes: int) -> Tensor:
        """Return the next bytes that were sent."""
        ...


class NcclGroup:
    """A process group of members that have a GPU each."""

    def __init__(self, store: PrefixStore, *, rank: int, size: int, seconds: float) -> None:
        self._wait = timedelta(seconds=seconds)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._wait  # pyright: ignore[reportPrivateUsage]
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)

    def send(self, data: Tensor) -> None:
        """Send bytes to all others."""
        self._move(data.to("cuda"))

    def receive(self, num_bytes: int) -> Tensor:
        """Return the next bytes that were sent."""
        return self._move(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))

    def _move(self, data: Tensor) -> Tensor:
        if not self._group.broadcast(data, 0, self._wait).wait(self._wait):
            raise RuntimeError("a bucket did not arrive in time")
        return data


class SocketGroup:
    """A TCP connection from rank 0 to each other member.

    Not gloo: a member that is killed while gloo connects its pairs can end the other processes by
    SIGSEGV, and with them the trainer. A connection that breaks raises OSError here.
    """

    def __init__(
        self, store: PrefixStore, *, host: str, rank: int, size: int, seconds: float
    ) -> None:
        self._sockets: list[socket.socket] = []
        # Given the list and not a method: a finalizer that refers to `self` would keep it alive.
        weakref.finalize(self, _close, self._sockets)
        if rank == 0:
            with socket.create_server((host, 0)) as server:
                server.settimeout(seconds)
                store.set("address", json.dumps(server.getsockname()))
                while len(self._sockets) < size - 1:
                    self._sockets.append(server.accept()[0])
        else:
            store.wait(["address"], timedelta(seconds=seconds))
            host, port = json.loads(store.get("address"))
            self._sockets.append(socket.create_connection((host, port), seconds))
        for connection in self._sockets:
            connection.settimeout(seconds)  # those that are accepted have none

    def send(self, data: Tensor) -> None:
        """Send bytes to all others, one after the other."""
        view = data.cpu().numpy().data
        for connection in self._sockets:
            connection.sendall(view)

    def receive(self, num_bytes: int) -> Tensor:
        """Return the next bytes that were sent."""
        data = torch.empty(num_bytes, dtype=torch.uint8)
        view = data.numpy().data
        while view:
            if not (count := self._sockets[0].recv_into(view)):
                raise ConnectionError("the sender closed the connection")
            view = view[count:]
        return data


def form(
    store: TCPStore, name: str, backend: str, *, rank: int, size: int, seconds: float
) -> Group:
    """Form a group; blocks until all members call this. Raises RuntimeError if one does not."""
    apart = PrefixStore(f"rlake/{name}", store)
    # A receiver that died before this is found here, and costs one wait.
    apart.set(f"here/{rank}", "1")
    apart.wait([f"here/{other}" for other in range(size)], timedelta(seconds=seconds))
    if backend == "nccl":
        return NcclGroup(apart, rank=rank, size=size, seconds=seconds)
    return SocketGroup(apart, host=store.host, rank=rank, size=size, seconds=seconds)


class Groups:
    """The groups of earlier requests, by the members that asked together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._names: dict[tuple[str, ...], str] = {}
        self._made: OrderedDict[str, Group] = OrderedDict()

    @property
    def known(self) -> list[str]:
        """The names of the groups that are kept."""
        return list(self._made)

    def name_of(self, backend: str, members: Sequence[str], *, known: Set[str]) -> str:
        """Return the name of the members' group; a new one unless all members still have it."""
        key = (backend, *members)
        if self._names.get(key) not in known & self._made.keys():
            self._names = {k: n for k, n in self._names.items() if n in self._made}
            self._names[key] = f"weights/{uuid4().hex}"
        return self._names[key]

    def of(self, store: TCPStore, name: str, backend: str, *, rank: int, size: int) -> Group:
        """Return a group by its name; blocks until all its members call this."""
        if name not in self._made:
            self._made[name] = form(
                store, name, backend, rank=rank, size=size, seconds=self._seconds
            )
        self._made.move_to_end(name)
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return self._made[name]

    def clear(self) -> None:
        """Forget all groups, since a member is gone."""
        self._made.clear()


def buckets(tensors: Sequence[Tensor], num_bytes: int) -> Iterator[list[Tensor]]:
    """Cut tensors into views of their bytes, `num_bytes` at a time.

    >>> two = [torch.zeros(3, dtype=torch.int16), torch.zeros(1)]
    >>> [[len(view) for view in views] for views in buckets(two, 4)]
    [[4], [2, 2], [2]]
    """
    views: list[Tensor] = []
    room = num_bytes
    for tensor in tensors:
        # A view, since tensors are contiguous: a receiver writes into its tensors through it.
        left = tensor.detach().reshape(-1).view(torch.uint8)
        while len(left):
            views.append(left[:room])
            left, room = left[room:], room - len(views[-1])
            if not room:
                yield views
                views, room = [], num_bytes
    if views:
        yield views


def _close(sockets: Sequence[socket.socket]) -> None:
    for connection in sockets:
        connection.close()
