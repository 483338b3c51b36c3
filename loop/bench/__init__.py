"""The budgets, measured: `python -m rlake.loop.bench [FIGURE ...]`, one file a theme."""
