"""Conversations become rows: trajectories, groups, and their rewards."""
