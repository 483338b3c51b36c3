"""Tensors handed to other processes of this host: in a file, or in memory that they map."""

import os
import weakref
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ALIGNMENT = 64
"""Tensors begin at multiples of this, in bytes."""


class SharedBlock:
    """Memory that other processes of this user and host map. It holds one set of tensors at a time.

    It is an anonymous file (memfd): it takes no room of /dev/shm, which containers limit to 64 MB,
    and is gone with this process, however that ends. It is kept and written again for each set,
    since the first write to a page takes many times as long as the others.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("rlake-weights")
        weakref.finalize(self, os.close, self._file)
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self.source: dict[str, Any] = {}
        """How `opened` finds the tensors."""

    def write(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Replace the tensors, which nobody may be reading, and return how `opened` finds them."""
        places, end = [], 0
        for name, tensor in state.items():
            places.append([name, str(tensor.dtype).partition(".")[2], list(tensor.shape), end])
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        if len(self._bytes) < end:
            os.ftruncate(self._file, end)
            self._bytes = torch.from_file(path, shared=True, size=end, dtype=torch.uint8)
        for (name, _, _, start), view in zip(places, _views(self._bytes, places), strict=True):
            view.copy_(state[name])
            assert start % ALIGNMENT == 0, "tensors are aligned"
        self.source = {"memory": path, "bytes": end, "tensors": places}
        return self.source


def opened(source: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a file (`{"file": path}`), or those that a SharedBlock holds.

    They are mapped and not copied. Raises OSError, RuntimeError or SafetensorError if that fails.
    """
    if "file" in source:
        return load_file(Path(source["file"]))
    # Not shared: this process cannot change what the other one wrote.
    block = torch.from_file(source["memory"], shared=False, size=source["bytes"], dtype=torch.uint8)
    names = [name for name, *_ in source["tensors"]]
    return dict(zip(names, _views(block, source["tensors"]), strict=True))


def _views(block: Tensor, places: list[Any]) -> list[Tensor]:
    views = []
    for _, dtype, shape, start in places:
        kind = getattr(torch, dtype)
        size = prod(shape) * kind.itemsize
        views.append(block[start : start + size].view(kind).view(shape))
    return views
