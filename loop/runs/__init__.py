"""Bookkeeping of a job: attempts, locks, metrics, experiment trackers, progress, Ray."""
