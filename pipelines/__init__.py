"""Which operators run, from what source, to what sink."""

from .pipeline import Pipeline
from .plan import Plan
from .report import Dropped, Report
from .source import File, Sql, Table

__all__ = ["Dropped", "File", "Pipeline", "Plan", "Report", "Sql", "Table"]
