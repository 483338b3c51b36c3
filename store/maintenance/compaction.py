"""Merge small files of a table while others read and write."""

from collections.abc import Sequence
from itertools import accumulate

import lance

ROWS_A_FILE = 65_536
"""Files of this many rows are not merged again, so that no row is rewritten forever."""
_BYTES_A_FILE = 256 << 20
_BYTES_AT_ONCE = 16 << 20
_FEW_FILES = 8


def rows_a_file(dataset: lance.LanceDataset) -> int:
    """Return how many rows a file should have: fewer than ROWS_A_FILE when they are large."""
    return max(1, min(ROWS_A_FILE, int(_BYTES_A_FILE / _row_bytes(dataset))))


def small_files(dataset: lance.LanceDataset, *, thorough: bool) -> list[int]:
    """Return the fragments that are worth merging.

    When `thorough`, all small ones. Otherwise the newest ones, as long as the next older one is at
    most twice as large as all newer ones together, so that a row is rewritten only a few times; and
    none while they are few.
    """
    limit = rows_a_file(dataset)
    fragments = dataset.get_fragments()
    if thorough:
        worn = {f.fragment_id for f in fragments if f.num_deletions}
        small = {f.fragment_id for f in fragments if f.metadata.physical_rows < limit}
        return sorted(worn | small) if worn or len(small) > 1 else []
    sizes = [f.metadata.physical_rows for f in fragments]
    newest = fragments[len(fragments) - _newest(sizes, limit) :]
    return [f.fragment_id for f in newest] if len(newest) >= _FEW_FILES else []


def merge(dataset: lance.LanceDataset, chosen: Sequence[int]) -> None:
    """Merge the chosen fragments, a bounded number of bytes in memory at a time.

    Raises what Lance raises when another process changes the same files: OSError, RuntimeError.
    """
    others = {f.fragment_id for f in dataset.get_fragments()} - set(chosen)
    dataset.optimize.compact_files(
        target_rows_per_fragment=rows_a_file(dataset),
        excluded_fragment_ids=sorted(others),
        batch_size=max(1, int(_BYTES_AT_ONCE / _row_bytes(dataset))),
    )


def _newest(sizes: Sequence[int], limit: int) -> int:
    """Count the newest files that go into one.

    >>> _newest([65536, 30000, 1, 1, 1], 65536)
    3
    """
    newer = [0, *accumulate(reversed(sizes))]
    for count, size in enumerate(reversed(sizes)):
        if size >= limit or (count and size > 2 * newer[count]):
            return count
    return len(sizes)


def _row_bytes(dataset: lance.LanceDataset) -> float:
    """Return the mean size of a row as it is stored, 1 or more."""
    facts = dataset.get_version()["metadata"]
    return max(1.0, int(facts["total_files_size"]) / max(1, int(facts["total_data_file_rows"])))
