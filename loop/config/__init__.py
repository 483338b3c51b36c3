"""The configuration of a run: one typed tree, from YAML or Python, with unknown keys refused."""

from .base import Section
from .distributed import DistributedConfig, KeepConfig, check_divides
from .engines import Endpoint, EngineConfig, OtherModel, SamplingConfig
from .evaluate import EvaluateConfig
from .expect import ExpectConfig
from .explorer import ExplorerConfig
from .load import recipes
from .model import CriticConfig, FrozenModel, LoraConfig, ModelConfig, RopeParameters, TinyModel
from .ray import PlaceConfig, RayConfig
from .run import RunConfig, build, load
from .sampler import SamplerConfig, SourceConfig
from .schedule import ScheduleConfig
from .serve import LimitsConfig, ServeConfig
from .stages import Stage, build_stages, load_stages
from .tasks import DataConfig, SelectorConfig, TasksConfig
from .trainer import LrSchedulerConfig, OffloadConfig, TrainerConfig

__all__ = [
    "CriticConfig",
    "DataConfig",
    "DistributedConfig",
    "Endpoint",
    "EngineConfig",
    "EvaluateConfig",
    "ExpectConfig",
    "ExplorerConfig",
    "FrozenModel",
    "KeepConfig",
    "LimitsConfig",
    "LoraConfig",
    "LrSchedulerConfig",
    "ModelConfig",
    "OffloadConfig",
    "OtherModel",
    "PlaceConfig",
    "RayConfig",
    "RopeParameters",
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
    "check_divides",
    "load",
    "load_stages",
    "recipes",
]
