"""The store: versioned tables to append to, scan, query, and read at past versions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from . import branches, maintenance, snapshots, user_tables
from .append import WritableTables
from .errors import NotFoundError, QueryError
from .group_commit import Committer
from .schema import TABLES, table

if TYPE_CHECKING:  # they load Polars, a tenth of a second, and a query needs none of them
    import polars as pl

    from .diff import Differences
    from .lineage.experience import ExperienceLineage
    from .merge_branch import Merged
    from .side_columns import SideColumn


class Store(WritableTables):
    """Versioned tables in one place. Opened by `connect`; `at` returns a past state of it."""

    # reading

    def scan(self, name: str, *, with_columns: Sequence["str | SideColumn"] = ()) -> "pl.LazyFrame":
        """Return a table as a Polars LazyFrame; filters and columns are pushed down to the files.

        >>> store.scan("tasks").select("prompt_text", "answer").collect().rows()
        [('2+2=', '4')]

        `experiences` may be read with side columns, such as `score:strict@2` or
        `reward=score:strict@2`; see `side_columns.parse`. Raises QueryError for an invalid one, and
        NotFoundError for one without stored values.
        """
        from . import side_columns

        frame = super().scan(name)
        columns = side_columns.parse_all(with_columns)
        if not columns:
            return frame
        if name != "experiences":
            raise QueryError(f"side columns are of `experiences`, and `{name}` has none")
        side_columns.check(self, columns)
        return side_columns.join(self, frame, columns)

    # finding

    def search(self, text: str, *, k: int = 10, where: str | None = None) -> "pl.DataFrame":
        """Return the k experiences whose responses best match the words of a text (BM25).

        >>> store.search("carry the one").columns[:2]
        ['experience_id', 'score']

        `where` is an SQL condition on experiences. Raises QueryError for an empty text.
        """
        from . import search

        return search.search(self, text, k=k, where=where)

    def similar(
        self,
        experience_id: str,
        *,
        k: int = 10,
        embedder: str | None = None,
        where: str | None = None,
    ) -> "pl.DataFrame":
        """Return the k experiences most similar to a stored one, by the cosine of their embeddings.

        `embedder` may be omitted when there is only one. Raises NotFoundError when the experience
        is not stored or has no embedding (`rlake embed` computes them).
        """
        from . import search

        return search.similar(self, experience_id, k=k, embedder=embedder, where=where)

    # time

    def at(self, when: str | Mapping[str, int]) -> Self:
        """Return a past state of the store, read only: at a snapshot, or at versions by table.

        >>> store.snapshot("before")
        >>> _ = store.append("tasks", [Task.ask("3+3=", "6")])
        >>> store.at("before").count("tasks"), store.count("tasks")
        (1, 2)
        """
        when = snapshots.find(self, when).versions if isinstance(when, str) else when
        versions = when if TABLES.keys() <= when.keys() else {**self.versions(), **when}
        of_user = user_tables.names(self.folder)
        for name, version in when.items():
            if name in of_user:
                newest = user_tables.open_at(self.root, name).version
            else:
                newest = self.newest_version(table(name).name)
            if not 1 <= version <= newest:
                raise NotFoundError(f"table `{name}` has no version {version}, newest is {newest}")
        return type(self)(
            self.root, storage_options=self._options, versions=versions, branch=self.branch_name
        )

    def snapshot(self, name: str, *, note: str | None = None) -> None:
        """Name the current state of the store; tags protect its versions from clean-up."""
        snapshots.create(self, name, note=note)

    def restore(self, name: str, *, force: bool = False) -> snapshots.Restored:
        """Restore all tables to a snapshot, as new versions; history stays.

        >>> store.snapshot("one-task")
        >>> _ = store.append("tasks", [Task.ask("5+5=", "10")])
        >>> done = store.restore("one-task")
        >>> store.count("tasks"), store.at(done.undo).count("tasks")
        (1, 2)

        A snapshot named `undo` in the result is taken first. Raises QueryError while a job is
        running, unless `force` says that it was killed.
        """
        return snapshots.restore(self, name, force=force)

    def diff(self, first: str, second: str = snapshots.NOW) -> "Differences":
        """Count the rows that were added and removed between two snapshots, or one and now.

        >>> store.snapshot("start")
        >>> _ = store.append("tasks", [Task.ask("6+6=", "12")])
        >>> [(table.table, table.added) for table in store.diff("start").tables]
        [('tasks', 1), ('snapshots', 1)]

        Raises NotFoundError for a snapshot that does not exist.
        """
        from .diff import diff

        return diff(*(self if name == snapshots.NOW else self.at(name) for name in (first, second)))

    def branch(self, name: str, *, at: str | None = None) -> Self:
        """Create a branch from the current state or a snapshot, and return it.

        It takes almost no space and shares all existing rows; `connect("PLACE@NAME")` opens it.
        Rows appended to one are not visible in the other.

        >>> trial = store.branch("trial")
        >>> _ = trial.append("tasks", [Task.ask("4+4=", "8")])
        >>> trial.count("tasks") - store.count("tasks")
        1

        Raises QueryError for a name that is taken or invalid.
        """
        return branches.create(
            self, name, versions=lambda: (self.at(at) if at else self).versions()
        )

    def merge_branch(self, name: str) -> "dict[str, Merged]":
        """Append a branch's derived results (scores, labels, values, pairs) to the store.

        >>> trial = store.branch("judged")
        >>> store.merge_branch("judged")["scores"].rows
        0

        Results about the branch's own experiences stay there, and merging again adds nothing.
        Raises QueryError if the branch did not leave from this store.
        """
        from .merge_branch import merge

        return merge(self, name)

    def drop_branch(self, name: str, *, force: bool = False) -> None:
        """Delete a branch with its rows, and its runs' checkpoints and weights.

        Raises QueryError while other branches left from it or, without `force`, while a run on it
        is not finished.
        """
        branches.drop(self, name, force=force)

    def lineage(self, experience_id: str) -> "ExperienceLineage":
        """Return where an experience came from, and the steps and policies that it influenced.

        `rlake.Run(store, name).lineage(version)` traces a policy. Raises NotFoundError, with the
        nearest ID, if the experience is not stored.
        """
        from .lineage.experience import of_experience

        return of_experience(self, experience_id)

    # writing, care

    def committer(self, **limits: Any) -> Committer:
        """Return a `Committer`, which commits for many threads at once, with these limits."""
        return Committer(self, **limits)

    def maintain(
        self,
        *,
        only_due: bool = False,
        dry_run: bool = False,
        grace: float = maintenance.GRACE_SECONDS,
    ) -> maintenance.Report:
        """Maintain the store while others use it, and return what changed.

        Rows that retention rules select are deleted, small files merged, indexes created and
        updated, and old versions removed, except those that a snapshot or a branch needs and those
        that were the newest in the last `grace` seconds, which a reader may hold. Files of killed
        writers are removed after a day. A `dry_run` only reports. With `only_due`, as the trainer
        calls it, rules are not applied and tables in good order are skipped.

        While another process maintains the store, nothing is done; the report names it.
        """
        return maintenance.maintain(self, only_due=only_due, dry_run=dry_run, grace=grace)
