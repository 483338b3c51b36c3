"""The budgets, measured: `python -m bench [FIGURE ...]`, one file a theme."""
