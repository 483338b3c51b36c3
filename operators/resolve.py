"""Names of operators and rewards: our public functions, or `package.module:function`."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import isfunction
from types import ModuleType
from typing import Any

from ..store.errors import OperatorError, nearest
from .apply import Operator
from .decorator import OperatorFunction
from .import_path import import_from

Spec = str | Mapping[str, Mapping[str, Any] | str | None]
"""An operator in YAML: `name`, or `{name: {parameter: value}}`."""

RECIPE = "data_juicer_recipe"
"""Name that stands for the operators of one of Data-Juicer's recipes."""

_SHORT = {"data_juicer": "operator", RECIPE: "path"}
"""The parameter that a text stands for: `{data_juicer_recipe: recipe.yaml}`."""


def resolve(spec: Spec | Operator) -> Operator:
    """Build the operator that a name, or a name with parameters, stands for.

    >>> str(resolve({"drop_flat_groups": {"min_std": 0.1}}))
    'drop_flat_groups(min_std=0.1)'

    Raises OperatorError for an unknown name, or parameters that do not fit.
    """
    if isinstance(spec, Operator):
        return spec
    name, params = _taken_apart(spec)
    if ":" in name:
        found = import_from(name, "operator", error=OperatorError)
    else:
        known = public()
        if name not in known:
            raise OperatorError(f"there is no operator `{name}`{nearest(name, known)}")
        found = known[name]
    if not isinstance(found, OperatorFunction):
        raise OperatorError(
            f"`{name}` is not an operator; put `@operator(kind)` above the function"
        )
    return found(**params)


def resolve_all(
    specs: Iterable[Spec | Operator],
    *,
    expand: Callable[[Mapping[str, Any]], list[Operator]],
) -> list[Operator]:
    """Build the operators that a list stands for.

    `expand` returns the operators of one of Data-Juicer's recipes, which stands for several.
    """
    found: list[Operator] = []
    for spec in specs:
        if isinstance(spec, Mapping) and list(spec) == [RECIPE]:
            found += expand(_taken_apart(spec)[1])
        else:
            found.append(resolve(spec))
    return found


def public() -> dict[str, OperatorFunction[...]]:
    """Return our operators by name: the namespace of `rlake.operators` is the registry."""
    names = vars(import_module(__package__ or "")).items()
    return {n: v for n, v in names if isinstance(v, OperatorFunction) and not n.startswith("_")}


def named(name: str | Callable[..., Any], home: ModuleType, what: str) -> Callable[..., Any]:
    """Return the function of module `home` with this name, or the one at `package.module:function`.

    A function is returned as it is.

    >>> from rlake.operators import rewards
    >>> named("exact_match", rewards, "reward").__name__
    'exact_match'
    """
    if not isinstance(name, str) or ":" in name:
        found = import_from(name, what, error=OperatorError)
        if not callable(found):
            raise OperatorError(f"{what} `{name}` is a {type(found).__name__}, expected a function")
        return found
    own = {n: f for n, f in vars(home).items() if isfunction(f) and _is_public(n, f, home)}
    if name not in own:
        raise OperatorError(f"there is no {what} `{name}`{nearest(name, own)}")
    return own[name]


def _is_public(name: str, function: Callable[..., Any], home: ModuleType) -> bool:
    if hasattr(home, "__all__"):
        return name in home.__all__
    return function.__module__ == home.__name__ and not name.startswith("_")


def _taken_apart(spec: Spec) -> tuple[str, dict[str, Any]]:
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping) or len(spec) != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OperatorError(
            f"an operator is `name` or `{{name: {{parameter: value}}}}`, got {spec!r}"
        )
    [(name, params)] = spec.items()
    if name in _SHORT and isinstance(params, str):
        return name, {_SHORT[name]: params}
    if params is not None and not isinstance(params, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OperatorError(f"parameters of `{name}` must be `parameter: value`, got {params!r}")
    return name, dict(params or {})
