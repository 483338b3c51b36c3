"""A sandbox for untrusted Python code, with limits on time, memory, disk and output.

Where the kernel lets this process make namespaces, the code has no network, sees only its own
processes and, of files, only Python's and an empty folder in memory; it runs as another user, and
everything that it started is killed with it. Elsewhere (as in many containers), Landlock restricts
it to the same files, and the processes that it started are killed; it can see that other files and
processes exist. If the kernel has neither, code is refused, unless `unconfined` is set: it then
reads and writes what its user may. `protection` returns which of these applies.

Only system calls of a list are allowed: without namespaces no sockets, no signals, and nothing that
affects another process; never io_uring, or memory that is not counted. The memory of all processes
together is checked every 50 ms, and they are killed when it is too much.

It does not protect against faults of the kernel, or against timing attacks on other processes.
"""

from .run import Ended, Limits, protection, run_python

__all__ = ["Ended", "Limits", "protection", "run_python"]
