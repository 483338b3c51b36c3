"""The configuration of a run: one typed tree, from YAML or Python, with unknown keys refused."""

from .draws import SamplerConfig, SourceConfig
from .jobs import EvaluateConfig, ExplorerConfig, SamplingConfig, ScheduleConfig
from .model import ModelConfig, TinyModel
from .reading import build, load, recipes
from .section import Section
from .tasks import SelectorConfig, TasksConfig
from .trainer import TrainerConfig
from .tree import RunConfig

__all__ = [
    "EvaluateConfig",
    "ExplorerConfig",
    "ModelConfig",
    "RunConfig",
    "SamplerConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "Section",
    "SelectorConfig",
    "SourceConfig",
    "TasksConfig",
    "TinyModel",
    "TrainerConfig",
    "build",
    "load",
    "recipes",
]
