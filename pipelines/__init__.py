"""Pipelines: operators between a source and a sink, run once, incrementally or continuously."""

from .executors import Local, Ray
from .expectation import Expectation
from .pipeline import Pipeline
from .plan import Plan
from .report import Dropped, Progress, Report, Step
from .rescoring import Rescored, rescore
from .reward_diff import changed_rows
from .reward_diff import compare as compare_rewards
from .source import File, Sql, Table
from .watch import watch

__all__ = [
    "Dropped",
    "Expectation",
    "File",
    "Local",
    "Pipeline",
    "Plan",
    "Progress",
    "Ray",
    "Report",
    "Rescored",
    "Sql",
    "Step",
    "Table",
    "changed_rows",
    "compare_rewards",
    "rescore",
    "watch",
]
