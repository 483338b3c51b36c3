"""Read the plain data in a pickle without unpickling: nothing in it is imported or called.

A pickle is a program. Only the operations that build plain values are followed; any other, such as
one that imports or calls a function, raises ValueError. So does a pickle that expands to far more
than its bytes, by repeating a value or nesting it in itself.
"""

import pickletools
from typing import Any

_VALUES = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_ARGUMENTS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
     "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
)  # fmt: skip
_EMPTY: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_SILENT = frozenset(("PROTO", "FRAME"))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()
_LEAST, _TIMES = 1000, 20
"""A text may be repeated, as in many messages: at most this many times the size of the pickle."""
_DEEPEST = 100
_LONGEST_BITS = 4096


def plain_values(data: bytes) -> Any:
    """Return the dicts, lists, numbers and texts in a pickle.

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
                return _bounded(stack.pop(), _LEAST + _TIMES * len(data))
            _follow(op.name, argument, stack, memo)
    except (LookupError, TypeError, OverflowError, MemoryError) as error:
        raise ValueError("it is broken") from error
    raise ValueError("it has no end")


def _bounded(whole: Any, most: int) -> Any:
    """Return the value; raise ValueError when it expands to more than `most` bytes."""
    # not recursive: a value that contains itself would exhaust the stack before the limit
    left = [(whole, 0)]
    while left:
        value, depth = left.pop()
        most -= len(value) if isinstance(value, str | bytes) else 1
        if most < 0 or depth > _DEEPEST:
            raise ValueError("it repeats its parts too often, or nests them in themselves")
        if isinstance(value, dict):
            left += [(v, depth + 1) for pair in value.items() for v in pair]
        elif isinstance(value, list | tuple):
            left += [(v, depth + 1) for v in value]
        else:
            _check_plain(value)
    return whole


def _check_plain(value: Any) -> None:
    """Raise ValueError for a value that cannot be stored as text or a number."""
    if value is _MARK:
        raise ValueError("it is broken")
    if isinstance(value, str):
        value.encode()
    if isinstance(value, int) and value.bit_length() > _LONGEST_BITS:
        raise ValueError("it holds a number of too many digits")


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
    """Put the top of the stack into the container below it."""
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
