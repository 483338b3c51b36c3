"""Show the examples of docstrings as code; else `[...][...]` in them would be read as a link."""

import re
from typing import Any

import griffe


class FencedExamples(griffe.Extension):
    """Put each paragraph of a docstring that begins with `>>>` into a block of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Return a docstring as Markdown, with its examples as code."""
    parts = re.split(r"\n{2,}", text)
    return "\n\n".join(
        f"```pycon\n{part}\n```" if part.lstrip().startswith(">>>") else part for part in parts
    )
