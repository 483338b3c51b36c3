"""Data-Juicer's operators, by name and with their own parameters, on rows in this process.

`python -m rlake.operators.data_juicer` lists those that can be used here, and what others need.
"""

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any

from ...store.errors import OperatorError, nearest
from ..apply import Operator
from ..body import Declared
from ..decorator import OperatorFunction, operator
from ..import_path import taken_apart
from . import dataset_operators, registry, row_operators
from .steps import META, STATS, Step
from .text_paths import Place

__all__ = ["data_juicer"]

_FUSED = ("general_fused_op", "fused_sequential_batch_op")
_OF_COLUMNS = re.compile(r"(field_key|input_keys?|meta_tag_key|group_by_keys|text_key_second)")
_TEXT = "text"


def _data_juicer(
    *,
    operator: str | Mapping[str, Any],
    column: str = "response_text",
    columns: Mapping[str, str] | None = None,
    prefix: str = "",
    by: str = dataset_operators.BATCH,
    release: str | None = None,
) -> Declared:
    """Apply one of Data-Juicer's operators, given as `name` or `{name: {parameter: value}}`.

    `column` holds the texts: a text column, or a path into a list of messages, such as
    `messages[-1].content`, `messages[].content` or `messages[assistant].content`. `columns` maps
    other fields of the operator to columns (`{query: prompt_text, messages: "messages[]"}`).
    Parameters such as `field_key` name columns directly; `__dj__stats__.text_len` is the column
    `text_len`.

    A Filter becomes a `filter`: its statistics are columns, named by their keys after `prefix`, and
    the reason of a dropped row shows them. A Mapper becomes a `clean`, a `derive` if it sets tags
    or fields, or an `augment` if it makes several texts from one. A Deduplicator or a Selector
    becomes a filter over all rows. A Grouper sets `batch_id`; an Aggregator sets its result for
    the rows with the same value in the column `by`. If a row has several texts, all must pass a
    filter, and statistics are lists. A row without text is dropped by a filter, and unchanged by
    other operators.

    `release` is the version of Data-Juicer; it is part of the fingerprint, and must be the
    installed one.

    >>> import polars as pl
    >>> table = pl.DataFrame({"experience_id": ["a", "b"], "response_text": ["4", "It is four."]})
    >>> short = data_juicer(operator={"text_length_filter": {"min_len": 2}})
    >>> table.pipe(short).rows()
    [('b', 'It is four.', 11)]
    >>> short.apply(table).dropped.rows()
    [('a', 'text_len 1 not in [2, ∞)')]

    Raises OperatorError for an unknown name or parameter, and for an operator that needs a package,
    a model or an API that is missing: nothing is installed or downloaded.
    """
    if release != registry.release():
        raise OperatorError(
            f"this was made for Data-Juicer {release}, and {registry.release()} is installed; "
            f"install `py-data-juicer=={release}`, or leave `release` out"
        )
    name, params = _named(operator)
    text_key = params.pop("text_key", None)
    if text_key not in (None, _TEXT):
        column = text_key
    fields = _fields(name, params, column, columns or {}, prefix)
    if name in _FUSED:
        steps = [Step(n, p) for n, p in _parts(name, params)]
        _check_fused(name, steps)
        return row_operators.body(steps, fields, prefix)
    known = registry.operators()
    if name in known and registry.kind_of(known[name]) not in ("filter", "mapper", "pipeline"):
        return dataset_operators.body(name, params, fields, by=by, prefix=prefix)
    return row_operators.body([Step(name, params)], fields, prefix)


_OWN = ("operator", "column", "columns", "prefix", "by", "release")


