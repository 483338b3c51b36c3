"""Token-level credit: rewards of tokens, and generalized advantages over trained tokens."""

import torch
from torch import Tensor

from .batch import Examples


def earned(rows: Examples) -> Tensor:
    """Return the reward of each trained token [N], 0 for the others, in float64.

    With `token_rewards`, the reward of a token that is not trained on, such as an environment's
    response, goes to the last trained token before it; rewards before the first trained token are
    dropped. Without, the sequence's reward goes to its last trained token.
    """
    mask, row_N = rows.tokens["mask"] > 0, rows.row_N
    at_M = mask.nonzero()[:, 0]
    out_N = torch.zeros(len(mask), dtype=torch.float64)
    if "token_rewards" not in rows.tokens:
        is_last_M = _is_last(row_N[at_M])
        out_N[at_M[is_last_M]] = rows.rows["reward"].double()[row_N[at_M[is_last_M]]]
        return out_N
    number_N = mask.long().cumsum(0) - 1
    owner_N = at_M[number_N.clamp(min=0)] if len(at_M) else torch.zeros_like(row_N)
    # Tokens are numbered over the whole step: the first ones of a row, if they are not trained on,
    # would otherwise give their reward to the row before.
    is_owned_N = (number_N >= 0) & (row_N[owner_N] == row_N)
    rewards_N = rows.tokens["token_rewards"].double()
    return out_N.index_add(0, owner_N[is_owned_N], rewards_N[is_owned_N])


def gae(rows: Examples, rewards_N: Tensor, values_N: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Return the advantage of each trained token [N], 0 for the others, in float64.

    Generalized advantage estimation (arXiv:1506.02438, equations 11 and 16) over the trained tokens
    of each sequence: the successor of a token is the next trained one, whatever is between, and the
    last one has none. A value is that of the state before its token.
    """
    at_M = (rows.tokens["mask"] > 0).nonzero()[:, 0]
    is_last_M = _is_last(rows.row_N[at_M])
    values_M, rewards_M = values_N.double()[at_M], rewards_N.double()[at_M]
    following_M = values_M.roll(-1).masked_fill(is_last_M, 0.0)
    errors_M = rewards_M + gamma * following_M - values_M
    carried, backward = 0.0, []
    for error, is_last in zip(
        reversed(errors_M.tolist()), reversed(is_last_M.tolist()), strict=True
    ):
        carried = error + (0.0 if is_last else gamma * lam * carried)
        backward.append(carried)
    out_N = torch.zeros(len(values_N), dtype=torch.float64)
    out_N[at_M] = torch.tensor(backward[::-1], dtype=torch.float64)
    return out_N


def whitened(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return numbers of trained tokens with mean 0 and standard deviation 1, 0 for the others.

    The deviation is that of the population, with the divisor n.
    """
    is_trained_N = mask_N > 0
    chosen_M = values_N[is_trained_N]
    if not len(chosen_M):
        return values_N
    # Equal values have the deviation 0: they become 0, not NaN.
    scaled_N = (values_N - chosen_M.mean()) / (chosen_M.std(correction=0) + 1e-8)
    return scaled_N.where(is_trained_N, torch.zeros_like(values_N))


def _is_last(row_M: Tensor) -> Tensor:
    """Tell which trained tokens are the last of their rows, given the rows they are of."""
    return torch.cat([row_M[1:] != row_M[:-1], row_M.new_ones(min(1, len(row_M))).bool()])
