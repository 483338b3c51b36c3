"""The jobs of a run: locks, attempts, and their rows in `job_events`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

from filelock import FileLock, Timeout

from ...store import Store, interrupts
from ...store.changes import CREATED, ChangeFeed
from ...store.errors import ConfigError, JobError
from ...store.query import literal
from ...store.records import now
from ...store.snapshots import current
from ...store.tables import unfinished
from ..config import RunConfig


@dataclass(frozen=True)
class Job:
    """One attempt of one job of a run."""

    store: Store
    config: RunConfig
    name: str
    """explore, train or evaluate."""
    attempt: int
    folder: Path
    """Where the run keeps checkpoints and weights."""
    title: str | None = None
    """The job's name in `runs`; None: the run's name."""
    functions: Mapping[str, str] = field(default_factory=dict)
    """Names of the functions that the job runs, with the digests of their sources."""
    started_at: datetime = field(default_factory=now)
    since: int | None = None
    """Version of `job_events` when the attempt began: clocks of nodes differ, and versions do not.

    None: when its `Watch` begins."""

    @property
    def run_id(self) -> str:
        """The run's id: its name."""
        return self.config.name

    def step_id(self, step: int) -> str:
        """Return the ID of a step of this attempt, for rows of other tables that belong to it."""
        return f"{self.run_id}/{self.attempt:03d}/{step:06d}"


def run_folder(store: Store, config: RunConfig) -> Path:
    """Return the folder of a run's checkpoints and weights."""
    if config.output is not None:
        name = f"{config.name}@{store.branch_name}" if store.branch_name else config.name
        return Path(config.output).expanduser().absolute() / name
    if store.runs_folder is None:
        raise ConfigError(
            "`output` is required because the store is not a local folder; set it to a "
            "directory for checkpoints and weights"
        )
    return store.runs_folder / config.name


def is_live(store: Store, run_id: str, name: str) -> bool | None:
    """Return whether a process runs this job of a run; None if its lock is not on this machine."""
    if store.runs_folder is None or not (lock := _lock(store.runs_folder / run_id, name)).is_file():
        return None
    try:
        with FileLock(lock, timeout=0):
            return False
    except Timeout:
        return True


def all_killed(store: Store) -> bool:
    """Return whether all jobs that are marked as running were killed.

    Raises JobError for one whose process is alive on this machine.
    """
    live = {(run, job): is_live(store, run, job) for run, job in unfinished(store, running=True)}
    for (run, job), lives in live.items():
        if lives:
            raise JobError(f"`{job}` of run `{run}` is running in another process; stop it first")
    return all(lives is False for lives in live.values())


def _lock(folder: Path, name: str) -> Path:
    return folder / f".{name}.lock"


@contextmanager
def job(
    store: Store,
    config: RunConfig,
    name: str,
    *,
    resume: bool,
    title: str | None = None,
    functions: Mapping[str, str] | None = None,
) -> Iterator[Job]:
    """Hold the lock of a job of the run, so that no other process runs the same job.

    `functions` are the digests of the functions that it runs, for its record. Raises ConfigError if
    the job was started before and `resume` is false, or if the stored configuration differs;
    JobError if another process runs the job.
    """
    folder = run_folder(store, config)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock(folder, name), timeout=0)
    try:
        with lock:
            since = store.dataset("job_events").version
            attempt = _next_attempt(store, config, name, resume=resume)
            # Else the new run would set aside the checkpoints of a run of another store.
            if attempt == 1 and name == "train" and (folder / "checkpoints").exists():
                raise ConfigError(
                    f"`{folder}` holds checkpoints of a run `{config.name}` that this store does "
                    "not know; choose another `output`, or move them away"
                )
            yield Job(store, config, name, attempt, folder, title, functions or {}, since=since)
    except Timeout as error:
        raise JobError(f"`{name}` of run `{config.name}` is running in another process") from error


def sibling(job: Job, name: str, *, functions: Mapping[str, str]) -> Job:
    """Return another job of the run that the same process does.

    It takes no lock, because other processes may do that job at the same time.
    """
    attempt = _next_attempt(job.store, job.config, name, resume=True)
    return replace(job, name=name, attempt=attempt, functions=functions)


@contextmanager
def recorded(job: Job, *, start_step: int) -> Iterator[None]:
    """Record in `job_events` that the job runs, and at the end how it ended."""
    _record(job, "running", start_step)
    ended = Lock()  # the main thread and the thread that handles signals may both get here

    def end(status: str, error: str | None = None) -> None:
        if ended.acquire(blocking=False):
            _record(job, status, start_step, error=error, ended=now())

    try:
        with interrupts.last_words(partial(end, "interrupted")):
            yield
    except BaseException as error:
        text = str(error) or type(error).__name__
        end("interrupted" if interrupts.caused(error) else "failed", text[:2000])
        raise
    end("done")


