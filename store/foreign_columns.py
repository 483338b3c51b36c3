"""Columns of a table that rlake did not declare: somebody added them from outside."""

import lance
import pyarrow as pa

from .errors import SchemaError
from .schema import Table


def foreign(table: Table, dataset: lance.LanceDataset) -> list[pa.Field]:
    """Return the columns of a stored table that are not declared."""
    return [field for field in dataset.schema if field.name not in table.names]


def refuse_foreign(table: Table, dataset: lance.LanceDataset) -> None:
    """Raise SchemaError when a column from outside lets no row be appended.

    One that may be NULL does no harm: new rows have NULL in it.
    """
    for field in foreign(table, dataset):
        if not field.nullable:
            raise SchemaError(f"cannot write to `{table.name}`: {'; '.join(told(table, field))}")


def told(table: Table, field: pa.Field) -> tuple[str, str]:
    """Say what a column from outside means for the table, and the way out."""
    remove = f"`lance.dataset('{table.name}.lance').drop_columns(['{field.name}'])`"
    what = f"column `{field.name}` came from outside, and rlake has no value for it"
    if field.nullable:
        return f"{what}: it is NULL in what is appended", f"leave it, or remove it with {remove}"
    alter = f"alter_columns({{'path': '{field.name}', 'nullable': True}})"
    return (
        f"{what}, and it must not be NULL: no row can be appended",
        f"remove it with {remove}, or let it be NULL with `{alter}`",
    )
