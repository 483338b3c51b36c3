"""Code under test: Python that nobody trusts, run within limits, and how it ended.

Where the kernel lets this process make namespaces, the code sees no network, no process but its
own, and no file but Python's and an empty folder in memory; it is another user, and everything
that it started dies with it. Where not (as in many containers), it is another user still, if we
are root; sockets are refused by a system call filter; all else of this list does not hold: it can
read what any user may read, and write where any user may write. `protection` says which it is.

It never protects from faults of the kernel, nor from what is measured over time by code beside it.
Memory is bounded for each process: all together may take `processes` times `memory`.
"""

from .running import Ended, Limits, protection, run_python

__all__ = ["Ended", "Limits", "protection", "run_python"]
