"""Tasks: their sources, preparation, selection and synthesis, and curricula."""
