"""Reinforcement fine-tuning of language models with the data at the center.

The repository's root is this package: the folder `store/` is imported as `rlake.store`.
Importing `rlake` loads nothing else; each public name below loads its module when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import algorithms as algorithms
    from . import recipes as recipes
    from .loop.api import Run as Run
    from .loop.api import evaluate as evaluate
    from .loop.api import run as run
    from .loop.api import serve as serve
    from .loop.api import train as train
    from .loop.chat_api.recording import record as record
    from .loop.config import RunConfig as RunConfig
    from .loop.environments.tools import tool as tool
    from .loop.evaluation.result import Evaluation as Evaluation
    from .loop.inference.build import load_policy as load_policy
    from .loop.inference.policy import Policy as Policy
    from .loop.trajectories.conversation import Conversation as Conversation
    from .operators import Operator as Operator
    from .operators import operator as operator
    from .pipelines import Pipeline as Pipeline
    from .pipelines import rescore as rescore
    from .store import Experience as Experience
    from .store import RlakeError as RlakeError
    from .store import Store as Store
    from .store import Task as Task
    from .store import connect as connect
    from .store.files import export as export
    from .store.files import import_file as import_file
    from .store.replay import Prioritized as Prioritized
    from .store.replay import Sampler as Sampler

    __version__: str

_HOME = {
    "Experience": ".store",
    "RlakeError": ".store",
    "Store": ".store",
    "Task": ".store",
    "connect": ".store",
    "export": ".store.files",
    "import_file": ".store.files",
    "Prioritized": ".store.replay",
    "Sampler": ".store.replay",
    "Operator": ".operators",
    "operator": ".operators",
    "Pipeline": ".pipelines",
    "rescore": ".pipelines",
    "algorithms": ".algorithms",
    "recipes": ".recipes",
    "Evaluation": ".loop.evaluation.result",
    "Run": ".loop.api",
    "RunConfig": ".loop.config",
    "evaluate": ".loop.api",
    "run": ".loop.api",
    "serve": ".loop.api",
    "train": ".loop.api",
    "Conversation": ".loop.trajectories.conversation",
    "Policy": ".loop.inference.policy",
    "load_policy": ".loop.inference.build",
    "record": ".loop.chat_api.recording",
    "tool": ".loop.environments.tools",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = import_module("importlib.metadata").version("rlake")
        elif name in _HOME:
            home = import_module(_HOME[name], __name__)
            value = home if _HOME[name].endswith(f".{name}") else getattr(home, name)
        else:
            raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
        globals()[name] = value  # the next look-up no longer comes here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
