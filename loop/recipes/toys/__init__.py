"""Tasks, data and workflows that need no download."""
