"""Resolve names of operators and rewards: built-in functions, or `package.module:function`."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

from ..store.errors import OperatorError, nearest
from .apply import Operator
from .decorator import OperatorFunction
from .import_path import import_from, taken_apart

Spec = str | Mapping[str, Mapping[str, Any] | str | None]
"""An operator in YAML: `name`, or `{name: {parameter: value}}`."""

RECIPE = "data_juicer_recipe"
"""Name that stands for the operators of a recipe of Data-Juicer."""

_FORMER = {
    "best_of_group": "copy_best",
    "best_of_n": "top_k",
    "desirability": "kto_advantage",
    "keep_best": "top_k",
    "mix": "mix_tasksets",
    "thought": "extract_reasoning",
}
"""Former names of operators, for the hint in the error."""

_SHORT = {"data_juicer": "operator", RECIPE: "path"}
"""The parameter to which a plain string is assigned: `{data_juicer_recipe: recipe.yaml}`."""


def resolve(spec: Spec | Operator) -> Operator:
    """Build an operator from its name, or its name with parameters.

    >>> str(resolve({"drop_flat_groups": {"min_std": 0.1}}))
    'drop_flat_groups(min_std=0.1)'

    Raises OperatorError for an unknown name, or parameters that do not fit.
    """
    if isinstance(spec, Operator):
        return spec
    name, params = _with_short(spec)
    if ":" in name:
        found = import_from(name, "operator", error=OperatorError)
    else:
        known = public()
        if name not in known:
            now = f"; it is called `{_FORMER[name]}`" if name in _FORMER else nearest(name, known)
            raise OperatorError(f"unknown operator `{name}`{now}")
        found = known[name]
    if not isinstance(found, OperatorFunction):
        raise OperatorError(
            f"`{name}` is not an operator; put `@operator(kind)` above the function"
        )
    return found(**params)


def resolve_all(
    specs: Iterable[Spec | Operator], *, expand: Callable[[Mapping[str, Any]], list[Operator]]
) -> list[Operator]:
    """Build the operators of a list.

    `expand` returns the operators of a recipe of Data-Juicer.
    """
    found: list[Operator] = []
    for spec in specs:
        if isinstance(spec, Mapping) and list(spec) == [RECIPE]:
            found += expand(_with_short(spec)[1])
        else:
            found.append(resolve(spec))
    return found


def public() -> dict[str, OperatorFunction[...]]:
    """Return the built-in operators by name: the namespace of `rlake.operators` is the registry."""
    names = vars(import_module(__package__ or "")).items()
    return {n: v for n, v in names if isinstance(v, OperatorFunction) and not n.startswith("_")}


def _with_short(spec: Spec) -> tuple[str, dict[str, Any]]:
    for name, parameter in _SHORT.items():
        if isinstance(spec, Mapping) and isinstance(spec.get(name), str) and len(spec) == 1:
            return name, {parameter: spec[name]}
    return taken_apart(spec, "an operator", error=OperatorError)
