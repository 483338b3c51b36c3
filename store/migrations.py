"""Migrate stores of older schemas by adding tables and columns.

Columns are only ever added, may be NULL, and are added without writing data files, so a store of
any size is migrated at once. Older versions stay as they are: `schema_versions` defines what is
read for a column that they lack. Running writers of an older rlake continue, with NULL in the new
columns of their rows; once restarted, they refuse the newer store.
"""

import pyarrow as pa

from .errors import as_store_error
from .locks import locked
from .schema import SCHEMA_VERSION
from .schema_versions import VERSION_KEY, missing, schema_of
from .tables import Tables


def migrate(store: Tables, name: str) -> None:
    """Migrate a table; continue a migration that was interrupted.

    The version is raised last, so a table of the current version has all columns.
    """
    if schema_of(store.open_at(name)) == SCHEMA_VERSION:
        return
    # read again within the lock: another process may have migrated it
    with locked(store, name):
        dataset = store.open_at(name)
        with as_store_error(
            f"cannot bring table `{name}` of `{store.uri}` up to date",
            fix="what it holds is untouched; open the store again to go on",
        ):
            later = missing(name, dataset.schema)
            if later:
                dataset.add_columns(pa.schema(later))
            dataset.update_schema_metadata({VERSION_KEY: str(SCHEMA_VERSION)})
