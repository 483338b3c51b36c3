"""Producers and consumers of rows: explorer, trainer, and the command line."""
