"""Policies behind an HTTP endpoint that speaks OpenAI's API."""
