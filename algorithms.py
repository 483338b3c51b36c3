"""Parts of new algorithms: base classes, losses, packaged algorithms, and single updates to test.

>>> from rlake.algorithms import GRPO, PolicyGradient
>>> issubclass(GRPO, PolicyGradient)
True
"""

from .loop.algorithms import names, resolve
from .loop.algorithms.dpo import DPO
from .loop.algorithms.grpo import GRPO
from .loop.algorithms.ppo import PPO
from .loop.algorithms.sft import SFT
from .loop.config import TinyModel, TrainerConfig
from .loop.losses import Algorithm, Loss, NonNegative, PolicyGradient, Positive, aggregate
from .loop.losses.batch import Batch, Examples, examples
from .loop.models.load import make_tiny
from .loop.trainer.networks import Networks
from .loop.trainer.step import Updater

__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "Algorithm",
    "Batch",
    "Examples",
    "Loss",
    "Networks",
    "NonNegative",
    "PolicyGradient",
    "Positive",
    "TinyModel",
    "TrainerConfig",
    "Updater",
    "aggregate",
    "examples",
    "make_tiny",
    "names",
    "resolve",
]
