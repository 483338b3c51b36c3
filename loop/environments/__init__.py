"""Environments: what policies act in, one file each.

A class or function that is listed here, or `package.module:name`, is what the parameter
`environment` of the workflows `multi_turn` and `step_wise` may name.
"""

from .frozen_lake import frozen_lake
from .gymnasium import gymnasium
from .sql import sql
from .sudoku import sudoku

__all__ = ["frozen_lake", "gymnasium", "sql", "sudoku"]
