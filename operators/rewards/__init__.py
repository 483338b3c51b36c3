"""Rewards: functions `(task, experience) -> float | None`; None means that it does not apply.

Keyword parameters are a reward's configuration. It may be `async`, return a `Verdict`, which is a
number with a reason, or, with `@of_group`, judge all rollouts of a group at once.
"""

from ..judging.pairwise import pairwise
from ..judging.rubric import rubric
from ..judging.ruler import ruler
from ..reward_protocol import Reward as Reward
from ..reward_protocol import Verdict
from .code import code_tests
from .countdown import countdown
from .length import overlong
from .math_equivalence import math_equivalence
from .reward_model import reward_model
from .text import boxed, calibrated_answer, exact_match, format_reward, numeric_answer
from .tools import tool_call_match

__all__ = [
    "Verdict",
    "boxed",
    "calibrated_answer",
    "code_tests",
    "countdown",
    "exact_match",
    "format_reward",
    "math_equivalence",
    "numeric_answer",
    "overlong",
    "pairwise",
    "reward_model",
    "rubric",
    "ruler",
    "tool_call_match",
]
