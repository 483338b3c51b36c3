"""Write a file under a temporary name, and rename it when it is complete."""

from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from ...store import Appended
from ...store.files.atomic_writer import whole


class FileWriter:
    """Writes a temporary file and renames it, so readers see the old file or the new one."""

    def __init__(self, path: Path, schema: pl.Schema) -> None:
        self._rows, self._writing = 0, _writing(path, schema)
        next(self._writing)

    def put(self, rows: pl.DataFrame) -> None:
        """Write a part."""
        self._rows += rows.height
        # Parquet refuses a row group of no rows
        if rows.height:
            self._writing.send(rows)

    def done(self) -> Appended:
        """Rename the file."""
        with suppress(StopIteration):
            self._writing.send(None)
        return Appended(self._rows, 0, 0)

    def close(self) -> None:
        """Remove the temporary file, if it was not renamed."""
        # GeneratorExit leaves the block of `whole`, which removes what is not complete
        self._writing.close()


def _writing(path: Path, schema: pl.Schema) -> Generator[None, pl.DataFrame | None]:
    """Write the parts that are sent, until None; JobError for a file that cannot be written."""
    with whole(path) as part:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            with part.open("wb") as lines:
                while (rows := (yield)) is not None:
                    rows.write_ndjson(lines)
            return
        empty = schema.to_frame().to_arrow()
        with pq.ParquetWriter(part, empty.schema, compression="zstd") as writer:
            while (rows := (yield)) is not None:
                writer.write_table(rows.to_arrow(), row_group_size=rows.height)
