"""Write a file under a temporary name, and rename it when it is complete."""

from contextlib import suppress
from io import BufferedWriter
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from ...store import Appended
from ...store.errors import StoreError, reason


class FileWriter:
    """Writes a temporary file and renames it, so readers see the old file or the new one."""

    def __init__(self, path: Path, schema: pl.Schema) -> None:
        self._path, self._rows = path, 0
        # in the same folder: a rename is atomic within one file system only
        self._beside = path.with_name(f".{path.name}.writing")
        self._empty = schema.to_frame()
        self._parquet: pq.ParquetWriter | None = None
        self._lines: BufferedWriter | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".jsonl":
                self._lines = self._beside.open("wb")
            else:
                self._parquet = pq.ParquetWriter(
                    self._beside, self._empty.to_arrow().schema, compression="zstd"
                )
        except OSError as error:
            raise self._error(error) from error

    def put(self, rows: pl.DataFrame) -> None:
        """Write a part."""
        self._rows += rows.height
        try:
            if self._lines is not None and rows.height:
                rows.write_ndjson(self._lines)
            if self._parquet is not None and rows.height:
                self._parquet.write_table(rows.to_arrow(), row_group_size=max(rows.height, 1))
        except OSError as error:
            raise self._error(error) from error

    def done(self) -> Appended:
        """Rename the file."""
        try:
            self._end()
            self._beside.replace(self._path)
        except OSError as error:
            raise self._error(error) from error
        return Appended(self._rows, 0, 0)

    def close(self) -> None:
        """Remove the temporary file, if it was not renamed."""
        with suppress(OSError):  # what is not whole is removed anyway
            self._end()
        self._beside.unlink(missing_ok=True)

    def _end(self) -> None:
        lines, parquet = self._lines, self._parquet
        self._lines, self._parquet = None, None
        if lines is not None:
            lines.close()
        if parquet is not None:
            parquet.close()

    def _error(self, error: OSError) -> StoreError:
        return StoreError(f"cannot write `{self._path}`: {error.strerror or reason(error)}")
