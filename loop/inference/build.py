"""From a configuration to engines, and to the policies that workflows ask beside their own."""

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ...operators.async_map import run_apart
from ...store.errors import ConfigError
from ..config import EngineConfig, FrozenModel, OtherModel
from .chat_policy import ChatPolicy
from .engine import Engine
from .policy import Sampling

if TYPE_CHECKING:
    from .endpoint.policy import EndpointPolicy


def start(config: EngineConfig, folder: Path, model: FrozenModel) -> Engine:
    """Start the engine that a configuration names, with the model of a folder.

    Raises ConfigError when it cannot serve weights that change.
    """
    if config.transformers is not None:
        from ..models.load import load_folder, put
        from .transformers_engine.engine import TransformersEngine

        network, tokenizer = load_folder(folder, dtype=model.dtype)
        return TransformersEngine(put(network, model.device), tokenizer, config.transformers)
    if config.vllm is not None:
        from .vllm_engine.engine import VllmEngine

        return VllmEngine(folder, config.vllm, dtype=model.dtype)
    raise ConfigError("an endpoint answers messages; it is no engine that takes weights")


def answering(
    config: EngineConfig, folder: Path, model: FrozenModel, *, sampling: Sampling
) -> "ChatPolicy | EndpointPolicy":
    """Return a policy that speaks through the engine that a configuration names.

    An endpoint's answers as it is, and follows no weights.
    """
    if config.endpoint is not None:
        from .endpoint.policy import EndpointPolicy

        return EndpointPolicy(config.endpoint, sampling=sampling)
    engine = start(config, folder, model)
    return ChatPolicy(engine, sampling=sampling, tool_call_format=model.tool_call_format)


def others(
    models: Mapping[str, OtherModel], *, seed: int
) -> "dict[str, ChatPolicy | EndpointPolicy]":
    """Return the policies that workflows ask beside their own, by the names of parameters.

    When one does not start, those that did are closed.
    """
    with ExitStack() as started:
        made: dict[str, ChatPolicy | EndpointPolicy] = {}
        started.callback(lambda: run_apart(close(made.values())))
        for name, model in models.items():
            made[name] = _other(model, seed)
        started.pop_all()
    return made


async def close(policies: "Iterable[ChatPolicy | EndpointPolicy]") -> None:
    """Free what policies hold, engines and connections, also when one of them fails."""
    async with AsyncExitStack() as closing:
        for policy in policies:
            if isinstance(policy, ChatPolicy):
                closing.push_async_callback(policy.engine.close)
            else:
                closing.callback(policy.close)


def _other(config: OtherModel, seed: int) -> "ChatPolicy | EndpointPolicy":
    sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens)
    if config.endpoint is not None:
        from .endpoint.policy import EndpointPolicy

        return EndpointPolicy(config.endpoint, sampling=sampling)
    if config.engine.vllm is not None:
        assert config.path is not None, "vLLM serves folders, and the run's are located"
        return answering(config.engine, Path(config.path), config, sampling=sampling)
    from ..models.load import load, put
    from .transformers_engine.engine import TransformersEngine

    network, tokenizer = load(config, seed=seed)
    engine = TransformersEngine(put(network, config.device), tokenizer, config.engine.transformers)
    return ChatPolicy(engine, sampling=sampling, tool_call_format=config.tool_call_format)
