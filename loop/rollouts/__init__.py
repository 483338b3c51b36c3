"""Groups of rollouts: run, timed out, and written as rows."""
