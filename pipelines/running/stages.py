"""Stages: consecutive operators that work on partitions, and operators that need all rows."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...operators import Operator


@dataclass(frozen=True)
class Stage:
    """Operators that run on each partition, or one operator that needs all rows."""

    operators: tuple[Operator, ...] = ()
    first: int = 0
    """Index of the first operator in the pipeline."""

    @property
    def sees_all(self) -> bool:
        """Whether it needs all rows before it can begin."""
        return any(op.scope == "all" for op in self.operators)

    @property
    def by_group(self) -> bool:
        """Whether partitions must hold whole groups."""
        return any(op.scope == "group" for op in self.operators)

    @property
    def makes_rows(self) -> bool:
        """Whether it adds rows."""
        return any(op.kind == "augment" for op in self.operators)


def stages(operators: Sequence[Operator]) -> tuple[Stage, ...]:
    """Split a pipeline's operators into stages; the last one writes to the sink.

    A stage also ends before an operator that needs groups, if an earlier one may change groups: the
    partitions hold whole groups of the rows that came in, not of those that came out.
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
    # The last stage works on partitions, since it writes them to the sink one by one.
    if run or not made or made[-1].sees_all:
        made.append(Stage(tuple(run), len(operators) - len(run)))
    return tuple(made)
