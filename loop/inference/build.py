"""From a configuration to policies: the run's own, and the auxiliary ones that workflows call."""

from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...operators.concurrency import run_apart
from ...store.tables import Tables
from ..config import EngineConfig, ExplorerConfig, FrozenModel, ModelConfig, OtherModel
from .chat_policy import ChatPolicy
from .policy import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from .endpoint.policy import EndpointPolicy


def start_policy(
    config: EngineConfig,
    folder: Path,
    model: FrozenModel,
    *,
    sampling: Sampling,
    store: Tables | None = None,
) -> "ChatPolicy | EndpointPolicy":
    """Start an engine with the model of a folder, and return the policy that samples with it.

    An endpoint serves its own model, whatever the folder. Images are read from the `store`.
    """
    if config.endpoint is not None:
        from .endpoint.policy import EndpointPolicy

        return EndpointPolicy(config.endpoint, sampling=sampling, model=model, store=store)
    if config.vllm is not None:
        from ..models.images import images_in
        from .vllm_engine.engine import VllmEngine

        images = images_in(folder, store)
        engine = VllmEngine(folder, config.vllm, dtype=model.dtype, model=model, images=images)
        return ChatPolicy(engine, sampling=sampling, images=images, **answer_formats(model))
    if config.sglang is not None:
        from .sglang_engine.engine import SglangEngine

        engine = SglangEngine(folder, config.sglang, dtype=model.dtype, model=model)
        return ChatPolicy(engine, sampling=sampling, **answer_formats(model))
    if config.tinker is not None:
        from .tinker_engine import TinkerEngine

        engine = TinkerEngine(folder, config.tinker)
        return ChatPolicy(engine, sampling=sampling, **answer_formats(model))
    from ..models.load import load_folder

    loaded = load_folder(folder, dtype=model.dtype, config=model)
    return in_process(*loaded, config, model, sampling=sampling, store=store)


def in_process(
    network: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    config: EngineConfig,
    model: FrozenModel,
    *,
    sampling: Sampling,
    store: Tables | None = None,
) -> ChatPolicy:
    """Return a policy that samples from a loaded model with the transformers engine."""
    from ..models.images import images_of
    from ..models.load import put
    from .transformers_engine.engine import TransformersEngine

    images = images_of(network, store)
    engine = TransformersEngine(
        put(network, model.device),
        tokenizer,
        config.transformers,
        images=images,
        record_experts=isinstance(model, ModelConfig) and model.router_replay,
    )
    return ChatPolicy(engine, sampling=sampling, images=images, **answer_formats(model))


def answer_formats(model: FrozenModel) -> dict[str, Any]:
    """Return how the answers of a model are read."""
    return {"tool_call_format": model.tool_call_format, "reasoning_format": model.reasoning_format}


def start_auxiliary(
    models: Mapping[str, OtherModel], *, seed: int, store: Tables | None = None
) -> "dict[str, ChatPolicy | EndpointPolicy]":
    """Return the auxiliary policies by the names of the workflow's parameters.

    If one does not start, those already started are closed.
    """
    with ExitStack() as started:
        made: dict[str, ChatPolicy | EndpointPolicy] = {}
        started.callback(lambda: run_apart(close(made.values())))
        for name, model in models.items():
            made[name] = _auxiliary(model, seed, store)
        # All have started: leaving the block must not close them.
        started.pop_all()
    return made


async def close(policies: "Iterable[ChatPolicy | EndpointPolicy]") -> None:
    """Free the engines and connections of policies, even if one of them fails."""
    async with AsyncExitStack() as closing:
        for policy in policies:
            if isinstance(policy, ChatPolicy):
                closing.push_async_callback(policy.engine.close)
            else:
                closing.callback(policy.close)


def load_policy(
    model: str | Path | Mapping[str, Any], *, seed: int = 0, **sampling: Any
) -> ChatPolicy:
    """Load a model into this process as a policy that samples with transformers.

    >>> tiny = {"from_scratch": {"hidden_size": 16, "layers": 1, "heads": 2}}
    >>> policy = load_policy(tiny, max_tokens=4)
    >>> policy.version, policy.sampling.max_tokens
    (0, 4)

    `model` is a folder, a Hugging Face name, or a section `model` of a configuration; `sampling`
    are settings of the section `sampling`. Raises ConfigError for a model that cannot be loaded.
    """
    from ..models.load import load

    given = dict(model) if isinstance(model, Mapping) else {"path": str(model)}
    config, engine = FrozenModel.model_validate(given), ExplorerConfig().engine
    return in_process(*load(config, seed=seed), engine, config, sampling=Sampling(**sampling))


def _auxiliary(
    config: OtherModel, seed: int, store: Tables | None
) -> "ChatPolicy | EndpointPolicy":
    sampling = Sampling(temperature=config.temperature, max_tokens=config.max_tokens)
    if config.endpoint is not None:
        engine = EngineConfig(endpoint=config.endpoint)
        return start_policy(engine, Path(), config, sampling=sampling, store=store)
    if config.engine.vllm is not None or config.engine.sglang is not None:
        assert config.path is not None, "they serve folders, and the models of runs are resolved"
        folder = Path(config.path)
        return start_policy(config.engine, folder, config, sampling=sampling, store=store)
    from ..models.load import load

    loaded = load(config, seed=seed)
    return in_process(*loaded, config.engine, config, sampling=sampling, store=store)
