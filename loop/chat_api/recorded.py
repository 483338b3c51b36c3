"""Agents that speak OpenAI's chat API, recorded: what they ask becomes rows, token for token."""

from .recording import Recording, record

__all__ = ["Recording", "record"]
