"""Deep check: read every file of every table, and compare each row with its digest.

Files of the newest versions are read, and those that only snapshots and branches refer to. In
tables without digests, values must be readable, fit the declared columns, and have unique keys.
Files of indexes are not read.
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import lance
import polars as pl
import pyarrow as pa

from . import branches, snapshots
from .blobs import AS_BYTES
from .doctor import Finding, lost
from .errors import FAILURES, RlakeError, SchemaError, StoreError, counted, reason
from .row_digests import whole_rows
from .schema import TABLES, Table
from .store import Store
from .validate import check

_ROWS_AT_ONCE = 1024
_SHOWN = 3


def examine(store: Store) -> list[Finding]:
    """Read everything and return the findings; nothing is changed."""
    named = [*snapshots.current(store).values()]
    on_branches = [store.on_branch(name) for name in branches.current(store)]
    tables = [_Table(store, table, named, on_branches) for table in TABLES.values()]
    return [finding for table in tables for finding in table.findings()]


class _Table:
    def __init__(
        self,
        store: Store,
        table: Table,
        named: Sequence[snapshots.Snapshot],
        on_branches: Sequence[Store],
    ) -> None:
        self._store, self._declared, self._name = store, table, table.name
        self._named, self._on_branches = named, on_branches
        self._seen: set[tuple[object, ...]] = set()
        self._rows = self._files = self._undigested = 0

    def findings(self) -> Iterator[Finding]:
        for dataset in self._versions():
            for fragment in dataset.get_fragments():
                files = (*(file.path for file in fragment.data_files()), fragment.num_deletions)
                # versions and branches share files: each is read once
                if files not in self._seen:
                    self._seen.add(files)
                    yield from self._fragment(dataset, fragment)
        yield from self._twice()
        if self._undigested:
            yield Finding(
                "note",
                f"`{self._name}`: {counted(self._undigested, 'row')} came before rows had digests: "
                "they can be read, and whether they changed is not known",
                "`rlake verify` compares those that were trained on",
            )
        if self._rows:
            message = f"{counted(self._rows, 'row')} in {counted(self._files, 'file')} read whole"
            yield Finding("ok", f"`{self._name}`: {message}")

    def _versions(self) -> Iterator[lance.LanceDataset]:
        """Yield the newest version, and those of snapshots and branches."""
        yield from self._opened(self._store, None)
        for snapshot in self._named:
            yield from self._opened(self._store, snapshot.versions[self._name])
        for branch in self._on_branches:
            yield from self._opened(branch, None)

    def _opened(self, store: Store, version: int | None) -> Iterator[lance.LanceDataset]:
        try:
            yield store.open_at(self._name, version)
        except StoreError:
            return  # `diagnose` reports tables that do not open

    def _fragment(
        self, dataset: lance.LanceDataset, fragment: lance.LanceFragment
    ) -> Iterator[Finding]:
        where = ", ".join(f"`{file.path}`" for file in fragment.data_files())
        names = [n for n in self._declared.names if n in dataset.schema.names]
        changed: list[str] = []
        try:
            for batch in self._batches(dataset, fragment, names):
                batch.validate(full=True)
                changed += self._changed(pa.Table.from_batches([batch]))
                self._rows += batch.num_rows
        except SchemaError as error:
            yield self._wrong(f"what {where} holds was not appended so: {error}")
        except (*FAILURES, pa.ArrowException) as error:
            columns = ", ".join(f"`{name}`" for name in self._unreadable(dataset, fragment, names))
            yield self._wrong(f"{columns or 'rows'} in {where} cannot be read: {reason(error)}")
        else:
            self._files += 1
        if changed:
            shown = ", ".join(f"`{i}`" for i in changed[:_SHOWN])
            rows = f"{counted(len(changed), 'row')} in {where}"
            yield self._wrong(f"{rows} are not what was appended, such as {shown}")

    def _batches(
        self, dataset: lance.LanceDataset, fragment: lance.LanceFragment, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        if not self._declared.is_content_addressed:
            return fragment.to_batches(columns=[*names], batch_size=_ROWS_AT_ONCE)
        # `to_batches` of a fragment only names blobs
        return dataset.scanner(columns=[*names], fragments=[fragment], **AS_BYTES).to_batches()

    def _unreadable(
        self, dataset: lance.LanceDataset, fragment: lance.LanceFragment, names: Sequence[str]
    ) -> Iterator[str]:
        """Yield the columns that cannot be read on their own."""
        for name in names:
            try:
                for batch in self._batches(dataset, fragment, [name]):
                    batch.validate(full=True)
            except (*FAILURES, pa.ArrowException):
                yield name

    def _changed(self, rows: pa.Table) -> list[str]:
        """Return the ids of rows whose digest differs; raise SchemaError for invalid rows."""
        declared = self._declared
        if not declared.is_digested or "digest" not in rows.column_names:
            check(declared, rows)
            self._undigested += rows.num_rows if declared.is_digested else 0
            return _other_content(rows) if declared.is_content_addressed else []
        stored = rows.column("digest").to_pylist()
        digests = whole_rows(rows.drop_columns(["digest"]))
        keys = zip(*(rows.column(name).to_pylist() for name in declared.key), strict=True)
        self._undigested += stored.count(None)
        pairs = zip(keys, digests, stored, strict=True)
        return [" ".join(map(str, k)) for k, new, old in pairs if old not in (None, new)]

    def _twice(self) -> Iterator[Finding]:
        """Find duplicate keys: a program other than rlake wrote them."""
        try:
            keys = self._store.open_at(self._name).to_table(columns=[*self._declared.key])
        except (RlakeError, *FAILURES):
            return  # already reported as unreadable
        frame = pl.DataFrame(pl.from_arrow(keys))
        twice = frame.group_by(frame.columns, maintain_order=True).len().filter(pl.col("len") > 1)
        if twice.height:
            shown = ", ".join(f"`{value}`" for value in twice.row(0)[:-1])
            yield self._wrong(
                f"{counted(twice.height, 'key')} are there more than once, such as {shown}: rlake "
                "did not append them",
                f"remove those that are not meant with `lance.dataset('{self._name}.lance')"
                ".delete(...)`, or go back with `rlake snapshot restore NAME`",
            )

    def _wrong(self, what: str, way_out: str = "") -> Finding:
        return Finding("error", f"`{self._name}`: {what}", way_out or lost(self._store))


def _other_content(rows: pa.Table) -> list[str]:
    """Return the ids of images whose bytes have another hash than their id."""
    ids, files = (rows.column(name).to_pylist() for name in ("media_id", "data"))
    return [i for i, data in zip(ids, files, strict=True) if sha256(data).hexdigest() != i]
