"""What may be done to rows: clean, derive, filter, prioritize, augment, reshape.

The names here are the registry: an operator is usable by name when it is imported below.
"""

from . import rewards
from .advantage import group_zscore, leave_one_out
from .apply import Applied, Operator
from .augment import best_of_group
from .body import Batches, Declared, Explained, Rows, Value
from .clean import clean_whitespace
from .decorator import OperatorFunction, operator
from .filter import drop_flat_groups, keep
from .names import resolve
from .preference import pairs
from .prioritize import priority
from .scoring import score

__all__ = [
    "Applied",
    "Batches",
    "Declared",
    "Explained",
    "Operator",
    "OperatorFunction",
    "Rows",
    "Value",
    "best_of_group",
    "clean_whitespace",
    "drop_flat_groups",
    "group_zscore",
    "keep",
    "leave_one_out",
    "operator",
    "pairs",
    "priority",
    "resolve",
    "rewards",
    "score",
]
