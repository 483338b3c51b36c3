"""Divide packed sequences over processes: context parallelism by attention heads.

Each process has a part of the positions, and for attention all positions of a part of the heads
(DeepSpeed-Ulysses, arXiv:2309.14509). torch's own `context_parallel` has no CPU kernel (2.13), and
knows nothing of packed sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup


@dataclass(frozen=True)
class Context:
    """The processes that divide packed sequences among them."""

    group: ProcessGroup

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.group.size()

    def length(self, total: int) -> int:
        """Return how many of `total` positions each process has; the last may have padding."""
        return -(-total // self.size)

    def own(self, values_N: Tensor) -> Tensor:
        """Return this process's part of packed values, padded with zeros: [N, ..] -> [T, ..]."""
        length = self.length(len(values_N))
        padding = self.size * length - len(values_N)
        padded_N = torch.cat([values_N, values_N.new_zeros(padding, *values_N.shape[1:])])
        return padded_N[self.group.rank() * length :][:length]

    def lengths(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths of packed sequences, and of the padding as one more sequence."""
        padding = self.size * self.length(sum(lengths)) - sum(lengths)
        return [*lengths, padding] if padding else list(lengths)

    def wanted(self, wanted_N: Tensor) -> slice:
        """Return which of the wanted positions are this process's, in their order."""
        before = self.group.rank() * self.length(len(wanted_N))
        start = int(wanted_N[:before].sum())
        return slice(start, start + int(self.own(wanted_N).sum()))

    def heads(self, parts_BHTD: Tensor) -> Tensor:
        """Return all positions of a part of the heads, of all heads at a part of the positions."""
        return _ToHeads.apply(parts_BHTD, self)  # pyright: ignore[reportReturnType]

    def positions(self, parts_BHTD: Tensor) -> Tensor:
        """Return all heads at a part of the positions, of all positions of a part of the heads."""
        return _ToPositions.apply(parts_BHTD, self)  # pyright: ignore[reportReturnType]

    def gathered(self, values_M: Tensor, at: slice, total: int) -> Tensor:
        """Return the values of all processes, of which this one's are those `at` a slice."""
        return _Gathered.apply(values_M, at, total, self)  # pyright: ignore[reportReturnType]


def _to_heads(parts_BHTD: Tensor, context: Context) -> Tensor:
    # the first dimension is what is sent: one part to each process
    sent = parts_BHTD.unflatten(1, (context.size, -1)).transpose(0, 1).contiguous()
    found = torch.empty_like(sent)  # [process, B, H', T, D]
    dist.all_to_all_single(found, sent, group=context.group)
    return found.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _to_positions(parts_BHTD: Tensor, context: Context) -> Tensor:
    sent = parts_BHTD.unflatten(2, (context.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=context.group)
    return found.transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_BHTD: Tensor, context: Context) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.context = context
        return _to_heads(parts_BHTD, context)

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_positions(grad_BHTD, ctx.context), None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_BHTD: Tensor, context: Context) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.context = context
        return _to_positions(parts_BHTD, context)

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _to_heads(grad_BHTD, ctx.context), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, values_M: Tensor, at: slice, total: int, context: Context
    ) -> Tensor:
        ctx.at = at
        found = values_M.new_zeros(total)
        found[at] = values_M
        dist.all_reduce(found, group=context.group)
        return found

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Each process computes the same loss: the gradient is not added up.
        return grad_M[ctx.at], None, None, None
