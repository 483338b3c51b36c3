"""Care: small files are merged, beside readers and writers."""

import logging
from typing import TYPE_CHECKING

import lance

from .errors import StoreError
from .schema import TABLES

if TYPE_CHECKING:
    from .store import Store

_ROWS_A_FILE = 65_536

_log = logging.getLogger(__name__)


def maintain(store: "Store") -> dict[str, tuple[int, int]]:
    """Merge small files of each table; return fragments before and after, by table."""
    report = {}
    for name in TABLES:
        dataset = store.open_at(name)
        before = len(dataset.get_fragments())
        if before > 1:
            _merge(dataset)
        report[name] = (before, len(store.open_at(name).get_fragments()))
    return report


def _merge(dataset: lance.LanceDataset) -> None:
    try:
        # files of this size are left alone, so that a row is not rewritten for ever
        dataset.optimize.compact_files(target_rows_per_fragment=_ROWS_A_FILE)
    except (OSError, RuntimeError) as error:
        if "conflict" not in str(error).lower():
            raise StoreError(f"cannot merge the files of `{dataset.uri}`: {error}") from error
        _log.info("left the files of `%s` to another process that merges them", dataset.uri)
