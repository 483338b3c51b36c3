"""Which experiment trackers are told the numbers of a run, beside the table `metrics`."""

from typing import Annotated, Any

from pydantic import AfterValidator

MonitorSpec = str | dict[str, dict[str, Any] | None]
"""A monitor: `name`, or `{name: {parameter: value}}`; a class of one's own as `module:Class`."""


def _each_one(specs: tuple[MonitorSpec, ...]) -> tuple[MonitorSpec, ...]:
    for spec in specs:
        if not isinstance(spec, str) and len(spec) != 1:
            raise ValueError(
                f"each entry is one monitor, got {', '.join(spec) or 'none'}; write a list, as "
                "`[tensorboard, {wandb: {mode: offline}}]`"
            )
    return specs


MonitorSpecs = Annotated[tuple[MonitorSpec, ...], AfterValidator(_each_one)]
"""Several monitors."""
