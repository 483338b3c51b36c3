"""Environments in which policies act, one file each.

The parameter `environment` of the workflows `multi_turn` and `step_wise` names a class or function
that is listed here, or `package.module:name`.
"""

from .alfworld import alfworld
from .bash import bash
from .gymnasium import gymnasium
from .scienceworld import scienceworld
from .shopping import shopping
from .sql import sql
from .textworld import textworld

__all__ = ["alfworld", "bash", "gymnasium", "scienceworld", "shopping", "sql", "textworld"]
