"""`${env:NAME}` in a configuration: read from the environment, and stored as it was written."""

import os
import re
from collections.abc import Mapping
from typing import Any

_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def filled_in(tree: Any, written: dict[str, str], *, strict: bool, path: str = "") -> Any:
    """Return a plain tree with the values of the variables that its texts name.

    `written` receives each text as it was written, by what it became. Raises ValueError for a
    variable that is not set; unless `strict`, such a text stays as it is.

    >>> os.environ["WHERE"] = "db.example"
    >>> written = {}
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
    if not isinstance(tree, str) or "${env:" not in tree:
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
    written[made] = tree
    return made


def as_written(tree: Any, written: Mapping[str, str]) -> Any:
    """Return a plain tree with the variables in place of their values."""
    if isinstance(tree, Mapping):
        return {key: as_written(one, written) for key, one in tree.items()}
    if isinstance(tree, list | tuple):
        return [as_written(one, written) for one in tree]
    return written.get(tree, tree) if isinstance(tree, str) else tree
