"""Sample the next token of each sequence by inverting its CDF at one uniform number."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policy import Sampling

BLOCK = 256
"""Tokens per block of the blockwise sum."""


class TokenSampler:
    """Samples the next tokens of B sequences, each with its own settings."""

    def __init__(self, sampling: Sequence[Sampling], device: torch.device) -> None:
        kinds = {s.temperature for s in sampling}
        self._is_greedy = kinds == {0}
        self._greedy_B: Tensor | None = None
        self._scale: Tensor | float | None = None
        if len(kinds) == 1 and not kinds <= {0, 1}:
            [self._scale] = kinds
        elif len(kinds) > 1:
            temperature_B = torch.tensor([s.temperature for s in sampling], device=device)
            greedy_B = temperature_B == 0
            self._greedy_B = greedy_B if greedy_B.any() else None
            self._scale = temperature_B.masked_fill(greedy_B, 1.0)[:, None]
        self.reported = [(i, s.top_logprobs) for i, s in enumerate(sampling) if s.top_logprobs]
        """The sequences that want the likeliest tokens, and how many of them."""
        cut = [s.temperature > 0 and s.is_truncated for s in sampling]
        rows = [i for i, is_cut in enumerate(cut) if is_cut]
        self._cut_C = torch.tensor(rows, device=device) if rows else None
        if rows:
            self._top_k_C = torch.tensor([sampling[i].top_k for i in rows], device=device)
            self._top_p_C = torch.tensor([sampling[i].top_p for i in rows], device=device)
            self._min_p_C = torch.tensor([sampling[i].min_p for i in rows], device=device)

    def tokens(
        self, logits_BV: Tensor, noise_B: Tensor, processed_BV: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and their log-probs [B]; temperature 0 takes the likeliest token.

        The log-probs are of the full distribution at the temperature (1 for temperature 0), which
        a trainer computes, not of the one that min_p, top_k and top_p truncate, nor of that of
        `processed_BV`, from which tokens are sampled where it is given.
        """
        if processed_BV is not None:
            token_B, _ = self.tokens(processed_BV, noise_B)
            # Not the log of a probability: what is forced may be less likely than float32 can say.
            logprob_BV = self._scaled(logits_BV).log_softmax(-1)
            return token_B, logprob_BV.gather(-1, token_B[:, None])[:, 0]
        p_BV = torch.softmax(self._scaled(logits_BV), dim=-1)
        if self._is_greedy:
            return _with_logprobs(p_BV, logits_BV.argmax(-1))
        token_B = inverse_cdf(self._truncated(p_BV), noise_B.to(p_BV.device))
        if self._greedy_B is not None:
            token_B = torch.where(self._greedy_B, logits_BV.argmax(-1), token_B)
        return _with_logprobs(p_BV, token_B)

    def likeliest(self, logits_BV: Tensor, row: int, number: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens of a row with their log-probs, the likeliest first."""
        top = self._scaled(logits_BV)[row].log_softmax(-1).topk(min(number, logits_BV.shape[1]))
        return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    def _scaled(self, logits_BV: Tensor) -> Tensor:
        return logits_BV if self._scale is None else logits_BV / self._scale

    def _truncated(self, p_BV: Tensor) -> Tensor:
        if self._cut_C is None:
            return p_BV
        kept_CV = top_k_top_p(p_BV[self._cut_C], self._top_k_C, self._top_p_C, self._min_p_C)
        return kept_CV if len(kept_CV) == len(p_BV) else p_BV.index_copy(0, self._cut_C, kept_CV)


def _with_logprobs(p_BV: Tensor, token_B: Tensor) -> tuple[Tensor, Tensor]:
    return token_B, p_BV.gather(-1, token_B[:, None])[:, 0].log()


def inverse_cdf(p_BV: Tensor, noise_B: Tensor) -> Tensor:
    """Return the tokens at which the cumulative probability exceeds numbers in [0, 1).

    Finds the block of tokens, then the token in it: only one block is summed token by token.
    """
    rows, size = p_BV.shape
    if size <= BLOCK:
        # In float64, since a float32 sum over a large vocabulary loses its rarest tokens; times its
        # last value, since the probabilities add up to 1 only nearly.
        sums_BV = p_BV.cumsum(-1, dtype=torch.float64)
        wanted_B1 = noise_B[:, None] * sums_BV[:, -1:]
        return torch.searchsorted(sums_BV, wanted_B1, right=True)[:, 0].clamp_(max=size - 1)
    blocks = -(-size // BLOCK)
    if blocks * BLOCK != size:
        p_BV = torch.nn.functional.pad(p_BV, (0, blocks * BLOCK - size))
    p_BNK = p_BV.view(rows, blocks, -1)
    sums_BN = p_BNK.sum(-1, dtype=torch.float64).cumsum(-1)
    wanted_B1 = (noise_B * sums_BN[:, -1])[:, None]
    block_B1 = torch.searchsorted(sums_BN, wanted_B1, right=True).clamp_(max=blocks - 1)
    before_B1 = torch.where(block_B1 > 0, sums_BN.gather(1, (block_B1 - 1).clamp_(min=0)), 0.0)
    p_BK = p_BNK[torch.arange(rows, device=p_BV.device), block_B1[:, 0]].double()
    index_B1 = torch.searchsorted(p_BK.cumsum(-1), wanted_B1 - before_B1, right=True)
    # The two sums differ by rounding: never go past the last token with a positive probability.
    index_K = torch.arange(p_BK.shape[-1], device=p_BK.device)
    index_B1 = torch.minimum(index_B1, (index_K * (p_BK > 0)).amax(-1, keepdim=True))
    return (block_B1 * p_BK.shape[-1] + index_B1)[:, 0]


def top_k_top_p(p_CV: Tensor, top_k_C: Tensor, top_p_C: Tensor, min_p_C: Tensor) -> Tensor:
    """Return truncated distributions: tokens with at least `min_p` times the largest probability,
    the `top_k` likeliest of them (0: all), then as many as together have probability `top_p`."""
    # Stable: which of several equally likely tokens are cut must not change from call to call.
    sorted_CV, order_CV = p_CV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(p_CV.shape[-1], device=p_CV.device)
    is_out = (rank_V >= top_k_C[:, None]) & (top_k_C[:, None] > 0)
    is_rare = sorted_CV < min_p_C[:, None] * sorted_CV[:, :1]
    kept_CV = sorted_CV.masked_fill(is_out | is_rare, 0.0)
    sums_CV = kept_CV.double().cumsum(-1)
    before_CV = torch.cat([sums_CV.new_zeros(len(sums_CV), 1), sums_CV[:, :-1]], 1)
    below_p = before_CV < top_p_C[:, None] * sums_CV[:, -1:]
    is_all = (top_p_C >= 1)[:, None]  # a sum may round to more than 1
    kept_CV = torch.where(below_p | is_all, kept_CV, 0.0)
    # The likeliest token always stays, or a small `top_p` would leave none.
    kept_CV[:, 0] = sorted_CV[:, 0]
    kept_CV /= kept_CV.sum(-1, keepdim=True)
    return torch.zeros_like(p_CV).scatter_(-1, order_CV, kept_CV)
