"""Process groups that broadcast weights, and the buckets of bytes that they send."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

KEPT = 4
"""Most process groups that are kept for the next request of the same members."""


class Group:
    """A process group whose first rank sends bytes to the others."""

    def __init__(
        self, store: TCPStore, name: str, backend: str, *, rank: int, size: int, seconds: float
    ) -> None:
        self._wait = timedelta(seconds=seconds)
        self._device = "cuda" if backend == "nccl" else "cpu"
        apart = PrefixStore(f"rlake/{name}", store)
        # A member that does not come raises here. In gloo's own rendezvous, a killed member has
        # ended this process by SIGSEGV.
        apart.set(f"here/{rank}", "1")
        apart.wait([f"here/{other}" for other in range(size)], self._wait)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._wait  # pyright: ignore[reportPrivateUsage]
            self._group: Any = dist.ProcessGroupNCCL(apart, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(apart, rank, size, self._wait)

    def send(self, data: Tensor) -> None:
        """Send bytes to all others."""
        self._move(data.to(self._device))

    def receive(self, num_bytes: int) -> Tensor:
        """Return the next bytes that were sent."""
        return self._move(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def _move(self, data: Tensor) -> Tensor:
        if not self._group.broadcast(data, 0, self._wait).wait(self._wait):
            raise RuntimeError("a bucket did not come in time")
        return data


class Groups:
    """The process groups of earlier requests, by the members that asked together."""

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
            self._made[name] = Group(
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
        left = tensor.detach().reshape(-1).view(torch.uint8)
        while len(left):
            views.append(left[:room])
            left, room = left[room:], room - len(views[-1])
            if not room:
                yield views
                views, room = [], num_bytes
    if views:
        yield views
