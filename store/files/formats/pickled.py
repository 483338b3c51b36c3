"""The data in a pickle, read without unpickling: nothing in it can be called, found or built.

A pickle is a program. Of its operations only those are followed that write down plain values;
any other, such as the ones that name or call a function, ends the reading with ValueError.
"""

import pickletools
from collections.abc import Callable
from typing import Any

_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = frozenset(
    {
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "SHORT_BINUNICODE",
        "BINUNICODE",
        "BINUNICODE8",
        "SHORT_BINBYTES",
        "BINBYTES",
        "BINBYTES8",
    }
)
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
_SILENT = frozenset(("PROTO", "FRAME"))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


def plain_values(data: bytes) -> Any:
    """Return the dicts, lists, numbers and texts that a pickle writes down.

    >>> import pickle
    >>> plain_values(pickle.dumps({"a": [1, None, 2.5], "b": ("x", True)}))
    {'a': [1, None, 2.5], 'b': ('x', True)}
    >>> plain_values(pickle.dumps(print))
    Traceback (most recent call last):
    ...
    ValueError: `STACK_GLOBAL` is refused
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for op, argument, _ in pickletools.genops(data):
            if op.name == "STOP":
                return stack.pop()
            _follow(op.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("it is broken") from error
    raise ValueError("it has no end")


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _VALUES:
        stack.append(_VALUES[name])
    elif name in _ARGUMENTS:
        stack.append(argument)
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name not in _SILENT:
        _fill(name, stack)


def _fill(name: str, stack: list[Any]) -> None:
    """Follow an operation that puts what is on top into the container below."""
    if name == "APPEND":
        value = stack.pop()
        _list(stack[-1]).append(value)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _dict(stack[-1])[key] = value
    elif name == "APPENDS":
        values = _since_mark(stack)
        _list(stack[-1]).extend(values)
    elif name == "SETITEMS":
        values = _since_mark(stack)
        _dict(stack[-1]).update(zip(values[::2], values[1::2], strict=True))
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    else:
        raise ValueError(f"`{name}` is refused")


def _since_mark(stack: list[Any]) -> list[Any]:
    values = []
    while (value := stack.pop()) is not _MARK:
        values.append(value)
    return values[::-1]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("it is broken")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("it is broken")
    return value
