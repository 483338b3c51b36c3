"""Hugging Face models as objects and as files: loading, adapters, token log-probs, packing."""
