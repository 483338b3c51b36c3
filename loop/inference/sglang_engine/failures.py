"""How a server fails a request, other than by refusing it."""

from ....store.errors import JobError

AGAIN_SECONDS = 0.5
"""Time between two attempts to reach a server."""


class LostError(JobError):
    """A server did not answer, and may have other weights from now on."""


class BusyError(JobError):
    """A server has no room for a request now."""
