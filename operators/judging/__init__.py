"""Language models as judges, behind an OpenAI-compatible endpoint or an async function.

Each asks for JSON, and reports an answer that is not.
"""
