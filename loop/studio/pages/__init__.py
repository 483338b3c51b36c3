"""The pages, one file each: importing this package declares them all."""

from . import audits, health, lineage, rollout, rollouts, run, runs, snapshots, sql, tasks  # noqa: F401 - each adds itself
