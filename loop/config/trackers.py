"""Which experiment trackers are told the numbers of a run, beside the table `metrics`."""

from typing import Annotated, Any

from pydantic import AfterValidator

TrackerSpec = str | dict[str, dict[str, Any] | None]
"""A monitor: `name`, or `{name: {parameter: value}}`; a class of one's own as `module:Class`."""


def _each_one(specs: tuple[TrackerSpec, ...]) -> tuple[TrackerSpec, ...]:
    for spec in specs:
        if not isinstance(spec, str) and len(spec) != 1:
            raise ValueError(
                f"each entry is one monitor, got {', '.join(spec) or 'none'}; write a list, as "
                "`[tensorboard, {wandb: {mode: offline}}]`"
            )
    return specs


TrackerSpecs = Annotated[tuple[TrackerSpec, ...], AfterValidator(_each_one)]
"""Several trackers."""
