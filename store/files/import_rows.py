"""Read the rows of files, fill them in, and spool them for their tables."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from ..errors import ConfigError, InputError
from ..media import LIMITS, ImageLimits
from ..schema import TABLES, table
from ..store import Store
from ..validate import check
from .defaults import Defaults, ExperienceFill, experience_columns, fill_tasks
from .duckdb_input import InputFile, InputSession
from .formats import fitting, recognized
from .preference_rows import fill_preferences, of_pairs
from .row_images import RowImages
from .row_reader import FileRows, Mapped, Progress, Selected
from .select_columns import select_for, values_of
from .spool import Spool
from .tokenize import Tokenization, Tokenizer

IMPORTABLE = ("tasks", "experiences", "preferences")
"""Tables that files are imported into; the others are written by jobs."""


class Gathering:
    """The state of an import: what was read from its files, and what was left out."""

    def __init__(
        self,
        store: Store,
        name: str,
        tokenizer: Tokenizer | None,
        progress: Progress | None,
        *,
        images: Path | None = None,
        limits: ImageLimits = LIMITS,
    ) -> None:
        self._store, self._name, self._progress = store, name, progress
        self._folder, self._limits = images, limits
        self._images = RowImages(store, limits=limits)
        self.tokenization = Tokenization(tokenizer) if tokenizer else None
        self.experiences = ExperienceFill(store, tokenization=self.tokenization)
        self.left_out: Counter[str] = Counter()
        """Rows of the files left out, by reason."""
        self.not_read: Counter[str] = Counter()
        """Parts of rows that were not read, by reason."""
        self.formats: set[str] = set()
        """The named formats of the files."""
        self.input_rows = 0
        """Rows of the files, before the SELECT."""

    def read(
        self,
        file: InputFile,
        spool: Spool,
        *,
        sql: str | None = None,
        taskset: str | None = None,
        split: str | None = None,
    ) -> None:
        """Spool the rows of a file for each of their tables."""
        session = InputSession(file, self._store, spelled=True)
        rows = rows_of(self._name, file, session, sql, self._progress)
        brings_tasks = self._name != "preferences" or rows.is_pairs
        if not brings_tasks and (taskset or (split and file.kind != "hf")):
            raise ConfigError("`--taskset` and `--split` are for tasks; preferences have none")
        defaults = Defaults(taskset or file.stem, split or "train")
        self.experiences.begin(defaults)

        def put(new: pa.Table) -> None:
            spool.put("media", new)

        def shown(batch: pa.Table, images: RowImages, keep: Callable[[pa.Table], None]) -> pa.Table:
            # a table of pairs names stored experiences, and no image
            folder = self._folder or file.folder
            return images.named(batch, folder, file.name, keep) if brings_tasks else batch

        def fill(batch: pa.Table) -> None:
            batch = shown(batch, self._images, put)
            for name, filled in self._filled(batch, rows, self.experiences, defaults):
                rows.check(name, filled)
                if name == "tasks" and self._name != "tasks":
                    # many experiences bring the same task
                    spool.put_tasks(filled)
                else:
                    spool.put(name, filled)

        def probe(batch: pa.Table) -> None:
            # a separate one: rows that are rejected must not take rollout numbers
            trial = ExperienceFill(self._store)
            trial.begin(defaults)
            batch = shown(batch, RowImages(self._store, limits=self._limits), lambda new: None)
            for name, filled in self._filled(batch, rows, trial, defaults):
                check(TABLES[name], filled)

        rows.spool(fill, probe)
        if not rows.read:
            raise _nothing(rows, file, session)
        self.input_rows += session.num_rows
        self.left_out.update(rows.left_out)
        self.not_read.update(rows.not_read)
        self.formats |= {rows.format.name} if rows.format else set()

    def _filled(
        self, batch: pa.Table, rows: FileRows, experiences: ExperienceFill, defaults: Defaults
    ) -> Iterator[tuple[str, pa.Table]]:
        """Yield the rows made from a batch, with the name of their table."""
        if self._name == "tasks":
            yield "tasks", fill_tasks(batch, defaults)
        elif self._name == "preferences" and not rows.is_pairs:
            yield "preferences", fill_preferences(batch, self._store)
        else:
            tasks, filled = experiences.with_tasks(batch)
            yield "experiences", filled
            if tasks:
                yield "tasks", check(TABLES["tasks"], tasks)
            if self._name == "preferences":
                margins = values_of(batch, "margin")
                yield "preferences", of_pairs(filled, margins, self._store)

    def stamped(self, spool: Spool, name: str, lineage_id: str) -> Iterator[pa.Table]:
        """Yield the spooled rows of a table with the `lineage_id`, and report the progress."""
        done = nbytes = 0
        for batch in spool.rows(name):
            done += batch.num_rows
            nbytes += batch.nbytes
            if self._progress is not None:
                self._progress(f"storing {name}", done, nbytes)
            # an image is of whoever shows it, and is not taken back with one import
            yield batch if name == "media" else _stamped(batch, lineage_id)


def _stamped(rows: pa.Table, lineage_id: str) -> pa.Table:
    """Set the `lineage_id` of the import, whatever the file says."""
    rows = rows.select([n for n in rows.column_names if n != "lineage_id"])
    return rows.append_column("lineage_id", pa.repeat(lineage_id, rows.num_rows))


def _nothing(rows: FileRows, file: InputFile, session: InputSession) -> InputError:
    why = "".join(f"; {n} rows: {reason}" for reason, n in rows.left_out.items())
    what = "the SELECT over" if rows.format is None else f"format `{rows.format.name}` of"
    return InputError(
        f"{what} `{file.name}` gave no rows, of {session.num_rows} in the file{why}; "
        "nothing was imported"
    )


def rows_of(
    name: str, file: InputFile, session: InputSession, sql: str | None, progress: Progress | None
) -> FileRows:
    """Choose the reader for a file's rows."""
    found = file.format
    if found is not None and sql is not None:
        raise ConfigError(f"format `{found.name}` has a SELECT of its own; leave it or `--sql` out")
    columns = session.columns
    if found is None and sql is None and not _are_ours(name, columns):
        found = recognized(columns, name)
        if found is None and (known := fitting(columns, name)):
            named = " or ".join(f"`--format {one}`" for one in known)
            raise ConfigError(
                f"`{file.name}` has columns that are not of `{name}`, and those of a known format; "
                f'say so with {named}, or map them with `--sql "{select_for(name, columns)}"`'
            )
    given = (table(name), file, session, progress, found)
    if found is None:
        return Selected(*given) if sql is None else Selected(*given, query=sql)
    if name not in found.tables:
        raise ConfigError(f"format `{found.name}` gives {' and '.join(found.tables)}, not `{name}`")
    if not found.fits(columns):
        needs = ", or ".join(" and ".join(f"`{c}`" for c in sorted(n)) for n in found.needs)
        raise InputError(
            f"`{file.name}` does not fit format `{found.name}`: it needs the columns {needs}, "
            f"got {', '.join(f'`{c}`' for c in columns)}"
        )
    if found.selects:
        return Selected(*given, query=found.selects[name])
    return Mapped(*given)


def _are_ours(name: str, columns: list[str]) -> bool:
    ours = experience_columns(columns) if name == "experiences" else table(name).columns
    return set(columns) <= {c.name for c in ours}
