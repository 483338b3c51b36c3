"""The producer: samples rollouts of tasks and appends them to the store."""
