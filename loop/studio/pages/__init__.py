"""The pages, one file each: importing this package declares them all."""

from . import audits, rollout, rollouts, run, runs, sql  # noqa: F401 - each adds itself
