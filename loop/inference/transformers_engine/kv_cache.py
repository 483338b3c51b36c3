"""Keys and values of running sequences, a row each, and the attention that reads them in place."""

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
"""Rows are longer by multiples of this."""


@dataclass
class Reading:
    """Sequences that are read from their beginning (U of them), padded on the right.

    The rows, M of them, keep what is read of the sequences `source_M`; None: of each one.
    """

    slots: "KVCache"
    rows: slice | Tensor
    source_M: Tensor | None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Let every token see those before it; padding stands where none of them looks."""
        self.slots.keep(module.layer_idx, self, key, value)  # type: ignore[arg-type]
        window = options.get("sliding_window")
        mask = None
        if window is not None and key.shape[2] > window:
            place = torch.arange(key.shape[2], device=key.device)
            distance = place[:, None] - place[None, :]
            mask = ((distance >= 0) & (distance < window))[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]


@dataclass
class Writing:
    """One more token for each of the first B rows, which stands at `at_B`."""

    slots: "KVCache"
    at_B: Tensor
    longest: int
    """Tokens of the longest row, the new one included."""
    is_even: bool
    """Whether all rows are as long."""
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    """What is added to the scores, by sliding window."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Let each new token see its row; queries that share keys go together: none is copied."""
        keys, values = self.slots.write(module.layer_idx, self, key, value)  # type: ignore[arg-type]
        rows, heads, _, size = query.shape
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
        if self.is_even and window is None:
            return None
        place_L = torch.arange(self.longest, device=self.at_B.device)
        hidden_BL = place_L > self.at_B[:, None]
        if window is not None:
            hidden_BL |= place_L <= self.at_B[:, None] - window
        mask_BL = torch.zeros(hidden_BL.shape, dtype=dtype, device=self.at_B.device)
        return mask_BL.masked_fill_(hidden_BL, -torch.inf)[:, None, None]


class KVCache:
    """Keys and values by layer, each [rows, heads, length, size], of which B rows are in use.

    They are made when the first sequences are read, in the shape that the model gives, and grow in
    blocks: by half, up to what is reserved.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows = self._length = 0

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values there is room for."""
        return self._rows * self._length

    def reserve(self, rows: int, length: int, *, used: int, most: int) -> None:
        """Make room for rows of a length, keeping what the first `used` rows have.

        There is never more than `most` tokens of room, which rows and length fit.
        """
        if rows <= self._rows and length <= self._length:
            return
        wanted = self._length
        if length > self._length:
            wanted = -(-max(length, self._length * 3 // 2) // BLOCK) * BLOCK
        longer = max(length, min(wanted, most // rows))
        more = max(rows, min(2 * self._rows, most // longer)) if rows > self._rows else rows
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (
                _larger(keys, more, longer, used),
                _larger(values, more, longer, used),
            )
        self._rows, self._length = more, longer

    def move(self, rows: Mapping[int, int], length: int) -> None:
        """Copy the beginnings of rows, by their new places, over others, which are given up."""
        target, source = list(rows), list(rows.values())
        for both in self._layers.values():
            for kept in both:
                kept[target, :, :length] = kept[source, :, :length]

    def clear(self) -> None:
        """Give all room back."""
        self._layers, self._rows, self._length = {}, 0, 0

    def keep(self, layer: int, reading: Reading, key: Tensor, value: Tensor) -> None:
        """Keep what was read of each sequence in the rows that begin with it."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(key), self._empty(value))
        length, source_M = key.shape[2], reading.source_M
        for kept, new in zip(self._layers[layer], (key, value), strict=True):
            chosen = new if source_M is None else new.index_select(0, source_M)
            kept[reading.rows, :, :length] = chosen

    def write(
        self, layer: int, writing: Writing, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep one more token of each row; return the rows so far, which are not copied."""
        rows, longest = len(key), writing.longest
        views = []
        for kept, new in zip(self._layers[layer], (key, value), strict=True):
            if writing.is_even:
                kept[:rows, :, longest - 1 : longest] = new
            else:
                kept[:rows].scatter_(2, writing.at_B[:, None, None, None].expand_as(new), new)
            views.append(kept[:rows, :, :longest])
        return views[0], views[1]

    def _empty(self, like: Tensor) -> Tensor:
        # zeros: what nobody wrote is masked, and must not be a number that spoils the sum
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
    slots: Reading | Writing | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend through slots; without them, do as sdpa does."""
    if slots is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return slots.attend(module, query, key, value, **options), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def padded(sequences: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return sequences as a tensor [U, P], padded on the right."""
    longest = max(map(len, sequences))
    rows = [[*sequence, *[0] * (longest - len(sequence))] for sequence in sequences]
    return torch.tensor(rows, device=device)
