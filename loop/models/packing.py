"""Packing: sequences concatenated in one row, so that no position is padding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .attention import attention_of, is_flash
from .context_parallel import Context
from .lm_head import evaluating, tolerance

Select = Callable[[Tensor], Tensor]
"""Takes the positions of a pass, in its order, from a tensor [B, T, ..]."""
ATTENTION = "sdpa_packed"
"""The name under which transformers knows the attention below."""


@dataclass(frozen=True)
class Packed:
    """Which sequences lie in a packed row, one after another."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    begins_as: tuple[int, ...] = ()
    """For each sequence, the one whose first tokens it takes instead of its own; () if none do."""
    shared: tuple[int, ...] = ()
    """How many these are: 0 for a sequence that begins as itself."""

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where each token of all sequences lies [U], and which of them the row has [T]."""
        lengths_B = np.asarray(self.lengths, dtype=np.int64)
        row_U = np.repeat(np.arange(len(lengths_B)), lengths_B)
        starts_B = lengths_B.cumsum() - lengths_B
        step_U = np.arange(len(row_U)) - starts_B[row_U]
        if not self.shared:
            return np.arange(len(row_U)), np.arange(len(row_U))
        is_own_U = step_U >= np.asarray(self.shared)[row_U]
        owner_U = np.where(is_own_U, row_U, np.asarray(self.begins_as)[row_U])
        place_U = np.cumsum(is_own_U) - 1
        return place_U[starts_B[owner_U] + step_U], np.flatnonzero(is_own_U)


@torch.compiler.disable  # else each number of sequences would be compiled anew
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed | None = None,
    sliding_window: int | None = None,
    context: Context | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence; without lengths, do as sdpa does.

    The cost is the sum of the squared lengths; with one mask for all it would be the square of
    their sum: for 8 sequences of 512 tokens on a CPU, 4.1 s instead of 0.49 s. There, no single
    call of variable length has a gradient: neither flex_attention nor sdpa on jagged tensors
    (torch 2.13). With a context, this process has a part of the positions.
    """
    if context is not None:
        q, k, v = (context.heads(x) for x in (query, key, value))
        options |= {"packed": packed, "sliding_window": sliding_window}
        attend: Any = _attend
        found_BTHD, _ = attend(module, q, k, v, attention_mask, **options)
        return context.positions(found_BTHD.transpose(1, 2)).transpose(1, 2), None
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **options
        )
    sets, place_T = _sets(packed, query.device)
    found = []
    for at_NL in sets:
        q, k, v = (
            taken(x[0], at_NL.flatten()).unflatten(1, at_NL.shape).transpose(0, 1)
            for x in (query, key, value)
        )
        out_NLHD, _ = sdpa_attention_forward(module, q, k, v, _window(q, sliding_window), **options)
        found.append(out_NLHD.flatten(0, 1))
    return torch.cat(found).index_select(0, place_T)[None], None


def taken(x_HND: Tensor, at_U: Tensor) -> Tensor:
    """Return positions [H, U, D]; their gradients add up in float32 at least."""
    is_exact = x_HND.dtype in (torch.float32, torch.float64)
    return x_HND.index_select(1, at_U) if is_exact else _Taken.apply(x_HND, at_U)


class _Taken(torch.autograd.Function):
    """Positions of a tensor of low precision, whose gradients add up in float32.

    In bfloat16, those of the values of a prompt that 256 rows share are off by 3.3 % and not 1.8 %.
    """

    @staticmethod
    def forward(ctx: Any, x_HND: Tensor, at_U: Tensor) -> Tensor:
        ctx.save_for_backward(at_U)
        ctx.shape = x_HND.shape
        return x_HND.index_select(1, at_U)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (at_U,), (gradient_HUD,) = ctx.saved_tensors, gradients
        summed = gradient_HUD.new_zeros(ctx.shape, dtype=torch.float32)
        return summed.index_add_(1, at_U, gradient_HUD.float()).to(gradient_HUD.dtype), None


