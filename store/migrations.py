"""Stores of older schemas: tables and columns that came later are added, and read as empty before.

Columns are only ever added, may be NULL, and are added without a file being written, so a store of
any size is brought up to date at once. Versions from before stay as they are: `schema_versions`
says what is read in place of a column that they lack. Writers of an older rlake that are running
meanwhile go on, their rows have NULL in the new columns; when started again, they refuse the newer
store.
"""

import pyarrow as pa

from .errors import StoreError, reason
from .locks import locked
from .schema import SCHEMA_VERSION
from .schema_versions import VERSION_KEY, missing, schema_of
from .tables import Tables


def migrate(store: Tables, name: str) -> None:
    """Bring a table up to date; one that is, or was left half-way, is brought on from there.

    The version is raised last: a table that says it is up to date has all columns.
    """
    if schema_of(store.open_at(name)) == SCHEMA_VERSION:
        return
    with locked(store, name):
        dataset = store.open_at(name)
        try:
            later = missing(name, dataset.schema)
            if later:
                dataset.add_columns(pa.schema(later))
            dataset.update_schema_metadata({VERSION_KEY: str(SCHEMA_VERSION)})
        except (OSError, RuntimeError, ValueError) as error:
            raise StoreError(
                f"cannot bring table `{name}` of `{store.uri}` up to date: {reason(error)}; what "
                "it holds is untouched, open the store again to go on"
            ) from error