def record_interrupted(store: Store, run_id: str, name: str, *, after: int) -> None:
    """Record that a job was interrupted whose process ended without a word, as one that is placed.

    An attempt that has ended, or is not later than attempt `after`, stays as it is.
    """
    rows = store.sql(
        f"SELECT * FROM job_events WHERE run_id = {literal(run_id)} AND job = {literal(name)} "
        f"AND attempt > {after} ORDER BY attempt DESC, created_at DESC LIMIT 1"
    ).to_arrow_table()
    for row in rows.drop_columns("created_at").to_pylist():
        if row["status"] == "running":
            store.append("job_events", [row | {"status": "interrupted", "ended_at": now()}])


def _record(
    job: Job,
    status: str,
    start_step: int,
    *,
    error: str | None = None,
    ended: datetime | None = None,
) -> None:
    row = {
        "run_id": job.run_id,
        "attempt": job.attempt,
        "job": job.name,
        "name": job.title or job.config.name,
        "config": stored_config(job.config),
        "code_version": version("rlake"),
        "status": status,
        "start_step": start_step,
        "functions": functions_of(job),
        "error": error,
        "started_at": job.started_at,
        "ended_at": ended,
    }
    job.store.append("job_events", [row])


def functions_of(job: Job) -> list[dict[str, str]] | None:
    """Return the digests of the functions that the job runs, as a value of `runs.functions`."""
    return [{"name": name, "value": value} for name, value in job.functions.items()] or None


def stored_config(config: RunConfig) -> str:
    """Return the resolved configuration as JSON text, with the schedule's resolved `max_lag`.

    Models that are another run's weights are stored as `run`, not as the path of their folder, and
    environment variables by their names.
    """
    # Without where the run lies: a store that was moved or copied can still be resumed.
    tree = _without_folders(config.plain(exclude={"store", "output"}))
    tree["schedule"]["max_lag"] = config.schedule.lag
    made = RunConfig.model_validate_json(json.dumps(tree))
    # the name identifies the rows of the run, and so it is stored as it is
    kept = made.plain(exclude={"store", "output"}) | {"name": config.name}
    return json.dumps(kept, ensure_ascii=False)


def _without_folders(tree: dict[str, Any]) -> dict[str, Any]:
    found = {k: _without_folders(v) if isinstance(v, dict) else v for k, v in tree.items()}
    if found.get("run") is not None and {"path", "version", "digest"} <= found.keys():
        found["path"] = None
    return found


def run_names(store: Store) -> set[str]:
    """Return the names of all runs that were started on a store."""
    return {name for (name,) in store.sql("SELECT DISTINCT run_id FROM job_events").fetchall()}


