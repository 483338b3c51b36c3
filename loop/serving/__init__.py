"""`rlake serve`: the chat API over a run's policy, with every conversation kept as rows."""
