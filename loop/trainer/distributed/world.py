"""The processes of a training: who trains on which rows, and what they exchange."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup, Store

from ....store.errors import JobError, message_of
from ..micro_batches import members

T = TypeVar("T")

_FAILED = "rlake/failed"
_LOST = re.compile(r"gloo|nccl|socket|connection|timed out|recv", re.IGNORECASE)
"""Words in torch's errors when another process is gone, or does not answer in time."""


class SingleProcess:
    """A training in one process; `MultiProcess` is the one with several."""

    rank = 0
    """The number of this process; rank 0 leads."""
    size = 1
    """The number of processes."""
    together = 1
    """The number of processes that train on the same rows."""
    averaged = 1
    """The number of processes whose gradients are averaged for each parameter."""

    @property
    def data_rank(self) -> int:
        """The number of this process's share of the rows."""
        return self.rank // self.together

    @property
    def data_size(self) -> int:
        """The number of shares into which rows are divided."""
        return self.size // self.together

    def share(
        self,
        lengths: Sequence[int],
        units: Sequence[int],
        cut: Callable[[Sequence[int]], list[list[int]]],
    ) -> list[tuple[list[int], bool]]:
        """Return this process's micro-batches, and which of them count.

        `cut` divides the positions of rows into micro-batches. All processes get the same number,
        because each pass of a sharded network is a collective call: a process with fewer repeats
        a small one, which does not count.
        """
        # Each process plans for all, so that nothing needs to be exchanged.
        planned = [cut(places) for places in deal(lengths, units, self.data_size)]
        most = max(map(len, planned))
        small = min((g for some in planned for g in some), key=lambda g: sum(lengths[i] for i in g))
        mine = planned[self.data_rank]
        return [(g, True) for g in mine] + [(small, False)] * (most - len(mine))

    def gather(self, value: T) -> list[T]:
        """Return what one process of each share gave, in the order of the shares."""
        return [value]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up numbers over the shares."""
        total: dict[str, float] = {}
        for some in self.gather(dict(values)):
            for name, value in some.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def merge(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up columns of which each share filled in its own rows, and 0 elsewhere."""
        return dict(columns)

    def broadcast_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Make the other processes repeat a call."""

    def failure(self) -> str | None:
        """Return why another process failed, if one did."""
        return None

    @contextmanager
    def attribute_failure(self) -> Iterator[None]:
        """Name the process whose failure made a broadcast call fail."""
        yield


class MultiProcess(SingleProcess):
    """A training in several processes of torch.distributed, which must be initialized."""

    def __init__(
        self,
        store: Store,
        *,
        shard: int | None,
        seconds: float,
        idle_seconds: float,
        tensor: int = 1,
        experts: int = 1,
        context: int = 1,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store, self._seconds = store, seconds
        self.watched: Callable[[], str | None] = lambda: None
        """Returns why another process ended, if this one started it."""
        # Neighbors train together, since they exchange most: torchrun numbers a machine's first.
        self.together, self.context = tensor * context, context
        self.averaged = self.size // tensor
        self._tensor, self._shard = tensor, shard or self.averaged
        self.experts = experts
        """The number of processes that divide the experts of a layer."""
        # Objects travel between CPUs, and the next call may come late, since rank 0 waits for rows.
        self._objects = _group(seconds, of_each=self.together)
        self._calls = _group(seconds + idle_seconds)
        self.files = _group(seconds)
        """A group for the checkpoint threads, whose calls must not mix with those of training."""

    def mesh(self, device: str) -> DeviceMesh:
        """Return the mesh of the weights, with dimensions `replicate`, `shard` and `tensor`."""
        sizes = (self.averaged // self._shard, self._shard, self._tensor)
        return init_device_mesh(device, sizes, mesh_dim_names=("replicate", "shard", "tensor"))

    def context_group(self, device: str) -> ProcessGroup:
        """Return the processes that divide the sequences of this one's rows."""
        sizes = (self.data_size, self.context, self._tensor)
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "context", "tensor"))
        return mesh["context"].get_group()

    def experts_mesh(self, device: str) -> DeviceMesh:
        """Return the mesh of the weights of experts, with dimensions `shard` and `experts`."""
        sizes = (self.size // self.experts, self.experts)
        return init_device_mesh(device, sizes, mesh_dim_names=("shard", "experts"))

    def gather(self, value: T) -> list[T]:
        """Return what one process of each share gave, in the order of the shares."""
        found: list[Any] = [None] * self.data_size
        dist.all_gather_object(found, value, group=self._objects)
        return found

    def merge(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up columns of which each share filled in its own rows, and 0 elsewhere."""
        for name in sorted(columns):  # collective calls need the same order everywhere
            dist.all_reduce(columns[name], group=self._objects)
        return dict(columns)

    def broadcast_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Make the other processes repeat a call."""
        if self.rank == 0:
            dist.broadcast_object_list([(name, tuple(arguments))], src=0, group=self._calls)

    def receive_call(self) -> tuple[str, tuple[Any, ...]]:
        """Return the next call of rank 0: a name and its arguments."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self._calls)
        return received[0]

    @contextmanager
    def attribute_failure(self) -> Iterator[None]:
        """Name the process whose failure made a broadcast call fail."""
        try:
            yield
        except RuntimeError as error:
            if self.rank or not is_lost(error):
                raise
            reason = self.failure() or (
                f"the {self.size} processes lost each other, or one did not answer within "
                f"`trainer.distributed.timeout`, {self._seconds:g} s: {message_of(error, 500)}"
            )
            raise JobError(reason) from error

    def report(self, error: BaseException) -> None:
        """Tell rank 0 why this process fails."""
        why = f"{type(error).__name__}: {message_of(error, 500)}"
        message = f"process {self.rank} of {self.size} failed: {why}"
        with suppress(RuntimeError):  # the first process may be gone
            self.store.set(_FAILED, message)

    def failure(self) -> str | None:
        """Return why another process failed, if one did; waits a moment for its report."""
        reason = self.watched()
        # Its own report comes first: it names the error, `watched` only the exit code.
        with suppress(RuntimeError):
            if self.store.check([_FAILED]):
                return self.store.get(_FAILED).decode()
        return reason


def _group(seconds: float, *, of_each: int | None = None) -> ProcessGroup:
    """Return a group of all processes; or of one of `of_each` that train on the same rows."""
    size, wait = dist.get_world_size(), timedelta(seconds=seconds)
    ranks = [list(range(i, size, of_each)) for i in range(of_each)] if of_each else [[*range(size)]]
    made, _ = dist.new_subgroups_by_enumeration(ranks, timeout=wait, backend="gloo")
    assert isinstance(made, ProcessGroup), "every process is in one of them"
    return made


def is_lost(error: BaseException) -> bool:
    """Return whether an error says that another process is gone, or does not answer."""
    # JobError, which is a RuntimeError, is an error of this process
    if isinstance(error, JobError) or not isinstance(error, RuntimeError):
        return False
    return bool(_LOST.search(str(error)))


def deal(lengths: Sequence[int], units: Sequence[int], size: int) -> list[list[int]]:
    """Divide rows among processes with about equal numbers of tokens; units stay together.

    >>> deal([5, 4, 3, 3], [0, 1, 2, 3], 2)
    [[0, 3], [1, 2]]
    >>> deal([5, 4, 3, 3], [0, 0, 1, 1], 1)
    [[0, 1, 2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    # The longest first, so that the short ones even out what the long ones left uneven.
    for places in sorted(members(units), key=lambda unit: -sum(lengths[i] for i in unit)):
        least = min(range(size), key=tokens.__getitem__)
        dealt[least] += places
        tokens[least] += sum(lengths[i] for i in places)
    return [sorted(places) for places in dealt]