def newest_config(store: Store, run_id: str) -> str | None:
    """Return the configuration of a run's newest attempt as JSON text; None if it never started.

    Evaluations are left out: they may be configured differently from the run that they evaluate.
    """
    rows = store.sql(
        f"SELECT config FROM job_events WHERE run_id = {literal(run_id)} AND job <> 'evaluate' "
        "ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    return rows[0][0] if rows else None


def check_new(store: Store, run_id: str, name: str) -> None:
    """Raise ConfigError if a job of a run was started before, and the run came to something."""
    rows = store.sql(
        f"SELECT status FROM job_events WHERE run_id = {literal(run_id)} AND job = {literal(name)} "
        "ORDER BY created_at DESC LIMIT 1"
    ).fetchall()
    if rows and not came_to_nothing(store, run_id):
        raise _started_before(run_id, name, rows[0][0])


def _started_before(run_id: str, name: str, status: str) -> ConfigError:
    return ConfigError(
        f"run `{run_id}` was started before (its `{name}` is {status}); continue it with "
        "`--resume` (`resume=True` in Python), or name a new run with `--set name=...`"
    )


def _next_attempt(store: Store, config: RunConfig, name: str, *, resume: bool) -> int:
    rows = store.sql(
        f"SELECT job, attempt, config, status FROM job_events WHERE run_id = '{config.name}' "
        "ORDER BY created_at"
    ).fetchall()
    mine = [row for row in rows if row[0] == name]
    made = [row for row in rows if row[0] != "evaluate"]  # an evaluation does not start a run
    if made and name != "evaluate" and not came_to_nothing(store, config.name):
        if mine and not resume:
            raise _started_before(config.name, name, mine[-1][3])
        fixable = _FUNCTIONS if _all_failed(store, config.name) else {}
        same_config(made[-1][2], config, may_change=_MAY_CHANGE | fixable)
    return max((row[1] for row in mine), default=0) + 1


def came_to_nothing(store: Store, run_id: str) -> bool:
    """Return whether a run failed before it stored anything, so that its name is free."""
    mine = f"WHERE run_id = {literal(run_id)}"
    stored = (f"EXISTS (FROM {table} {mine})" for table in ("policies", "experiences", "draws"))
    [(failed,)] = store.sql(
        f"SELECT count(*) > 0 AND bool_and(status = 'failed') AND NOT ({' OR '.join(stored)}) FROM "
        f"(SELECT arg_max(status, created_at) AS status FROM job_events {mine} GROUP BY job)"
    ).fetchall()
    return bool(failed)


_MAY_CHANGE: Any = {
    "trainer": {"steps", "keep_checkpoints", "distributed"},
    "schedule": {"timeout", "weight_transport"},
    **dict.fromkeys(("ray", "evaluate", "serve", "trackers"), True),
}
"""Keys that do not change what a run learns, so that it may continue with other values."""
_FUNCTIONS = {"explorer": {"workflow", "rewards", "operators"}}
"""Keys that may change as long as every rollout of the run failed: nothing was learned yet."""


def _all_failed(store: Store, run_id: str) -> bool:
    [(failed,)] = store.sql(
        "SELECT count(*) > 0 AND count(*) = count(drop_reason) FROM experiences "
        f"WHERE run_id = {literal(run_id)}"
    ).fetchall()
    return failed


def same_config(stored: str, config: RunConfig, *, may_change: Any = _MAY_CHANGE) -> None:
    """Raise ConfigError if a run would continue with settings that change what it learns."""
    # Both are validated: a key that was added since then has its default in the stored one too.
    before, after = (
        RunConfig.model_validate_json(text).model_dump(mode="json", exclude=may_change)
        for text in (stored, stored_config(config))
    )
    key = _first_difference(before, after)
    if key is not None:
        raise ConfigError(
            f"run `{config.name}` was started with another `{key}`; restore it, or name a new run "
            "with `--set name=...`"
        )


def _first_difference(before: object, after: object, path: str = "") -> str | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            found = _first_difference(
                before.get(key), after.get(key), f"{path}.{key}" if path else key
            )
            if found:
                return found
        return None
    return None if before == after else path


def pinned(job: Job, what: str) -> Store:
    """Return the store as of the snapshot `RUN.WHAT`, which is created on the first call.

    A resumed run thereby reads what it read before, whatever was stored since.
    """
    name = f"{job.run_id}.{what}"
    if name not in current(job.store):
        job.store.snapshot(name, note=f"what `{job.name}` of run `{job.run_id}` works on")
    return job.store.at(name)


class OtherJobError(JobError):
    """The other job of the run failed; its own error is the reason."""


class Watch:
    """Follows the status of a run's jobs, reading only new rows."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._since = job.store.dataset("job_events").version if job.since is None else job.since
        columns = ["attempt", "job", "status", "start_step", "error", "ended_at", CREATED]
        self._tail = ChangeFeed(columns, run_id=job.run_id)
        self._rows: list[dict[str, Any]] = []
        self._lock = Lock()

    def _refresh(self) -> list[dict[str, Any]]:
        dataset = self._job.store.dataset("job_events")
        with self._lock:  # several threads of a job may call this
            if self._tail.moved(dataset):
                rows = self._tail.read(dataset).to_pylist()
                self._rows = rows if self._tail.restarted else self._rows + rows
            return self._rows

    def check(self, name: str) -> None:
        """Raise OtherJobError if a job's newest attempt failed since this one started.

        An attempt with the same number counts too: it failed while this one was starting.
        """
        rows = [row for row in self._refresh() if row["job"] == name]
        newest = max(
            rows, key=lambda row: (row["attempt"], row["ended_at"] is not None), default=None
        )
        if newest and newest["status"] in ("failed", "interrupted"):
            since = newest[CREATED] > self._since
            if not since and newest["attempt"] < self._job.attempt:
                return
            raise OtherJobError(f"`{name}` of run `{self._job.run_id}` failed: {newest['error']}")

    def counts(self, attempt: int, step: int) -> bool:
        """Return whether no later attempt of the trainer repeated an attempt's step."""
        return not any(
            row["job"] == "train" and row["attempt"] > attempt and row["start_step"] <= step
            for row in self._refresh()
        )


class WorkerLostError(JobError):
    """A worker died with its groups, which another worker can run."""
