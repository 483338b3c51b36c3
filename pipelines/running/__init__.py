"""How a run goes: its stages, the parts of its rows, what lies between, and what it tells."""
