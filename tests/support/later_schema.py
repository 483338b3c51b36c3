"""A later version of the schema, planted: some tables and columns of today count as new in it."""

import sys

import pytest

from rlake.store import branches, connect, doctor, migrations, schema, schema_versions
from rlake.store.schema import TABLES

LATER_VERSION = schema.SCHEMA_VERSION + 1
LATER_TABLES = ("experience_values", "expectations", "members", "retention")
LATER_COLUMNS = {
    "experiences": ("tokenizer", "temperature", "digest"),
    "draws": ("source", "drawn_from"),
    "tasks": ("digest",),
}


def plant(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Let this process have the later schema, until `monkeypatch` ends, or for good."""
    patch = monkeypatch or pytest.MonkeyPatch()
    schemas = {name: table.schema for name, table in TABLES.items()}
    users = (migrations, schema_versions, doctor, branches, sys.modules[connect.__module__])
    for module in (schema, *users):
        patch.setattr(module, "SCHEMA_VERSION", LATER_VERSION)
    for name, table in TABLES.items():
        meta = {"rlake.table": name, "rlake.schema_version": str(LATER_VERSION)}
        patch.setitem(vars(table), "schema", schemas[name].with_metadata(meta))
    for name in LATER_TABLES:
        patch.setitem(vars(TABLES[name]), "since", LATER_VERSION)
