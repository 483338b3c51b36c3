"""A model in two versions, for the engines whose weights change while they run."""

from collections.abc import Iterator

import pytest
from support.sglang import SglangServer, running
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


@pytest.fixture(scope="module")
def server(
    versions: list[Weights], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SglangServer]:
    """A real SGLang server that starts with the first version."""
    assert versions[0].folder is not None
    with running(versions[0].folder, tmp_path_factory.mktemp("sglang")) as made:
        yield made
