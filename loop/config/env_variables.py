"""`${env:NAME}` in a configuration: read from the environment, and stored as it was written."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass
class Written:
    """Texts of a configuration as they were written."""

    texts: dict[str, str] = field(default_factory=dict)
    """Those that name variables, by what they became."""
    plain: set[tuple[str, str]] = field(default_factory=set, compare=False)
    """The path and text of the others, which a variable's value may equal. Configurations that say
    the same are equal, whether a default was written or left out."""


def filled_in(tree: Any, written: Written, *, strict: bool, path: str = "") -> Any:
    """Return a plain tree with the values of the variables that its texts name.

    `written` receives the texts as they were written. Raises ValueError for a
    variable that is not set; unless `strict`, such a text stays as it is.

    >>> os.environ["WHERE"] = "db.example"
    >>> written = Written()
    >>> filled_in({"path": "postgresql://${env:WHERE}/lab"}, written, strict=True)
    {'path': 'postgresql://db.example/lab'}
    >>> as_written({"path": "postgresql://db.example/lab"}, written)
    {'path': 'postgresql://${env:WHERE}/lab'}
    """
    if isinstance(tree, Mapping):
        return {
            key: filled_in(one, written, strict=strict, path=f"{path}.{key}" if path else str(key))
            for key, one in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [filled_in(one, written, strict=strict, path=path) for one in tree]
    if not isinstance(tree, str):
        return tree
    if "${env:" not in tree:
        written.plain.add((path, tree))
        return tree
    missing = [name for name in _VARIABLE.findall(tree) if name not in os.environ]
    if missing and strict:
        raise ValueError(
            f"`{path}` names the environment variable `{missing[0]}`, which is not set; set it "
            f"with `export {missing[0]}=...`"
        )
    if missing:
        return tree
    made = _VARIABLE.sub(lambda found: os.environ[found[1]], tree)
    written.texts[made] = tree
    return made


def as_written(tree: Any, written: Written, *, path: str = "") -> Any:
    """Return a plain tree with the variables in place of their values.

    A text that was written without a variable stays, even if it equals the value of one.
    """
    if isinstance(tree, Mapping):
        return {
            key: as_written(one, written, path=f"{path}.{key}" if path else str(key))
            for key, one in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [as_written(one, written, path=path) for one in tree]
    if not isinstance(tree, str) or tree not in written.texts:
        return tree
    # a section may have been written as one text, whose path is then shorter
    parts = path.split(".")
    places = {(".".join(parts[:i]), tree) for i in range(1, len(parts) + 1)}
    return tree if places & written.plain else written.texts[tree]
