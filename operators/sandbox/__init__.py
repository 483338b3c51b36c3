"""Code under test: Python that nobody trusts, run within limits, and how it ended.

Where the kernel lets this process make namespaces, the code sees no network, no process but its
own, and no file but Python's and an empty folder in memory; it is another user, and everything
that it started dies with it. Where not (as in many containers), Landlock keeps all files but those
from it, and what it started is ended; it sees that other files and processes are there. Where the
kernel has neither, code is refused, unless `unconfined` is asked for: it then reads and writes what
its user may. `protection` says which it is.

System calls are refused but for those of a list: without namespaces no sockets, no signals, and
nothing that reaches another process; nowhere io_uring, or memory that no limit counts. What all
processes hold together is looked at every 50 ms, and they are ended when it is too much.

It never protects from faults of the kernel, nor from what is measured over time by code beside it.
"""

from .run import Ended, Limits, protection, run_python

__all__ = ["Ended", "Limits", "protection", "run_python"]
