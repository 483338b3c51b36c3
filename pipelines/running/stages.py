"""Stages: operators that can treat rows part by part, between those that see all rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...operators import Operator


@dataclass(frozen=True)
class Stage:
    """Operators that run on each part of the rows, or one operator that sees them all."""

    operators: tuple[Operator, ...] = ()
    first: int = 0
    """Place of the first operator in the pipeline."""

    @property
    def sees_all(self) -> bool:
        """Whether all rows must be there before it can begin."""
        return any(op.scope == "all" for op in self.operators)

    @property
    def by_group(self) -> bool:
        """Whether a part must hold whole groups."""
        return any(op.scope == "group" for op in self.operators)

    @property
    def makes_rows(self) -> bool:
        """Whether rows are added to those that come in."""
        return any(op.kind == "augment" for op in self.operators)


def stages(operators: Sequence[Operator]) -> tuple[Stage, ...]:
    """Cut a pipeline's operators into stages; the last one gives its rows to the sink.

    A new one begins too where an operator that sees groups follows one that may change them.
    """
    made: list[Stage] = []
    run: list[Operator] = []
    for place, op in enumerate(operators):
        regrouped = any(o.kind == "augment" or "group_id" in o.writes for o in run)
        if run and (op.scope == "all" or (op.scope == "group" and regrouped)):
            made.append(Stage(tuple(run), place - len(run)))
            run = []
        if op.scope == "all":
            made.append(Stage((op,), place))
        else:
            run.append(op)
    if run or not made or made[-1].sees_all:
        made.append(Stage(tuple(run), len(operators) - len(run)))
    return tuple(made)
