"""vLLM as an engine, with weights that change while it runs."""
