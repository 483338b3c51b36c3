"""A model in two versions, for the engines whose weights change while they run."""

import pytest
from support.tiny_models import tiny
from support.vllm_engines import SPEC, written
from transformers import PreTrainedModel

from rlake.loop.inference import Weights


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Two versions of the weights of one model, as a trainer publishes them."""
    return [written(tmp_path_factory.mktemp("weights") / str(i), i) for i in range(2)]


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """The models of these versions."""
    return [tiny(seed=i, **SPEC)[0].eval() for i in range(2)]
