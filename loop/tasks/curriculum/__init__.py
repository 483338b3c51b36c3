"""Curricula: selectors of tasks, what they learn from rollouts, and the record of both."""

from .curriculum import Curriculum

__all__ = ["Curriculum"]
