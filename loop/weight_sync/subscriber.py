"""Find the weights that a run published."""

from pathlib import Path
from typing import Any

from ...store import Store
from ...store.changes import ChangeFeed
from ...store.errors import ConfigError, NotFoundError, nearest
from ..models.weights import PublishedWeights, Weights, file_of
from ..runs.job import Job, Watch
from .memory import WeightCache


class WeightSubscriber:
    """Finds the current versions of a run, reading only new rows of `policies`."""

    def __init__(self, job: Job, watch: Watch, *, cache: WeightCache | None = None) -> None:
        """Follow a run; `cache` is that of a trainer in this process."""
        self._job, self._watch, self._cache = job, watch, cache
        columns = ["attempt", "policy_version", "path", "digest", "address"]
        self._tail = ChangeFeed(columns, run_id=job.run_id)
        self._rows: dict[int, list[dict[str, Any]]] = {}
        self._lost: set[tuple[int, str | None]] = set()

    def find(self, version: int) -> PublishedWeights | None:
        """Return a version, or None while no current attempt has published it."""
        self._refresh()
        return self._current(version)

    def latest(self) -> PublishedWeights | None:
        """Return the newest current version, or None."""
        self._refresh()
        found = (self._current(version) for version in sorted(self._rows, reverse=True))
        return next((one for one in found if one is not None), None)

    def lose(self, weights: Weights) -> None:
        """Leave out a version whose sender is gone, until a later attempt publishes it again."""
        self._lost.add((weights.version, weights.address))

    @property
    def newest(self) -> int | None:
        """The newest version seen so far."""
        return max(self._rows, default=None)

    def _refresh(self) -> None:
        dataset = self._job.store.dataset("policies")
        if self._tail.moved(dataset):
            rows = self._tail.read(dataset).to_pylist()
            if self._tail.restarted:  # rows were removed, so versions may no longer exist
                self._rows.clear()
            for row in rows:
                self._rows.setdefault(row["policy_version"], []).append(row)

    def _current(self, version: int) -> PublishedWeights | None:
        # Newest first: a resumed run publishes the versions after its checkpoint again.
        for row in reversed(self._rows.get(version, [])):
            is_lost = (version, row["address"]) in self._lost
            if not is_lost and self._watch.counts(row["attempt"], version):
                return PublishedWeights(
                    version=version,
                    folder=self._job.folder / row["path"],
                    digest=row["digest"],
                    address=row["address"],
                    state=self._cache.get(version, row["digest"]) if self._cache else None,
                )
        return None


def published(store: Store, folder: Path, run_id: str) -> dict[int, PublishedWeights]:
    """Return the current weights of a run by version."""
    rows = store.sql(
        "SELECT policy_version, path, digest, address FROM policies_current "
        f"WHERE run_id = '{run_id}'"
    ).fetchall()
    return {
        version: PublishedWeights(
            version=version, folder=folder / path, digest=digest, address=address
        )
        for version, path, digest, address in rows
    }


def find_version(store: Store, folder: Path, run_id: str, version: int | None) -> PublishedWeights:
    """Return a version of a run; None: the newest.

    Raises NotFoundError if the run has published nothing, ConfigError for an unknown version.
    """
    found = published(store, folder, run_id)
    if not found:
        known = [r for (r,) in store.sql("SELECT DISTINCT run_id FROM policies").fetchall()]
        way_out = nearest(run_id, known) or "; train it first"
        raise NotFoundError(f"run `{run_id}` has published no weights{way_out}")
    if version is None:
        return found[max(found)]
    if version not in found:
        raise ConfigError(
            f"run `{run_id}` has no weights of version {version}; there are {sorted(found)}"
        )
    return found[version]


def newest(store: Store, folder: Path, run_id: str) -> PublishedWeights:
    """Return the newest version with a folder, or else the newest version.

    Raises NotFoundError if the run has published nothing.
    """
    found = published(store, folder, run_id)
    written = [version for version, one in found.items() if one.file.is_file()]
    return found[max(written)] if written else find_version(store, folder, run_id, None)


def started_from(job: Job, folder: Path) -> Path:
    """Return the folder if it was written, or else that of the newest version with one."""
    if file_of(folder).is_file():
        return folder
    return newest(job.store, job.folder, job.run_id).folder
