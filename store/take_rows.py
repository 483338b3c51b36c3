"""Rows by their addresses, in the order in which they are asked for."""

from collections.abc import Sequence

import lance
import pyarrow as pa

from .schema import TABLES


def take(dataset: lance.LanceDataset, row_ids: Sequence[int], columns: Sequence[str]) -> pa.Table:
    """Read columns of these rows, in their order; rows that are gone are left out.

    Columns that an old version of the table lacks are NULL in every row.
    """
    if not columns:
        return pa.table({})
    schema = dataset.schema
    name = (schema.metadata or {}).get(b"rlake.table", b"").decode()
    declared = TABLES[name].names if name in TABLES else ()
    later = [c for c in columns if c in declared and c not in schema.names]
    # the public `take_row_ids` of lancedb neither keeps the order nor reads a pinned version
    rows = dataset._take_rows(  # pyright: ignore[reportPrivateUsage]
        list(row_ids), columns=[c for c in columns if c not in later]
    )
    for column in later:
        field = TABLES[name].schema.field(column)
        rows = rows.append_column(field, pa.nulls(len(rows), field.type))
    return rows
