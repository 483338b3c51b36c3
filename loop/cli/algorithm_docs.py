"""What an algorithm's page says: its paper, parameters and metrics, as its docstrings tell them."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from ...store.errors import ConfigError
from ..algorithms import Algorithm, kind_of

_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_BEFORE_METRICS = re.compile(r"\n(?=Metrics\b)")
_METRIC = re.compile(r"`train/(\w+)`")


@dataclass(frozen=True)
class Parameter:
    """What can be set; those of a part are named with it, as `kl.coef`."""

    name: str
    type: str
    default: Any
    """None also where there is no default."""
    meaning: str


@dataclass(frozen=True)
class Description:
    """An algorithm as its docstrings tell it."""

    name: str
    summary: str
    """Its class in a line."""
    title: str
    text: str
    """The paper, the idea and the assumption."""
    paper: str | None
    """Its arXiv id."""
    papers: list[str]
    """All that are named."""
    unit: str
    group_size: int | None
    """Tries at each task; None when it must be said."""
    needs: list[str]
    """Columns that it reads with its defaults."""
    parameters: list[Parameter]
    metrics: dict[str, str]
    """Names without `train/`, and the sentences that explain them."""


def describe(name: str) -> Description:
    """Describe a packaged algorithm, or `package.module:Class`; raises as `resolve` does."""
    kind = kind_of(name)
    module = inspect.getmodule(kind)
    text = inspect.cleandoc((module.__doc__ if module else None) or kind.__doc__ or "")
    about = _BEFORE_METRICS.split(text)[0]
    title, _, rest = about.partition("\n")
    papers = list(dict.fromkeys(_PAPER.findall(about)))
    parameters = list(_parameters(kind))
    made = _made(kind)
    return Description(
        name,
        _line(kind.__doc__),
        title.strip(),
        rest.strip(),
        next(iter(_PAPER.findall(title)), None),
        papers,
        kind.unit,
        None if made is None else made.group_size,
        [] if made is None else sorted(made.needs),
        parameters,
        _metrics(kind),
    )


def _made(kind: type[Algorithm]) -> Algorithm | None:
    """Return it with its defaults, if it has them all."""
    try:
        return kind()
    except (TypeError, ConfigError):
        return None


def _line(docstring: str | None) -> str:
    return inspect.cleandoc(docstring or "").split("\n\n")[0].replace("\n", " ")


def _metrics(kind: type[Algorithm]) -> dict[str, str]:
    """Return what its file says of its metrics, then those that it extends, then its parts."""
    parents = [one for one in kind.__mro__ if issubclass(one, Algorithm)]
    parts = [t for t in get_type_hints(kind).values() if isinstance(t, type) and is_dataclass(t)]
    found: dict[str, str] = {}
    for one in (*parents, *parts):
        for sentence in _sentences(_about_metrics(one)):
            several = len(_METRIC.findall(sentence)) > 1
            for name in _METRIC.findall(sentence):
                own = re.sub(rf"^`train/{name}`,? (is )?", "", sentence)
                found.setdefault(name, sentence if several else own)
    return found


def _about_metrics(kind: type) -> str:
    module = inspect.getmodule(kind)
    texts = ((module.__doc__ if module else None), vars(kind).get("__doc__"))
    return "\n".join(
        part for text in texts for part in _BEFORE_METRICS.split(inspect.cleandoc(text or ""))[1:]
    )


def _sentences(text: str) -> Iterator[str]:
    """Yield the parts of a paragraph about metrics, each with the names that it begins with."""
    plain = " ".join(text.split())
    plain = re.sub(r"^Metrics(?: of all)?:\s*", "", plain)
    for part in re.split(r"[;.,]\s+(?=`train/)", plain):
        yield part.rstrip(" ;.,")


def _parameters(kind: Any, prefix: str = "") -> Iterator[Parameter]:
    meanings = _meanings(kind)
    types = get_type_hints(kind, include_extras=True)
    own = vars(kind).get("__annotations__", {})
    for field in sorted(fields(kind), key=lambda field: field.name not in own):
        if not field.init:
            continue
        if is_dataclass(types[field.name]):
            yield from _parameters(types[field.name], f"{prefix}{field.name}.")
            continue
        yield Parameter(
            prefix + field.name,
            _type(types[field.name]),
            _default(field),
            meanings.get(field.name, ""),
        )


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()


def _type(kind: Any) -> str:
    """Return an annotation as a reader wants it: without its checks.

    >>> from typing import Annotated, Literal
    >>> _type(Annotated[float, "x"] | None), _type(Literal["a", "b"])
    ('float | null', 'a | b')
    """
    if kind is type(None):
        return "null"
    if hasattr(kind, "__metadata__"):
        return _type(get_args(kind)[0])
    parts = get_args(kind)
    if parts and (get_origin(kind) not in (list, tuple, dict)):
        return " | ".join(dict.fromkeys(p if isinstance(p, str) else _type(p) for p in parts))
    return getattr(kind, "__name__", str(kind))


def _meanings(kind: type) -> dict[str, str]:
    """Return the string under each field, the nearest class first."""
    found: dict[str, str] = {}
    for one in kind.__mro__:
        if is_dataclass(one):
            found = _strings(one) | found
    return found


def _strings(kind: type) -> dict[str, str]:
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef), "a dataclass is written as a class"
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(field.target, ast.Name):
                found[field.target.id] = " ".join(str(value.value).split())
    return found
