"""Which operators run, from what source, to what sink."""

from .executors import Local, Ray
from .pipeline import Pipeline
from .plan import Plan
from .report import Dropped, Progress, Report, Step
from .source import File, Sql, Table
from .watch import watch

__all__ = [
    "Dropped",
    "File",
    "Local",
    "Pipeline",
    "Plan",
    "Progress",
    "Ray",
    "Report",
    "Sql",
    "Step",
    "Table",
    "watch",
]
