"""Digests of functions by their source, which tell whether a function has changed."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from ..store.ids import content_id

F = TypeVar("F", bound=Callable[..., Any])

_DIGITS = 12
_IDENTITY = "_rlake_identity"
"""The attribute of `identified_by`; users' callables may have an attribute `identity`."""


def digest(function: Callable[..., Any]) -> str:
    """Return the digest of a function: its import path and source, without what it calls.

    >>> from rlake.operators.rewards import exact_match, numeric_answer
    >>> digest(exact_match) == digest(exact_match), digest(exact_match) == digest(numeric_answer)
    (True, False)

    Compiled functions have no source: the version of their package is used. For a callable object,
    its class is used.
    """
    if isinstance(function, partial) or is_identified(function):
        given = function if isinstance(function, partial) else partial(function)
        identity = getattr(given.func, _IDENTITY, dict)
        parameters = repr(sorted(identity(**given.keywords).items()))
        return content_id(_of_source(given.func), repr(given.args), parameters, length=_DIGITS)
    return _of_source(function)


def _of_source(function: Callable[..., Any]) -> str:
    # the function below decorators, whose source is what users edit
    one = inspect.unwrap(function)
    one = one if hasattr(one, "__qualname__") else type(one)
    try:
        source = inspect.getsource(one)
    except (OSError, TypeError):
        source = _package_version(one.__module__)
    return content_id(f"{one.__module__}:{one.__qualname__}", source, length=_DIGITS)


def identified_by(identity: Callable[..., dict[str, Any]]) -> Callable[[F], F]:
    """Let what `identity` makes of a function's parameters stand for them in its digest.

    With it, the digest of a function that reads files depends on their contents.
    """

    def marked(function: F) -> F:
        function.__dict__[_IDENTITY] = identity
        return function

    return marked


def is_identified(function: Callable[..., Any]) -> bool:
    """Return whether a function's digest depends on more than its source and parameters."""
    return hasattr(function.func if isinstance(function, partial) else function, _IDENTITY)


def users_code(function: Callable[..., Any], values: Iterable[object]) -> tuple[str, ...]:
    """Return digests of a function and of functions in parameter values, except rlake's own.

    >>> users_code(digest, ["exact_match", 3])
    ()
    """
    used = [function, *_functions(list(values))]
    return tuple(digest(f) for f in used if callable(f) and not is_ours(f))


def _functions(value: object) -> Iterator[object]:
    """Yield the functions in a value, and those named as `package.module:function` and loaded."""
    if isinstance(value, str):
        module, _, name = value.partition(":")
        if name:
            yield getattr(sys.modules.get(module), name, None)
    elif isinstance(value, Mapping):
        yield from _functions([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _functions(one)
    else:
        yield value


def is_ours(function: object) -> bool:
    """Return whether a function belongs to rlake."""
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] == __name__.partition(".")[0]


def _package_version(module: str | None) -> str | None:
    try:
        return version((module or "").partition(".")[0])
    except (PackageNotFoundError, ValueError):
        return None
