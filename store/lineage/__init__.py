"""Where rows, rewards and checkpoints come from, and what became of them."""
