"""Which tasks there are: selected, prepared, synthesized, and in what order they come."""
