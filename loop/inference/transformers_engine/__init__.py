"""The engine in this process: continuous batching over a transformers model."""
