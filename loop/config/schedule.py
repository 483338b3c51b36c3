"""The section `schedule`: how far exploration may run ahead of training."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ...store.errors import nearest
from .base import Float, Int, Section

PRESETS: dict[str, dict[str, Any]] = {
    "on_policy": {},
    "one_step_off": {"max_ahead": 1},
    "asynchronous": {"max_ahead": 3, "max_lag": 8, "streaming": True},
}
"""Schedules by name: `schedule: asynchronous`."""


class ScheduleConfig(Section):
    """How far explorer and trainer may be apart, in optimizer steps.

    A name selects one of PRESETS; `{preset: asynchronous, max_lag: 4}` changes a part of it.
    """

    preset: str | None = None
    """on_policy, one_step_off or asynchronous: sets the defaults of the other keys."""
    streaming: bool = False
    """Whether groups are drawn as they finish, and weights are replaced during sampling.

    If not, each batch is sampled with the weights due to it and drawn in its order, so that a run
    does not depend on timing.
    """
    max_ahead: Int = Field(default=0, ge=0)
    """Most train batches that the explorer is ahead of the trainer; 0 is on-policy."""
    max_lag: Int | None = Field(default=None, ge=0)
    """Largest lag of rows that are trained on; None: max_ahead + publish_every - 1."""
    publish_every: Int = Field(default=1, ge=1)
    """Optimizer steps between two publications of weights."""
    weight_transport: Literal["store", "memory", "broadcast"] = "store"
    """How weights reach explorers: as folders (store), within the process (memory), or by
    torch.distributed (broadcast). With the last two, folders are written at checkpoints only."""
    new_units_per_step: Int | None = Field(default=None, ge=1)
    """Units (groups or rows) that the explorer makes for each training step of a replay.

    None: batch_size divided by max_uses, so that each unit can be drawn max_uses times.
    """
    timeout: Float = Field(default=600, gt=0)
    """Seconds that one job waits for the other, which may have to start an engine first."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        given = {"preset": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or given.get("preset") is None:
            return given
        name = given["preset"]
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"schedule `{name}` does not exist{nearest(str(name), PRESETS)}")
        return {**PRESETS[name], **given}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        oldest = self.max_ahead + self.publish_every - 1
        if self.publish_every > self.max_ahead + 1:
            raise ValueError(
                f"publish_every {self.publish_every} is more than max_ahead + 1: the explorer "
                "would wait for weights that are never published"
            )
        if self.max_lag is not None and self.max_lag < oldest:
            raise ValueError(
                f"max_lag {self.max_lag} is less than max_ahead + publish_every - 1 = {oldest}: "
                "rows would be stale before they could be drawn"
            )
        return self

    @property
    def lag(self) -> int:
        """The largest lag of rows that are trained on."""
        return self.max_ahead + self.publish_every - 1 if self.max_lag is None else self.max_lag
