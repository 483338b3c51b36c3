"""The pages, one file each: importing this package declares them all."""

from . import (  # noqa: F401 - each adds itself
    audits,
    curriculum,
    health,
    label,
    lineage,
    new_run,
    pipelines,
    rewards,
    rollout,
    rollouts,
    run,
    runs,
    snapshots,
    sql,
    tasks,
)
