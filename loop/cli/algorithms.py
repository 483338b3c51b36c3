"""The command `algorithms`: each algorithm's paper, parameters and metrics, from its docstrings."""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from ...store.errors import ConfigError
from .app import JOBS, JsonOption, app, argument, heavy
from .tables import print_document, print_json, print_rows

if TYPE_CHECKING:
    from ..algorithms import Algorithm

_PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
_BEFORE_METRICS = re.compile(r"\n(?=Metrics\b)")
_METRIC = re.compile(r"`train/(\w+)`")


@dataclass(frozen=True)
class Parameter:
    """One parameter; those of a nested dataclass are named with it, as `kl.coef`."""

    name: str
    type: str
    default: Any
    """None where a parameter has no default, too."""
    meaning: str


@dataclass(frozen=True)
class Description:
    """An algorithm as its docstrings describe it."""

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
    """Rollouts of each task; None when it must be given."""
    needs: list[str]
    """Columns that it reads with its defaults."""
    parameters: list[Parameter]
    metrics: dict[str, str]
    """Names without `train/`, and the sentences that explain them."""

    @property
    def draws(self) -> str:
        """What one draw takes: `row`, or `group of 8`."""
        return self.unit if self.group_size in (1, None) else f"{self.unit} of {self.group_size}"


@app.command(rich_help_panel=JOBS)
def algorithms(
    name: Annotated[
        str | None, argument("Describe this algorithm, or `package.module:Class`; else list all.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the algorithms, or describe one: its paper, parameters and metrics."""
    if name is not None:
        found = describe(name)
        if as_json:
            print_json(asdict(found))
        else:
            _print(found)
        return
    listed = [describe(one) for one in heavy("algorithms").names()]
    if as_json:
        print_json({"algorithms": [asdict(one) for one in listed]})
        return
    print_rows(
        ("algorithm", "what it is", "draws", "needs", "arXiv"),
        [
            (one.name, one.summary.rstrip("."), one.draws, ", ".join(one.needs), one.paper or "")
            for one in listed
        ],
    )


def _print(one: Description) -> None:
    needs = ", ".join(one.needs) or "tokens and weights only"
    values = {
        p.name: p.default if isinstance(p.default, str) else json.dumps(p.default, default=str)
        for p in one.parameters
    }
    sections = {
        "draws and needs": {"draws": one.draws, "needs": needs},
        "parameters": {f"{p.name}: {values[p.name]}": p.meaning for p in one.parameters},
        "metrics": {f"train/{name}": text for name, text in one.metrics.items()},
    }
    print_document(one.title, one.text, sections)


def describe(name: str) -> Description:
    """Describe a packaged algorithm, or `package.module:Class`; raises as `resolve` does."""
    kind = heavy("algorithms").kind_of(name)
    about = _BEFORE_METRICS.split(_module_text(kind) or inspect.cleandoc(kind.__doc__ or ""))[0]
    title, _, rest = about.partition("\n")
    made = _with_defaults(kind)
    return Description(
        name,
        inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " "),
        title.strip(),
        rest.strip(),
        next(iter(_PAPER.findall(title)), None),
        list(dict.fromkeys(_PAPER.findall(about))),
        kind.unit,
        None if made is None else made.group_size,
        [] if made is None else sorted(made.needs),
        list(_parameters(kind)),
        _metrics(kind),
    )


def _module_text(kind: type) -> str:
    module = inspect.getmodule(kind)
    return inspect.cleandoc(module.__doc__ or "") if module else ""


def _with_defaults(kind: "type[Algorithm]") -> "Algorithm | None":
    """Return the algorithm with its defaults, or None where a parameter has no default."""
    try:
        return kind()
    except (TypeError, ConfigError):
        return None


def _metrics(kind: type) -> dict[str, str]:
    """Return what its file says of its metrics, then those that it extends, then its parts."""
    parents = [one for one in kind.__mro__ if is_dataclass(one)]
    parts = [t for t in get_type_hints(kind).values() if isinstance(t, type) and is_dataclass(t)]
    found: dict[str, str] = {}
    for one in (*parents, *parts):
        for sentence in _sentences(one):
            several = len(_METRIC.findall(sentence)) > 1
            for name in _METRIC.findall(sentence):
                own = re.sub(rf"^`train/{name}`,? (is )?", "", sentence)
                found.setdefault(name, sentence if several else own)
    return found


def _sentences(kind: type) -> Iterator[str]:
    """Yield the parts of paragraphs about metrics, each with the names that it begins with."""
    texts = (_module_text(kind), inspect.cleandoc(vars(kind).get("__doc__") or ""))
    about = "\n".join(part for text in texts for part in _BEFORE_METRICS.split(text)[1:])
    plain = re.sub(r"^Metrics(?: of all)?:\s*", "", " ".join(about.split()))
    for part in re.split(r"[;.,]\s+(?=`train/)", plain):
        yield part.rstrip(" ;.,")


def _parameters(kind: Any, prefix: str = "") -> Iterator[Parameter]:
    from ...operators.parameters import keys_of

    meanings = _meanings(kind)
    types, keys = get_type_hints(kind, include_extras=True), keys_of(kind)
    own = vars(kind).get("__annotations__", {})
    for field in sorted(fields(kind), key=lambda field: field.name not in own):
        name, type_ = field.name, types[field.name]
        if not field.init:
            continue
        if is_dataclass(type_):
            yield from _parameters(type_, f"{prefix}{name}.")
            continue
        default = None if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield Parameter(prefix + keys[name], _type_name(type_), default, meanings.get(name, ""))


def _type_name(kind: Any) -> str:
    """Return an annotation as a reader wants it: without its checks.

    >>> from typing import Annotated, Literal
    >>> _type_name(Annotated[float, "x"] | None), _type_name(Literal["a", "b"])
    ('float | null', 'a | b')
    """
    if kind is type(None):
        return "null"
    if hasattr(kind, "__metadata__"):
        return _type_name(get_args(kind)[0])
    parts = get_args(kind)
    if parts and (get_origin(kind) not in (list, tuple, dict)):
        return " | ".join(dict.fromkeys(p if isinstance(p, str) else _type_name(p) for p in parts))
    return getattr(kind, "__name__", str(kind))


def _meanings(kind: type) -> dict[str, str]:
    """Return the string under each field, the nearest class first.

    Pydantic reads such strings of the class itself only, and most fields here are inherited.
    """
    found: dict[str, str] = {}
    for one in kind.__mro__:
        if not is_dataclass(one):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(tree, ast.ClassDef), "a dataclass is written as a class"
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=meaning)),
                ):
                    found.setdefault(name, " ".join(str(meaning).split()))
    return found
