"""Versions of a policy's weights held in memory, for engines in the same process."""

import threading
from collections.abc import Collection, Mapping

from torch import Tensor


class WeightCache:
    """Holds published versions between the trainer and the engines of one process.

    Each version is an unchanging copy, which the publisher removes when it can no longer be
    requested.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[str, Mapping[str, Tensor]]] = {}

    def put(self, version: int, digest: str, state: Mapping[str, Tensor]) -> None:
        """Add or replace a version."""
        with self._lock:
            self._held[version] = (digest, state)

    def get(self, version: int, digest: str) -> Mapping[str, Tensor] | None:
        """Return a version with this digest, or None."""
        with self._lock:
            held, state = self._held.get(version, (None, None))
            return state if held == digest else None

    def all(self) -> dict[int, tuple[str, Mapping[str, Tensor]]]:
        """Return digests and tensors by version."""
        with self._lock:
            return dict(self._held)  # a copy: another thread may change the cache meanwhile

    def forget(self, versions: Collection[int]) -> None:
        """Remove versions."""
        with self._lock:
            for version in versions:
                self._held.pop(version, None)
