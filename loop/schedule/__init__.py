"""When what runs: how far the explorer may run ahead, and which rows a step draws."""
