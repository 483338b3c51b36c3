"""Code under test: Python that nobody trusts, run within limits, and how it ended.

Where the kernel lets this process make namespaces, the code sees no network, no process but its
own, and no file but Python's and an empty folder in memory; it is another user, and everything
that it started dies with it. Where not (as in many containers), sockets and signals to processes
are refused by a system call filter, and what it started is ended; all else of this list does not
hold. If we are root it is another user still, who reads and writes what any user may; if not, it
is ourselves: it can read our keys and write our lake. `protection` says which it is.

It never protects from faults of the kernel, nor from what is measured over time by code beside it.
Memory is bounded for each process: all together may take `processes` times `memory`.
"""

from .running import Ended, Limits, protection, run_python

__all__ = ["Ended", "Limits", "protection", "run_python"]