class DataJuicer(OperatorFunction[...]):
    """The operator function `data_juicer`.

    The name of an operator may stand as the parameter itself, as in YAML:
    `data_juicer(text_length_filter={"min_len": 10}, column="prompt_text")`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Operator:
        """Build the operator; raises OperatorError for parameters that do not fit."""
        others = [key for key in kwargs if key not in _OWN]
        if "operator" not in kwargs and len(others) == 1:
            kwargs["operator"] = {others[0]: kwargs.pop(others[0])}
        elif "operator" not in kwargs and not args:
            strange = [key for key in others if key not in registry.operators()]
            if strange and len(strange) < len(others):
                raise OperatorError(
                    f"`data_juicer` has no parameter `{strange[0]}`{nearest(strange[0], _OWN[1:])}"
                )
            raise OperatorError(
                f"`data_juicer` needs one of its operators, as `{{data_juicer: {{NAME: ...}}}}`, "
                f"and may have {', '.join(_OWN[1:])}; got {', '.join(others) or 'none'}"
            )
        kwargs.setdefault("release", registry.release())
        made = super().__call__(*args, **kwargs)
        own = {field.name: getattr(made, field.name) for field in dataclass_fields(made)}
        return Named(**{**own, "name": _named(made.params["operator"])[0]})


class Named(Operator):
    """An operator of Data-Juicer's, with the name that it has there."""

    def __str__(self) -> str:
        params = _named(self.params["operator"])[1]
        given = {n: v for n, v in self.params.items() if n not in ("operator", "release")}
        given = {n: v for n, v in given.items() if v != _DEFAULTS[n]}
        message = ", ".join(f"{n}={v!r}" for n, v in [*params.items(), *given.items()])
        return f"{self.name}({message}) of Data-Juicer {self.params['release']}"


# Before `operator`: fingerprints hold this name, so stored values would get new versions.
_data_juicer.__name__ = _data_juicer.__qualname__ = "data_juicer"
data_juicer = DataJuicer(_data_juicer, **operator("filter")(_data_juicer).declared)
_DEFAULTS = {n: p.default for n, p in data_juicer.parameters.signature.parameters.items()}


def _named(given: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    return taken_apart(given, "one of Data-Juicer's operators", error=OperatorError)


def _fields(
    name: str, params: Mapping[str, Any], column: str, columns: Mapping[str, str], prefix: str
) -> dict[str, Place]:
    """Return where each field that the operator may read is in our rows."""
    own = {field: Place.parse(path) for field, path in columns.items()}
    for media in registry.media_of(name):
        if media not in own:
            raise OperatorError(
                f"Data-Juicer's `{name}` looks at `{media}`; say which column holds their paths: "
                f"`columns: {{{media}: COLUMN}}`"
            )
    named = dict.fromkeys(_columns_named(name, params))
    names = [name for name, _ in _parts(name, params)] or [name]
    if _TEXT not in own and (_TEXT in named or any(map(registry.reads_text, names))):
        own[_TEXT] = Place.parse(column)
    for field in named:
        home, _, key = field.partition(".")
        own.setdefault(field, Place(prefix + key if home in (STATS, META) and key else home))
    return own


def _columns_named(name: str, params: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key, value in params.items():
        if _OF_COLUMNS.fullmatch(key):
            found += [value] if isinstance(value, str) else list(value)
        if key == "filter_condition":
            tree = ast.parse(value, mode="eval")
            dotted = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
            found += [ast.unparse(n) for n in dotted]
            found += [n.id for n in ast.walk(tree) if isinstance(n, ast.Name)]
    inner = [f for _, p in _parts(name, params) for f in _columns_named(_, p)]
    return [f for f in [*found, *inner] if f and f not in (STATS, META)]


def _parts(name: str, params: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the operators that a fused one is made of; none of another."""
    if name == "general_fused_op":
        return [_named(one) for one in params.get("fused_op_list") or ()]
    if name == "fused_sequential_batch_op":
        specs: Sequence[Mapping[str, Any]] = params.get("op_specs") or ()
        return [(s.get("class_name") or s["name"], dict(s.get("kwargs") or {})) for s in specs]
    return []


def _check_fused(name: str, steps: Sequence[Step]) -> None:
    if not steps:
        raise OperatorError(f"Data-Juicer's `{name}` is made of no operators; list some")
    for step in steps:
        if registry.kind_of(step.op) not in ("filter", "mapper") or step.makes_rows:
            raise OperatorError(
                f"`{step.name}` cannot be a part of Data-Juicer's `{name}`, which takes filters, "
                "and mappers that make one text of one; give it a line of its own"
            )
