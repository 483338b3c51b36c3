"""Finding the weights that a run published, and loading them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store import Store
from ...store.change_feed import ChangeFeed
from ...store.errors import NotFoundError
from ..models.weights import PublishedWeights, file_of
from ..runs.job import Job, Watch
from .memory import WeightCache

if TYPE_CHECKING:
    from collections.abc import Sequence


class WeightSubscriber:
    """Finds the published versions of a run that count, reading only new rows of `policies`."""

    def __init__(self, job: Job, watch: Watch, *, shelf: WeightCache | None = None) -> None:
        """Follow a run; `shelf` is that of a trainer in this process."""
        self._job, self._watch, self._shelf = job, watch, shelf
        columns = ["attempt", "policy_version", "path", "digest", "transport"]
        self._tail = ChangeFeed(columns, run_id=job.run_id)
        self._rows: dict[int, list[dict[str, Any]]] = {}

    def find(self, version: int) -> PublishedWeights | None:
        """Return a version, or None while no attempt that counts has published it."""
        self._refresh()
        return self._counting(version)

    def latest(self) -> PublishedWeights | None:
        """Return the newest version that counts, or None before there is one."""
        self._refresh()
        found = (self._counting(version) for version in sorted(self._rows, reverse=True))
        return next((one for one in found if one is not None), None)

    @property
    def newest(self) -> int | None:
        """The newest version seen so far."""
        return max(self._rows, default=None)

    def _refresh(self) -> None:
        dataset = self._job.store.dataset("policies")
        if self._tail.moved(dataset):
            rows = self._tail.read(dataset).to_pylist()
            if self._tail.restarted:
                self._rows.clear()
            for row in rows:
                self._rows.setdefault(row["policy_version"], []).append(row)

    def _counting(self, version: int) -> PublishedWeights | None:
        for row in reversed(self._rows.get(version, [])):
            if self._watch.counts(row["attempt"], version):
                return self._published(row)
        return None

    def _published(self, row: Mapping[str, Any]) -> PublishedWeights:
        version, digest = row["policy_version"], row["digest"]
        return PublishedWeights(
            version,
            self._job.folder / row["path"],
            digest,
            address=address_of(row["transport"]),
            state=self._shelf.get(version, digest) if self._shelf else None,
        )


def address_of(transport: str | None) -> str | None:
    """Return where a version is sent from, as its row says it; None when it is not sent.

    >>> address_of("broadcast from 10.0.0.1:4711")
    '10.0.0.1:4711'
    """
    sent = (transport or "").partition("broadcast from ")[2]
    return sent or None


def published(store: Store, folder: Path, run_id: str) -> dict[int, PublishedWeights]:
    """Return the versions of a run that count, by version."""
    rows: Sequence[tuple[int, str, str, str | None]] = store.sql(
        "SELECT policy_version, path, digest, transport FROM policies_current "
        f"WHERE run_id = '{run_id}'"
    ).fetchall()
    return {
        version: PublishedWeights(version, folder / path, digest, address=address_of(transport))
        for version, path, digest, transport in rows
    }


def newest(store: Store, folder: Path, run_id: str) -> PublishedWeights:
    """Return the newest version of a run, of those that lie in a folder if any does.

    Raises NotFoundError when it has none.
    """
    found = published(store, folder, run_id)
    if not found:
        raise NotFoundError(f"run `{run_id}` has published no weights; train it first")
    written = [version for version, one in found.items() if one.file.is_file()]
    return found[max(written or found)]


def started_from(job: Job, folder: Path) -> Path:
    """Return the folder that an engine can start from: this one, or when it was never written,
    that of the newest version which was.
    """
    if file_of(folder).is_file():
        return folder
    return newest(job.store, job.folder, job.run_id).folder
