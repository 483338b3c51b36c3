"""Versions of a policy's weights that are held in memory, for those who follow them."""

import threading
from collections.abc import Collection, Mapping

from torch import Tensor


class WeightCache:
    """Holds published versions between the trainer and who asks for them, in one process.

    What lies here is a copy that nobody changes. It holds what its publisher has not told it to
    forget: the versions that can still be asked for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[str, Mapping[str, Tensor]]] = {}

    def put(self, version: int, digest: str, state: Mapping[str, Tensor]) -> None:
        """Hold a version, in place of one of that number."""
        with self._lock:
            self._held[version] = (digest, state)

    def get(self, version: int, digest: str) -> Mapping[str, Tensor] | None:
        """Return a version with this digest, or None when it is not held."""
        with self._lock:
            held, state = self._held.get(version, (None, None))
            return state if held == digest else None

    def all(self) -> dict[int, tuple[str, Mapping[str, Tensor]]]:
        """Return what is held: digests and tensors, by version."""
        with self._lock:
            return dict(self._held)

    def forget(self, versions: Collection[int]) -> None:
        """Let go of versions."""
        with self._lock:
            for version in versions:
                self._held.pop(version, None)
