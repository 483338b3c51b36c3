"""The definition of a pipeline: its source, operators and sink."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..operators import Operator
from ..operators.resolve import Spec
from ..store.errors import ConfigError
from . import plan as plans
from .config import resolved
from .executors import Executor, executor_of
from .executors.local import Local
from .expectation import Expectation
from .plan import Plan
from .source import File, Source, Table


@dataclass(frozen=True)
class PipelineSpec:
    """Source, operators and sink of a pipeline, with its settings."""

    name: str
    source: Source
    operators: Sequence[Operator | Spec] = ()
    sink: Table | File | None = None
    executor: Executor | str | Mapping[str, Any] = field(default_factory=Local)
    """Where its parts are treated: `local`, `ray`, or one of them with settings."""
    max_failed: float = 0.05
    """Share of an operator's rows on which it may raise; one row may, unless the share is 0."""
    on_empty: Literal["warn", "error"] = "warn"
    """What a filter that drops all rows means: to the next run with other rows it may not, so that
    by default the report warns, and jobs that run after this one go on."""
    expect: Mapping[str, Sequence[Expectation]] = field(default_factory=dict)
    """What must be true of the rows of the `source`, and of those that would go to the `sink`.

    All rows of the source are checked, those that an incremental run skips too. A failure of
    severity error stops the run before anything is written."""

    def __post_init__(self) -> None:
        """Check the settings; raises ConfigError."""
        executor_of(self.executor)
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"`max_failed` is a share between 0 and 1, got {self.max_failed!r}; 0 stops at the "
                "first row that fails, 1 never"
            )
        if self.on_empty not in ("warn", "error"):
            raise ConfigError(f"`on_empty` is `warn` or `error`, got {self.on_empty!r}")

    def plan(self) -> Plan:
        """Check everything that can be checked before any work, and return what will be done."""
        made = resolved(self.operators)
        return plans.make(self.name, self.source, made, self.sink, expect=self.expect)
