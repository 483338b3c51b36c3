"""Advantages: credit for each row, from the rewards of its group, of all rows, or of its steps.

A reward that is NULL (or no finite number) was not computed: the row is kept out of all statistics
and gets no advantage.
Where rewards that are compared are equal, or there is only one, they say nothing: the advantage is
0, unless a formula says otherwise. Standard deviations are those of a sample (divisor n - 1), as in
the view `groups`.

The same rows give the same bits, in whatever order they come and whichever engine runs.

Generalized advantage estimation (arXiv:1506.02438) is not here: it needs a value of each token by a
critic, which a trainer holds and rows do not.
"""

from .balanced import balanced
from .batch import batch_zscore, centered_batch_zscore, greedy_baseline, reinforce
from .desirability import desirability
from .group import above_greedy, group_centered, group_zscore, leave_one_out, log_mean_exp
from .pass_rate import max_rl, pass_at_k
from .steps import gigpo, step_zscore

__all__ = [
    "above_greedy",
    "balanced",
    "batch_zscore",
    "centered_batch_zscore",
    "desirability",
    "gigpo",
    "greedy_baseline",
    "group_centered",
    "group_zscore",
    "leave_one_out",
    "log_mean_exp",
    "max_rl",
    "pass_at_k",
    "reinforce",
    "step_zscore",
]
