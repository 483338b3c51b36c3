"""The configuration of a run: one typed tree, from YAML or Python, with unknown keys refused."""

from .cluster import ClusterConfig, PlaceConfig
from .data import DataConfig
from .draws import SamplerConfig, SourceConfig
from .engines import Endpoint, EngineConfig, OtherModel
from .jobs import ExplorerConfig, SamplingConfig, ScheduleConfig
from .measuring import EvaluateConfig
from .model import FrozenModel, ModelConfig, TinyModel
from .networks import CriticConfig, LoraConfig
from .parallel import KeepConfig, ParallelConfig, check_shard
from .reading import build, load, recipes
from .section import Section
from .serving import LimitsConfig, ServeConfig
from .stages import Stage, build_stages, load_stages
from .tasks import SelectorConfig, TasksConfig
from .trainer import TrainerConfig
from .tree import RunConfig

__all__ = [
    "ClusterConfig",
    "CriticConfig",
    "DataConfig",
    "Endpoint",
    "EngineConfig",
    "EvaluateConfig",
    "ExplorerConfig",
    "FrozenModel",
    "KeepConfig",
    "LimitsConfig",
    "LoraConfig",
    "ModelConfig",
    "OtherModel",
    "ParallelConfig",
    "PlaceConfig",
    "RunConfig",
    "SamplerConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "Section",
    "SelectorConfig",
    "ServeConfig",
    "SourceConfig",
    "Stage",
    "TasksConfig",
    "TinyModel",
    "TrainerConfig",
    "build",
    "build_stages",
    "check_shard",
    "load",
    "load_stages",
    "recipes",
]
