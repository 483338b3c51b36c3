"""Start the worker pool of a run: in this process, or on Ray."""

from pathlib import Path

from ..rollouts.group import RolloutSpec
from ..rollouts.setup import start_runner
from ..rollouts.workers import WorkerPool
from ..runs.job import Job
from ..weight_sync import started_from


async def start_team(job: Job, how: RolloutSpec, folder: Path) -> WorkerPool:
    """Start the runners of a run, with the model of a folder: one here, or several on Ray."""
    if job.config.ray is not None:
        from .ray.pool import start_fleet

        return await start_fleet(job, how, folder)
    return WorkerPool([start_runner(job.config, how, started_from(job, folder))])
