"""The configuration of a run: one typed tree, from YAML or Python, with unknown keys refused."""

from .base import Section
from .distributed import KeepConfig, ParallelConfig, check_shard
from .engines import Endpoint, EngineConfig, OtherModel, SamplingConfig
from .evaluate import EvaluateConfig
from .explorer import ExplorerConfig
from .load import recipes
from .model import CriticConfig, FrozenModel, LoraConfig, ModelConfig, TinyModel
from .ray import ClusterConfig, PlaceConfig
from .run import RunConfig, build, load
from .sampler import SamplerConfig, SourceConfig
from .schedule import ScheduleConfig
from .serve import LimitsConfig, ServeConfig
from .stages import Stage, build_stages, load_stages
from .tasks import DataConfig, SelectorConfig, TasksConfig
from .trainer import TrainerConfig

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
