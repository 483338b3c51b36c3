"""Reinforcement fine-tuning of language models whose centre is data.

The repository's root is this package: the folder `store/` is imported as `rlake.store`.
Importing `rlake` loads nothing else; each public name below loads its module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loop.environments.tools import tool as tool
    from .loop.inference.policy import Policy as Policy
    from .loop.trajectories.conversation import Conversation as Conversation
    from .operators import Operator as Operator
    from .operators import operator as operator
    from .pipelines import Pipeline as Pipeline
    from .store import Experience as Experience
    from .store import Store as Store
    from .store import Task as Task
    from .store import connect as connect

_HOME = {
    "Experience": ".store",
    "Store": ".store",
    "Task": ".store",
    "connect": ".store",
    "Operator": ".operators",
    "operator": ".operators",
    "Pipeline": ".pipelines",
    "Conversation": ".loop.trajectories.conversation",
    "Policy": ".loop.inference.policy",
    "tool": ".loop.environments.tools",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
        value = getattr(import_module(_HOME[name], __name__), name)
        globals()[name] = value  # the next look-up no longer comes here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
