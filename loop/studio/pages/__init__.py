"""The pages, one file each: importing this package declares them all."""

from . import (  # noqa: F401 - each adds itself
    audits,
    health,
    lineage,
    new_run,
    pipelines,
    rollout,
    rollouts,
    run,
    runs,
    snapshots,
    sql,
    tasks,
)
