"""Language models as judges: each asks for JSON, and says why when it gets none.

A judge speaks to an OpenAI-compatible endpoint, or to any async function `messages -> text`.
"""
