"""The section `expect`: what must be true of a run's tasks and rows."""

from ...pipelines.expectation import Expectation
from .base import Section


class ExpectConfig(Section):
    """What must be true of the rows that a run reads; `rlake check FILE` checks stored ones."""

    tasks: tuple[Expectation, ...] = ()
    """Expectations of the tasks of `tasks.where`, checked before the run starts."""
    experiences: tuple[Expectation, ...] = ()
    """Expectations of the rows of each step, checked before they are trained on.

    A failure of severity error stops the run; `--resume` repeats the step, of which no record is
    left."""

    def __bool__(self) -> bool:
        return bool(self.tasks or self.experiences)
