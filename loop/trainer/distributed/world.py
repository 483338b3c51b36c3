"""The processes that train together: who takes which rows, and what all then know."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import ProcessGroup, Store

from ....store.errors import JobError

T = TypeVar("T")

_FAILED = "rlake/failed"
_LOST = re.compile(r"gloo|nccl|socket|connection|timed out|recv", re.IGNORECASE)
"""What torch says when another process is gone, or does not answer in time."""


class SingleProcess:
    """One process; `MultiProcess` is several."""

    rank = 0
    """Which of them this process is; the first leads."""
    size = 1
    """How many there are."""

    def share(
        self,
        lengths: Sequence[int],
        units: Sequence[int],
        cut: Callable[[Sequence[int]], list[list[int]]],
    ) -> list[tuple[list[int], bool]]:
        """Return this process's micro-batches, as many for each process, and which of them count.

        `cut` makes micro-batches of the places of some rows. Sharded networks want all processes
        to make each pass together: who has fewer micro-batches repeats a small one, which does not
        count.
        """
        planned = [cut(places) for places in deal(lengths, units, self.size)]
        most = max(map(len, planned))
        small = min((g for some in planned for g in some), key=lambda g: sum(lengths[i] for i in g))
        mine = planned[self.rank]
        return [(g, True) for g in mine] + [(small, False)] * (most - len(mine))

    def gather(self, value: T) -> list[T]:
        """Return what each process gave, in their order."""
        return [value]

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up numbers over all processes."""
        total: dict[str, float] = {}
        for some in self.gather(dict(values)):
            for name, value in some.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def merge(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up columns of which each process filled in its own rows, and 0 elsewhere."""
        return dict(columns)

    def broadcast_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Have the other processes make the same call, which then is made here."""

    def failure(self) -> str | None:
        """Return why another process failed, if one did."""
        return None

    @contextmanager
    def attribute_failure(self) -> Iterator[None]:
        """Say of what fails in a call that is made on all processes whose failure it is."""
        yield


class MultiProcess(SingleProcess):
    """Several processes of torch.distributed, which must be initialised."""

    def __init__(
        self, store: Store, *, shard: int | None, seconds: float, idle_seconds: float
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store, self._seconds = store, seconds
        self.watched: Callable[[], str | None] = lambda: None
        """Says why another process ended, for those who started it."""
        self._shard = shard or self.size
        # objects travel between CPUs, and a call may be long in coming
        self._objects = _group(seconds)
        self._calls = _group(seconds + idle_seconds)
        self.files = _group(seconds)
        """For those who write a checkpoint in the background."""

    def mesh(self, device: str) -> DeviceMesh:
        """Return how weights lie: cut into `shard` parts, and these repeated if there is more."""
        copies = self.size // self._shard
        if copies == 1:
            return init_device_mesh(device, (self.size,), mesh_dim_names=("shard",))
        names = ("replicate", "shard")
        return init_device_mesh(device, (copies, self._shard), mesh_dim_names=names)

    def gather(self, value: T) -> list[T]:
        """Return what each process gave, in their order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._objects)
        return found

    def merge(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up columns of which each process filled in its own rows, and 0 elsewhere."""
        for name in sorted(columns):
            dist.all_reduce(columns[name], group=self._objects)
        return dict(columns)

    def broadcast_call(self, name: str, arguments: Sequence[Any]) -> None:
        """Have the other processes make the same call, which then is made here."""
        if self.rank == 0:
            dist.broadcast_object_list([(name, tuple(arguments))], src=0, group=self._calls)

    def receive_call(self) -> tuple[str, tuple[Any, ...]]:
        """Return what the first process calls next: a name, and its arguments."""
        heard: list[Any] = [None]
        dist.broadcast_object_list(heard, src=0, group=self._calls)
        return heard[0]

    @contextmanager
    def attribute_failure(self) -> Iterator[None]:
        """Say of what fails in a call that is made on all processes whose failure it is."""
        try:
            yield
        except RuntimeError as error:
            if self.rank or not is_lost(error):
                raise
            reason = self.failure() or (
                f"the {self.size} processes lost each other, or one did not answer within "
                f"`trainer.distributed.timeout`, {self._seconds:g} s: {_line(error)}"
            )
            raise JobError(reason) from error

    def report(self, error: BaseException) -> None:
        """Tell the first process why this one fails."""
        message = (
            f"process {self.rank} of {self.size} failed: {type(error).__name__}: {_line(error)}"
        )
        with suppress(RuntimeError):  # the first process may be gone
            self.store.set(_FAILED, message)

    def failure(self) -> str | None:
        """Return why another process failed, if one did; waits a moment for it to say so."""
        reason = self.watched()
        with suppress(RuntimeError):
            if self.store.check([_FAILED]):
                return self.store.get(_FAILED).decode()
        return reason


def _group(seconds: float) -> ProcessGroup:
    made = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    assert isinstance(made, ProcessGroup), "every process is in it"
    return made


def is_lost(error: BaseException) -> bool:
    """Tell whether an error says that another process is gone, or silent for too long."""
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def deal(lengths: Sequence[int], units: Sequence[int], size: int) -> list[list[int]]:
    """Deal rows to processes, so that each has about as many tokens; units stay together.

    >>> deal([5, 4, 3, 3], [0, 1, 2, 3], 2)
    [[0, 3], [1, 2]]
    >>> deal([5, 4, 3, 3], [0, 0, 1, 1], 1)
    [[0, 1, 2, 3]]
    """
    whole: dict[int, list[int]] = {}
    for place, unit in enumerate(units):
        whole.setdefault(unit, []).append(place)
    dealt: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for places in sorted(whole.values(), key=lambda unit: -sum(lengths[i] for i in unit)):
        least = min(range(size), key=tokens.__getitem__)
        dealt[least] += places
        tokens[least] += sum(lengths[i] for i in places)
    return [sorted(places) for places in dealt]
