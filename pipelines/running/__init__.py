"""The execution of a pipeline: stages, partitions, spilling, progress."""