# Layers attend to the same sequences one after the other.
@lru_cache(maxsize=2)
def _sets(packed: Packed, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return sets of sequences of similar length, and where their outputs belong.

    A set is the positions [N, L] of its sequences, padded on the right, which causal attention
    never sees. Of all sets' outputs, concatenated, those at [T] are the packed ones. With a call
    for each of 256 sequences of about ten tokens, a small model's passes take a third longer.
    """
    lengths = packed.lengths
    lengths_B = torch.tensor(lengths, device=device)
    starts_B = lengths_B.cumsum(0) - lengths_B
    place_U, own_T = (torch.from_numpy(x).to(device) for x in packed.places())
    out_U = torch.empty_like(place_U)
    sets, total = [], 0
    for rows in _similar(lengths):
        longest = lengths[rows[0]]
        length_N1 = lengths_B[rows][:, None]
        step_L = torch.arange(longest, device=device)
        at_NL = starts_B[rows][:, None] + torch.minimum(step_L, length_N1 - 1)
        is_real_NL = step_L < length_N1
        out_NL = total + torch.arange(at_NL.numel(), device=device).view_as(at_NL)
        out_U[at_NL[is_real_NL]] = out_NL[is_real_NL]
        sets.append(place_U[at_NL])
        total += at_NL.numel()
    return sets, out_U[own_T]


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows of sequences of similar length, the longest first.

    >>> _similar([3, 100, 8, 95])
    [[1, 3], [2, 0]]
    """
    sets: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[sets[-1][0]] if sets else None
        if longest is None or longest - lengths[row] > max(8, longest // 8):
            sets.append([])
        sets[-1].append(row)
    return sets


def _window(query: Tensor, size: int | None) -> Tensor | None:
    """Return the mask of a sliding window [1, 1, L, L]; None if plain causal attention suffices."""
    length = query.shape[2]
    if size is None or length <= size:
        return None
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place[None, :]
    return ((distance >= 0) & (distance < size))[None, None]


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def read_lengths(wanted_BT: Tensor) -> Tensor:
    """Return how many tokens of each sequence must be read [B], at least one in total.

    Tokens after the last wanted position have no effect on it, so they are left out.
    """
    place_T = torch.arange(1, wanted_BT.shape[1] + 1, device=wanted_BT.device)
    lengths_B = (wanted_BT * place_T).amax(1)
    return lengths_B if lengths_B.any() else lengths_B.index_fill(0, place_T[:1] - 1, 1)


def hidden(
    backbone: nn.Module,
    token_ids_BT: Tensor,
    wanted_BT: Tensor,
    *,
    packed: bool,
    context: Context | None = None,
    given: Mapping[str, Tensor] | None = None,
    before: Callable[[Select], None] | None = None,
) -> tuple[Tensor, slice]:
    """Return the hidden states of M wanted positions, row by row [M, D], and which of them.

    With a context, they are those of this process, which must pack; otherwise all of them. `given`
    are the embeddings [B, T, D] and positions [3, B, T] of sequences that show images.
    Without packing, no attention mask is needed: padding is on the right, which causal attention
    never sees. `before` is called before the pass.
    """
    lengths_B = read_lengths(wanted_BT)
    if not packed:
        width = int(lengths_B.max())
        if before is not None:
            before(lambda values_BT: values_BT[:, :width].flatten(0, 1))
        asked: dict[str, Any] = {"input_ids": token_ids_BT[:, :width]}
        if given is not None:
            asked = {
                "inputs_embeds": given["inputs_embeds"][:, :width],
                "position_ids": given["position_ids"][:, :, :width],
            }
        found = backbone(**asked, use_cache=False)
        return found.last_hidden_state[wanted_BT[:, :width]], slice(None)
    place_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
    read_BT = place_T < lengths_B[:, None]
    token_N, wanted_N = token_ids_BT[read_BT], wanted_BT[read_BT]
    place_N = place_T.expand_as(token_ids_BT)[read_BT]
    attention, at = attention_of(backbone), slice(None)
    # equal tokens may show different images, or go to different experts
    if attention == ATTENTION and context is None and given is None and before is None:
        rows = _packed(token_ids_BT, wanted_BT, lengths_B)
        at_U, own_N = (torch.from_numpy(x).to(place_N.device) for x in rows.places())
        token_N, place_N, wanted_N = token_N[own_N], place_N[own_N], at_U[wanted_N]
        options: dict[str, Any] = {"attention_mask": _unread(lengths_B), "packed": rows}
    else:
        options = _boundaries(attention, lengths_B[lengths_B > 0])
    if context is not None:
        options["packed"] = Packed(tuple(context.lengths(options["packed"].lengths)))
        options["context"] = context
        at = context.wanted(wanted_N)
        token_N, place_N, wanted_N = (context.own(x) for x in (token_N, place_N, wanted_N))
    if before is not None:

        def select(values_BT: Tensor) -> Tensor:
            values_N = values_BT[read_BT]
            return values_N if context is None else context.own(values_N)

        before(select)
    asked = {"input_ids": token_N[None], "position_ids": place_N[None]}
    if given is not None:
        asked = {
            "inputs_embeds": given["inputs_embeds"][read_BT][None],
            "position_ids": given["position_ids"][:, read_BT][:, None],
        }
    found = backbone(**asked, use_cache=False, **options)
    return found.last_hidden_state[0][wanted_N], at


def _packed(token_ids_BT: Tensor, wanted_BT: Tensor, lengths_B: Tensor) -> Packed:
    """Return how rows are packed: one that begins as another is read from where they may differ.

    What comes before the first trained token, as the prompt that the rows of a group share, has the
    same hidden states in all of them.
    """
    lengths = lengths_B.tolist()
    ids = token_ids_BT.cpu().numpy()
    # the position before the first trained token is of the beginning too
    begins = (wanted_BT.int().argmax(1) + 1).tolist()
    rows = [b for b, length in enumerate(lengths) if length]
    known: dict[bytes, int] = {}
    firsts = [known.setdefault(ids[b, : begins[b]].tobytes(), i) for i, b in enumerate(rows)]
    sizes = tuple(lengths[b] for b in rows)
    if len(known) == len(rows):
        return Packed(sizes)
    shared = [0 if first == i else begins[rows[i]] for i, first in enumerate(firsts)]
    return Packed(sizes, tuple(firsts), tuple(shared))


def _boundaries(attention: str, lengths_B: Tensor) -> dict[str, Any]:
    """Return the arguments that tell an attention where packed sequences begin and end."""
    if attention == ATTENTION:
        return {"attention_mask": _unread(lengths_B), "packed": Packed(tuple(lengths_B.tolist()))}
    if not is_flash(attention):
        return {}  # transformers builds flex_attention's mask from the positions
    ends_B = nn.functional.pad(lengths_B.cumsum(0), (1, 0)).int()
    longest = int(lengths_B.max())
    return {
        "cu_seq_lens_q": ends_B,
        "cu_seq_lens_k": ends_B,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _unread(like: Tensor) -> Tensor:
    """Return a mask of four dimensions, which transformers passes through unread.

    Otherwise it would build one of all pairs of tokens.
    """
    return like.new_ones(1, 1, 1, 1)


@torch.no_grad()
def can_pack(model: PreTrainedModel) -> bool:
    """Prepare a model for packed sequences; return whether it supports them.

    A model does if it looks up its attention by name, other than eager, and has no other state
    across tokens. This is tested on three short sequences, packed and alone; layers that differ on
    long ones only, as those of chunked or sparse attention, are known by their types.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return False
    before = attention_of(model)
    if before == ATTENTION:
        return True
    if before == "sdpa":
        model.set_attn_implementation(ATTENTION)
    elif before != "flex_attention" and not is_flash(before):
        return False
    backbone = model.get_decoder()
    size = model.config.get_text_config().vocab_size
    tokens = torch.arange(12, device=model.device).reshape(3, 4) % size
    tokens[2, :2] = tokens[0, :2]  # one prompt, which is read once
    wanted = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1]], device=model.device) > 0
    with evaluating(model):
        try:
            alone = torch.stack(
                [
                    backbone(input_ids=row[None], use_cache=False).last_hidden_state[0]
                    for row in tokens
                ]
            )[wanted]
            packed, _ = hidden(backbone, tokens, wanted, packed=True)
        # it does not accept these arguments, or returns no hidden states
        except (AttributeError, TypeError, ValueError, RuntimeError):
            alone, packed = torch.zeros(1), torch.full((1,), torch.nan)
    if float((packed - alone).abs().max()) <= tolerance(model) * float(alone.abs().max()):
        return True
    model.set_attn_implementation(before)
    return False
