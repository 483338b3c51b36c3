"""What happens to the rows of a step: tensors, networks, losses, updates, checkpoints."""
