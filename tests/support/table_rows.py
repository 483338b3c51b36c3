"""Rows of the tables that a run writes: `from support.table_rows import draw, event, policy`."""

from typing import Any


def event(status: str = "running", *, run_id: str = "r", **columns: Any) -> dict[str, Any]:
    """A row of `job_events`, of the first attempt of a trainer unless columns say otherwise."""
    row = {"run_id": run_id, "attempt": 1, "job": "train", "name": run_id, "config": "{}",
           "code_version": "0", "status": status, "start_step": 1}  # fmt: skip
    return row | columns


def draw(experience_id: str, step: int = 1, **columns: Any) -> dict[str, Any]:
    """A row of `draws`, of the first attempt of run `r` unless columns say otherwise."""
    row = {"run_id": "r", "attempt": 1, "step": step, "position": 0, "epoch": 1, "lag": 0,
           "experience_id": experience_id, "weight": 1.0, "sampler": "fifo",
           "digest": "d"}  # fmt: skip
    return row | columns


def policy(attempt: int, version: int, **columns: Any) -> dict[str, Any]:
    """A row of `policies`, of run `r` unless columns say otherwise."""
    row = {"run_id": "r", "attempt": attempt, "policy_version": version, "step": version,
           "path": f"a{attempt}/v{version}", "digest": f"w{attempt}.{version}"}  # fmt: skip
    return row | columns
