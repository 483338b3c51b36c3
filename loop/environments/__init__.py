"""Environments: what policies act in, one file each.

A class or function that is listed here, or `package.module:name`, is what the parameter
`environment` of the workflows `multi_turn` and `step_wise` may name.
"""

from ..recipes.toys.frozen_lake_env import frozen_lake
from ..recipes.toys.sudoku_env import sudoku
from .gymnasium import gymnasium
from .sql import sql

__all__ = ["frozen_lake", "gymnasium", "sql", "sudoku"]
