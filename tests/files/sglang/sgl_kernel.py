"""The kernels that SGLang's CPU path calls for a small dense model, in plain torch.

The package index has `sglang-kernel` for CUDA only. Everything else of the server is SGLang's own.
"""

from typing import Any

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, places: Tensor, width: int
) -> None:
    """Write where the KV cache has the tokens of each request."""
    at = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = places[at : at + last - first].to(table.dtype)
        at += last - first


def _mixed(hashed: Tensor, block: Tensor) -> Tensor:
    block = (block * 0xCC9E2D51) & _MASK
    block = ((block << 15) | (block >> 17)) & _MASK
    hashed = hashed ^ ((block * 0x1B873593) & _MASK)
    hashed = ((hashed << 13) | (hashed >> 19)) & _MASK
    return (hashed * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return the random numbers of seeded sampling, as SGLang's Triton kernel."""
    seed = seed.long()
    hashed = _mixed(torch.zeros_like(seed), seed & _MASK)
    hashed = _mixed(hashed, (seed >> 32) & _MASK)
    hashed = _mixed(hashed, positions.long() & _MASK)
    hashed = _mixed(hashed[:, None], (columns.long() & _MASK)[None, :]) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _MASK
    return hashed.to(torch.uint32)


_ops = torch.library.Library("sgl_kernel", "DEF")
_ops.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_ops.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name: str) -> Any:
    """Return a kernel that is imported and not called here."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
