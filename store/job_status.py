"""How the jobs of runs stand, as far as the store can tell."""

from .tables import Tables


def unfinished(store: Tables, *, running: bool = False) -> list[tuple[str, str]]:
    """Return (run, job) of the jobs that are not done; with `running`, not those that failed.

    A job that was killed could not say so: it counts as running.
    """
    status = "status = 'running'" if running else "status <> 'done'"
    return store.sql(f"SELECT run_id, job FROM runs WHERE {status} ORDER BY run_id, job").fetchall()
