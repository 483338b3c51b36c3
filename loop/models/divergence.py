"""Compare the whole distributions of policy and teacher at each token."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ...store.errors import JobError
from .lm_head import Temperature, head_of, logprobs_at, split_temperature
from .load import vocabulary

Compare = Callable[[Tensor, Tensor], Tensor]
"""(policy's log-probs [M, V], teacher's [M, V]) -> one number per token [M]."""


def compared(
    policy: PreTrainedModel,
    teacher: PreTrainedModel,
    compare: Compare,
    token_ids_BT: Tensor,
    mask_BT: Tensor,
    *,
    temperature: Temperature,
    chunk_bytes: int,
) -> dict[str, Tensor]:
    """Return the policy's `logprobs` and `vocabulary`, the result of `compare`, each [B, T].

    Both are 0 for masked tokens; the temperature is one number, or one per other token [M]. At most
    `chunk_bytes` of the two networks' logits are in memory at once.
    """
    # Model families pad the rows of their head to different multiples: rows beyond the shorter head
    # are not tokens.
    size_V = min(vocabulary(policy), vocabulary(teacher))
    wanted_BT = mask_BT[:, 1:] > 0
    token_M = token_ids_BT[:, 1:][wanted_BT]
    own_MD = _hidden(policy, token_ids_BT)[wanted_BT]
    with torch.no_grad():
        other_MD = _hidden(teacher, token_ids_BT)[wanted_BT]

    def part(
        own_CD: Tensor, other_CD: Tensor, token_C: Tensor, at: Temperature
    ) -> tuple[Tensor, Tensor]:
        logprobs_CV = _logprobs(policy, own_CD, at, size_V)
        with torch.no_grad():
            teacher_CV = _logprobs(teacher, other_CD, at, size_V)
        chosen_C = logprobs_CV.gather(-1, token_C[:, None])[:, 0]
        return chosen_C, compare(logprobs_CV, teacher_CV)

    size = max(1, chunk_bytes // (8 * size_V))
    each = (own_MD.split(size), other_MD.split(size), token_M.split(size))
    at = split_temperature(temperature, size, len(token_M))
    chunks = [
        checkpoint(part, *parts, use_reentrant=False) if torch.is_grad_enabled() else part(*parts)
        for parts in zip(*each, at, strict=True)
    ]
    made = {}
    for name, values in zip(("logprobs", "vocabulary"), zip(*chunks, strict=True), strict=True):
        values_M = torch.cat(values)
        full_BT = values_M.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values_M)
        made[name] = nn.functional.pad(full_BT, (1, 0))
    return made


def _hidden(model: PreTrainedModel, token_ids_BT: Tensor) -> Tensor:
    found = model.get_decoder()(input_ids=token_ids_BT, use_cache=False)
    return found.last_hidden_state[:, :-1]


def _logprobs(
    model: PreTrainedModel, hidden_CD: Tensor, temperature: Temperature, size_V: int
) -> Tensor:
    head = head_of(model)
    if head is None:
        raise JobError(
            f"`{type(model).__name__}` changes its logits in an unknown way, so whole "
            "distributions cannot be compared; take an algorithm of sampled tokens"
        )
    return logprobs_at(head.logits(hidden_CD)[:, :size_V], temperature)
