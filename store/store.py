"""The store: versioned tables to append to, scan, query, and look at as they were."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import polars as pl

from . import branches, maintenance, search, side_columns, snapshots, user_tables
from .append import WritableTables
from .errors import NotFoundError, QueryError
from .group_commit import Committer


class Store(WritableTables):
    """Versioned tables in one place. Made by `connect`; `at` gives the same store as it was."""

    # reading

    def scan(
        self, name: str, *, with_columns: Sequence[str | side_columns.SideColumn] = ()
    ) -> pl.LazyFrame:
        """Return a table as a Polars LazyFrame; filters and columns are pushed down to the files.

        >>> store.scan("tasks").select("prompt_text", "answer").collect().rows()
        [('2+2=', '4')]

        `experiences` may be read with side columns, such as `score:strict@2` or
        `reward=score:strict@2`; `side.parse` says how they are written. Raises QueryError for one
        that is not valid, and NotFoundError for one of which nothing is stored.
        """
        frame = super().scan(name)
        columns = side_columns.parse_all(with_columns)
        if not columns:
            return frame
        if name != "experiences":
            raise QueryError(f"side columns are of `experiences`, and `{name}` has none")
        side_columns.check(self, columns)
        return side_columns.join(self, frame, columns)

    # finding

    def search(self, text: str, *, k: int = 10, where: str | None = None) -> pl.DataFrame:
        """Return the k experiences whose responses match the words of a text best (BM25).

        >>> store.search("carry the one").columns[:2]
        ['experience_id', 'score']

        `where` is an SQL condition on experiences. Raises QueryError for an empty text.
        """
        return search.search(self, text, k=k, where=where)

    def similar(
        self,
        experience_id: str,
        *,
        k: int = 10,
        embedder: str | None = None,
        where: str | None = None,
    ) -> pl.DataFrame:
        """Return the k experiences most like a stored one, by the cosine of their embeddings.

        `embedder` may be left out when there is one only. Raises NotFoundError when the experience
        is not stored, or has no embedding (`rlake embed` makes them).
        """
        return search.similar(self, experience_id, k=k, embedder=embedder, where=where)

    # time

    def at(self, when: str | Mapping[str, int]) -> Self:
        """Return the store as it was, read only: at a snapshot's name, or at versions by table.

        >>> store.snapshot("before")
        >>> _ = store.append("tasks", [Task.ask("3+3=", "6")])
        >>> store.at("before").count("tasks"), store.count("tasks")
        (1, 2)
        """
        when = snapshots.find(self, when).versions if isinstance(when, str) else when
        versions = {**self.versions(), **when}
        of_user = user_tables.names(self.folder)
        for name, version in when.items():
            newest = user_tables.open_at(self.root, name) if name in of_user else self.dataset(name)
            if not 1 <= version <= newest.latest_version:
                raise NotFoundError(
                    f"table `{name}` has no version {version}, newest is {newest.version}"
                )
        return type(self)(
            self.root,
            storage_options=self._options,
            versions=versions,
            branch=self.branch_name,
        )

    def snapshot(self, name: str, *, note: str | None = None) -> None:
        """Name the store as it is now, once; tags keep its versions from clean-up."""
        snapshots.create(self, name, note=note)

    def branch(self, name: str, *, at: str | None = None) -> Self:
        """Let a branch leave from the store as it is, or was at a snapshot, and return it.

        It costs almost no bytes, shares all rows that there are, and `connect("PLACE@NAME")` opens
        it. What is appended to one is not seen by the other.

        >>> trial = store.branch("trial")
        >>> _ = trial.append("tasks", [Task.ask("4+4=", "8")])
        >>> trial.count("tasks") - store.count("tasks")
        1

        Raises QueryError for a name that is taken or not plain.
        """
        return branches.create(
            self, name, versions=lambda: (self.at(at) if at else self).versions()
        )

    # writing, care

    def committer(self, **limits: Any) -> Committer:
        """Return what commits for many threads at once; `Committer` says which limits it has."""
        return Committer(self._appender, **limits)

    def maintain(
        self,
        *,
        only_due: bool = False,
        dry_run: bool = False,
        grace: float = maintenance.GRACE_SECONDS,
    ) -> maintenance.Report:
        """Do what a store needs now and then, and tell what it changed, beside readers and writers.

        Rows are deleted for which a retention rule holds, small files merged, indexes made and
        kept up, and old versions removed: but for those that a snapshot or a branch needs, and
        those that were the newest one in the last `grace` seconds, which a reader may hold. Files
        that killed writers left behind go after a day. A `dry_run` only tells. With `only_due`, as
        the trainer calls it, rules are left out, and tables that are in order.

        While another process maintains the store, nothing is done; the report says who.
        """
        return maintenance.maintain(self, only_due=only_due, dry_run=dry_run, grace=grace)
