"""Exit codes; the last two as shells count them, 128 and the signal's number: 143 for SIGTERM."""

DONE, FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
