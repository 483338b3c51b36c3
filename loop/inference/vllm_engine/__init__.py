"""vLLM, in this process or in a server of its own, with weights that change while it runs."""
