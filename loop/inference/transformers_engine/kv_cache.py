"""The KV cache, one row for each running sequence, and the attention that reads it in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_slots"
"""The name of the attention below, among those of transformers."""
BLOCK = 64
"""Rows grow by multiples of this."""


@dataclass
class Prefill:
    """U sequences read from their beginning, padded on the right.

    M rows take the keys and values of the sequences `source_M`; None: of each one.
    """

    cache: "KVCache"
    rows: slice | Tensor
    source_M: Tensor | None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Attend causally; padding is on the right, where no token looks."""
        self.cache.fill(module.layer_idx, self, key, value)  # type: ignore[arg-type]
        window = options.get("sliding_window")
        mask = None
        if window is not None and key.shape[2] > window:
            index = torch.arange(key.shape[2], device=key.device)
            distance = index[:, None] - index[None, :]
            mask = ((distance >= 0) & (distance < window))[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


@dataclass
class Decode:
    """One more token for each of the first B rows, at index `at_B`."""

    cache: "KVCache"
    at_B: Tensor
    longest: int
    """Tokens of the longest row with its new one."""
    is_even: bool
    """Whether all rows have the same length."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    """Added to the scores, by sliding window."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Attend from each new token to its row."""
        keys, values = self.cache.write(module.layer_idx, self, key, value)  # type: ignore[arg-type]
        rows, heads, _, size = query.shape
        # Query heads that share keys become one head of several queries, so no key is copied.
        grouped = query.reshape(rows, keys.shape[1], -1, size)
        found = functional.scaled_dot_product_attention(
            grouped,
            keys,
            values,
            attn_mask=self._mask(options.get("sliding_window"), query.dtype),
            scale=options.get("scaling"),
        )
        return found.reshape(rows, 1, heads, -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if window is not None and window >= self.longest:
            window = None
        if window not in self.masks:
            self.masks[window] = self._new_mask(window, dtype)
        return self.masks[window]

    def _new_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        # No row hides anything, and attention without a mask is faster.
        if self.is_even and window is None:
            return None
        index_L = torch.arange(self.longest, device=self.at_B.device)
        hidden_BL = index_L > self.at_B[:, None]
        if window is not None:
            hidden_BL |= index_L <= self.at_B[:, None] - window
        mask_BL = torch.zeros(hidden_BL.shape, dtype=dtype, device=self.at_B.device)
        return mask_BL.masked_fill_(hidden_BL, -torch.inf)[:, None, None]


class KVCache:
    """Keys and values by layer, each [rows, heads, length, size], of which B rows are in use.

    Allocated at the first prefill, in the model's shape; rows grow by half, in blocks.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = self._length = 0

    def reserve(self, rows: int, length: int, *, used: int, most: int) -> None:
        """Make room for rows of a length, keeping the first `used` rows.

        The room never exceeds `most` tokens, which `rows` and `length` fit.
        """
        if rows <= self._rows and length <= self._length:
            return
        wanted = self._length
        if length > self._length:
            wanted = -(-max(length, self._length * 3 // 2) // BLOCK) * BLOCK
        longer = max(length, min(wanted, most // rows))
        more = max(rows, min(2 * self._rows, most // longer)) if rows > self._rows else rows
        for layer, (keys, values) in self._layers.items():
            grown = [_larger(kept, more, longer, used) for kept in (keys, values)]
            self._layers[layer] = grown[0], grown[1]
        self._rows, self._length = more, longer

    def move(self, rows: Mapping[int, int], length: int) -> None:
        """Copy the first `length` tokens of rows, by their new indices, over other rows."""
        target, source = list(rows), list(rows.values())
        for both in self._layers.values():
            for kept in both:
                kept[target, :, :length] = kept[source, :, :length]

    def clear(self) -> None:
        """Free the memory."""
        self._layers, self._rows, self._length = {}, 0, 0

    def fill(self, layer: int, prefill: Prefill, key: Tensor, value: Tensor) -> None:
        """Store the keys and values of prompts in all rows that begin with them."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        length, source_M = key.shape[2], prefill.source_M
        for kept, new in zip(self._layers[layer], (key, value), strict=True):
            chosen = new if source_M is None else new.index_select(0, source_M)
            kept[prefill.rows, :, :length] = chosen

    def write(self, layer: int, step: Decode, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one more token of each row; return views of the rows so far."""
        rows, longest = len(key), step.longest
        views = []
        for kept, new in zip(self._layers[layer], (key, value), strict=True):
            if step.is_even:
                kept[:rows, :, longest - 1 : longest] = new
            else:
                kept[:rows].scatter_(2, step.at_B[:, None, None, None].expand_as(new), new)
            views.append(kept[:rows, :, :longest])
        return views[0], views[1]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros: entries never written are masked, but a NaN would still spoil the masked sum.
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])


def _larger(kept: Tensor, rows: int, length: int, used: int) -> Tensor:
    made = kept.new_zeros(rows, kept.shape[1], length, kept.shape[3])
    both = min(length, kept.shape[2])
    made[:used, :, :both] = kept[:used, :, :both]
    return made


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: Prefill | Decode | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend through the cache; without it, as transformers' sdpa does."""
    if slots is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return slots.attend(module, query, key, value, **options), None


AttentionInterface.register(ATTENTION, _attend)
# For passes without the cache, such as scoring: they need the mask that sdpa gets.
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return sequences as a tensor [U, P], padded on the right."""
    longest = max(map(len, sequences))
    rows = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, device=device)
