"""The pages, one file each: importing this package declares them all."""

from . import audits, lineage, rollout, rollouts, run, runs, snapshots, sql  # noqa: F401 - each adds itself
