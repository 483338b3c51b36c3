"""The networks of a run: policy, and the reference, teacher and critic that its algorithm needs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ...store import Store
from ...store.errors import ConfigError, JobError
from ..algorithms import Algorithm
from ..config import ExplorerConfig, FrozenModel, RunConfig, TrainerConfig
from ..models import routers
from ..models.attention import set_attention
from ..models.images import Images, images_of, is_vision
from ..models.lm_head import LOGITS_BYTES
from ..models.load import load, max_length, put, vocabulary
from ..models.lora import adapter_part, add_adapter, has_adapter, switched_off
from ..models.routers import Routing
from ..models.state_dict import difference
from ..models.token_logprobs import Scorer
from ..models.value_heads import Critic, SequenceScorer, is_reward_model, load_reward_model
from .tinker_backend import TinkerPolicy, TinkerScorer, architecture


@dataclass
class Networks:
    """The networks of a run; only `policy` and `critic` are trained."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None = None
    """The model that KL penalties refer to; by default the initial policy."""
    teacher: PreTrainedModel | None = None
    """The model that the policy is distilled from."""
    critic: nn.Module | None = None
    """The value network: token_ids [B, T] -> values [B, T]."""
    packing: bool | None = None
    """Whether sequences are packed without padding; None: if a model supports it."""
    max_logits_bytes: int = LOGITS_BYTES
    """Most bytes of logits in memory at once."""
    dtype: str = "float32"
    """Type of the policy's weights in engines; the trained ones are float32."""
    routing: Routing | None = None
    """What the policy's routers choose, if that is replayed or balanced."""
    served: TinkerPolicy | None = None
    """The server that has the policy's weights, of which `policy` is then the architecture."""

    @cached_property
    def device(self) -> torch.device:
        """The device that computes; offloaded parameters are elsewhere."""
        return self.policy.device if self.served is None else torch.device("cpu")

    @cached_property
    def scorer(self) -> Scorer | SequenceScorer | TinkerScorer:
        """Computes the policy's log-probs, or the scores of a reward model."""
        if self.served is not None:
            return self.served.scorer
        if is_reward_model(self.policy):
            return SequenceScorer(self.policy)
        # One object for the whole run: FSDP shards the module in place.
        made = Scorer(self.policy, packing=self.packing, max_logits_bytes=self.max_logits_bytes)
        made.routing = self.routing
        return made

    @cached_property
    def scorers(self) -> dict[str, nn.Module]:
        """Compute the log-probs of the networks that are not trained, by name."""
        others = {"reference": self.reference, "teacher": self.teacher}
        # `packing: true` is a demand on the policy only; the others pack if they can.
        found = {
            name: Scorer(
                model, packing=self.packing and None, max_logits_bytes=self.max_logits_bytes
            )
            for name, model in others.items()
            if model is not None
        }
        if (scorer := found.get("reference")) is not None:
            scorer.routing = self._routing_of(scorer.model)
        if self.reference is None and self.served is not None:
            return {**found, "reference": self.served.reference}
        if self.reference is None and has_adapter(self.policy):
            assert isinstance(self.scorer, Scorer), "a reward model has no adapter"
            return {**found, "reference": WithoutAdapter(self.scorer)}
        return {**found}

    def show(self, store: Store) -> Images | None:
        """Let the networks see the store's images; return these, None for models of text."""
        found = images_of(self.policy, store)
        for scorer in (self.scorer, *self.scorers.values()):
            if isinstance(scorer, Scorer):
                scorer.images = images_of(scorer.model, store)
        return found

    def _routing_of(self, model: PreTrainedModel) -> Routing | None:
        """Return how a reference replays the policy's experts, if it has as many.

        Otherwise the KL divergence would be that of other experts, even to equal weights.
        """
        own = self.routing
        if own is None or not own.is_replay or routers.of(model) != own.shape:
            return None
        return routers.prepared(model)

    @property
    def replayed_experts(self) -> tuple[int, int, int] | None:
        """The numbers of layers, of experts for a token, and of experts, if they are replayed."""
        is_replay = self.routing is not None and self.routing.is_replay
        return self.routing.shape if self.routing is not None and is_replay else None

    @property
    def max_length(self) -> int | None:
        """Most tokens of a sequence that all networks accept; None: no limit."""
        models = (self.policy, self.reference, self.teacher, getattr(self.critic, "backbone", None))
        limits = [max_length(model) for model in models if model is not None]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def trained(self) -> dict[str, nn.Module]:
        """The trained networks of this process, by name."""
        own = {"policy": self.policy} if self.served is None else {}
        return own | ({"critic": self.critic} if self.critic else {})


class WithoutAdapter(nn.Module):
    """Computes the log-probs of a policy without its adapter, which is the initial policy."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, *args: Any, **options: Any) -> dict[str, Tensor]:
        """Return the statistics of the policy's scorer with the adapter disabled."""
        with switched_off(self.scorer):
            return self.scorer(*args, **options)


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """Set a model to evaluation mode, without gradients, and return it."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    return model.eval()


def build(config: RunConfig, algorithm: Algorithm) -> tuple[Networks, PreTrainedTokenizerFast]:
    """Load the networks that a run and its algorithm need; return the tokenizer too.

    Raises ConfigError for a model that cannot be loaded, or has another vocabulary than the policy.
    """
    if algorithm.network == "reward_model":
        return _reward_model(config)
    check_teacher(config, algorithm)
    networks, tokenizer = _policy(config)
    _check_vision(networks.policy, algorithm)
    others = _Loader(config, tokenizer)
    is_here = not has_adapter(networks.policy) and networks.served is None
    if "reference" in algorithm.needs and (config.trainer.reference or is_here):
        networks.reference = others.frozen("reference", config.trainer.reference or config.model)
    if config.trainer.teacher is not None and algorithm.needs & _TAUGHT:
        networks.teacher = others.frozen("teacher", config.trainer.teacher)
    if algorithm.needs & {"values", "old_values"}:
        networks.critic = others.critic()
    _prepare_passes(networks, config.trainer)
    return networks, tokenizer


def _check_vision(policy: PreTrainedModel, algorithm: Algorithm) -> None:
    needs = algorithm.needs & {"values", "old_values", "vocabulary"}
    if needs and is_vision(policy.config):
        what = "another model's whole distribution" if "vocabulary" in needs else "a critic"
        raise ConfigError(
            f"`{type(algorithm).__name__}` needs {what}, which reads no images, and the policy is "
            "a vision-language model; take grpo, sft, dpo, or another that needs none"
        )


def _policy(config: RunConfig) -> tuple[Networks, PreTrainedTokenizerFast]:
    """Load the policy, or begin one at the server that trains it; return the tokenizer too."""
    if (settings := config.trainer.backend.tinker) is not None:
        policy, tokenizer = architecture(config.model)
        base = settings.base_model or str(config.model.path)
        served = TinkerPolicy(settings, policy, base=base, seed=config.seed)
        return Networks(policy, dtype=config.model.dtype, served=served), tokenizer
    policy, tokenizer = load(_trained(config), seed=config.seed)
    if config.model.lora is not None:
        add_adapter(policy, config.model.lora, seed=config.seed)
    # After the adapter is added: `trainer.freeze` then names parameters of the adapter.
    freeze(policy, config.trainer.freeze)
    packing = config.trainer.packing
    networks = Networks(
        placed(policy, config.model),
        packing=None if packing == "auto" else packing,
        max_logits_bytes=config.trainer.max_logits_bytes,
        dtype=config.model.dtype,
    )
    if config.model.router_replay or config.trainer.router_aux_loss_coef:
        networks.routing = routers.prepared(policy)
        networks.routing.is_replay = config.model.router_replay
    return networks, tokenizer


def _prepare_passes(networks: Networks, config: TrainerConfig) -> None:
    """Set how the trained networks compute."""
    for network in networks.trained.values():
        if config.gradient_checkpointing:
            checkpoint_activations(network)
        if config.compile:
            compile_layers(network)


def _trained(config: RunConfig) -> FrozenModel:
    """Return the run's model in float32: in a smaller type, small updates would be lost."""
    return config.model.model_copy(update={"dtype": "float32"})


_TAUGHT = frozenset({"teacher_logprobs", "vocabulary"})
"""Columns that a teacher computes."""


def check_teacher(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError if an algorithm needs a teacher, and nothing can provide its log-probs.

    They may be stored with rows, or come from a workflow or an operator.
    """
    explorer, trainer = config.explorer, config.trainer
    if trainer.teacher is not None or not algorithm.needs & _TAUGHT:
        return
    is_given = "vocabulary" not in algorithm.needs and (
        explorer is None
        or all(map(_scores, config.explorers.values()))
        or explorer.operators
        or trainer.operators
    )
    if not is_given:
        name = (
            config.algorithm if isinstance(config.algorithm, str) else next(iter(config.algorithm))
        )
        raise ConfigError(
            f"`{name}` learns from a teacher, which is missing; name a model in `trainer.teacher`"
        )


def _scores(explorer: ExplorerConfig) -> bool:
    """Return whether a workflow may compute a teacher's log-probs: ours does, a user's may."""
    given = explorer.workflow
    name = given if isinstance(given, str) else next(iter(given), "")
    if name != "on_policy_distillation":
        return ":" in name
    teacher = explorer.auxiliary_models.get("teacher")
    if teacher is not None and teacher.endpoint is not None:
        raise ConfigError(
            "`explorer.auxiliary_models.teacher` is an endpoint, which cannot score given tokens; "
            "take a model of a folder (`path`) or of a run (`run`)"
        )
    served = teacher is not None and (teacher.engine.vllm or teacher.engine.sglang)
    if served and explorer.sampling.temperature not in (0, 1):
        raise ConfigError(
            "`explorer.auxiliary_models.teacher` is on vLLM or SGLang, which score given tokens at "
            f"temperature 1, and explorer.sampling.temperature is {explorer.sampling.temperature:g}"
            "; set it to 1, or take the teacher's `engine: transformers`"
        )
    return True


def _reward_model(config: RunConfig) -> tuple[Networks, PreTrainedTokenizerFast]:
    """Load the reward model that is trained; it needs no other network."""
    if config.model.lora is not None:
        raise ConfigError("`model.lora` is for policies; a reward model is trained as a whole")
    model, tokenizer = load_reward_model(_trained(config), seed=config.seed)
    freeze(model, config.trainer.freeze)
    networks = Networks(placed(model, config.model), dtype=config.model.dtype)
    _prepare_passes(networks, config.trainer)
    return networks, tokenizer


def placed(model: PreTrainedModel, config: FrozenModel, *, key: str = "model") -> PreTrainedModel:
    """Move a model to its device, and set its attention; `key` is its section."""
    return set_attention(put(model, config.device), config.attention, key=f"{key}.attention")


def checkpoint_activations(network: nn.Module) -> None:
    """Make the layers of a network recompute their activations in the backward pass."""
    for module in network.modules():
        if isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing:
            # reentrant checkpointing gives no gradients where a layer's inputs need none, as those
            # of a frozen embedding below an adapter
            module.gradient_checkpointing_enable({"use_reentrant": False})


def layers(root: nn.Module) -> list[nn.Module]:
    """Return the layers of the language models within a module."""
    names = {name for module in root.modules() for name in _whole(module)}
    return [module for module in root.modules() if type(module).__name__ in names]


def _whole(module: nn.Module) -> Iterable[str]:
    """Return the names of the layer classes that transformers says must not be divided."""
    named = (
        getattr(module, "_no_split_modules", None) if isinstance(module, PreTrainedModel) else ()
    )
    return named or ()


def compile_layers(network: nn.Module) -> None:
    """Compile the layers of a network where they are; their parameters keep their names.

    Raises ConfigError if the machine has no compiler. Layers are compiled and not the whole: they
    are alike, so that all run the code of one.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError) as error:
        raise ConfigError(
            "`trainer.compile` is true, and no C++ compiler was found; install g++, name one in "
            "the variable CXX, or set `trainer.compile` to false"
        ) from error
    for layer in layers(network):
        layer.compile(dynamic=True)


@dataclass(frozen=True)
class _Loader:
    """Loads the other networks of a run, which must have the policy's vocabulary."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerFast

    def frozen(self, name: str, config: FrozenModel) -> PreTrainedModel:
        key = f"trainer.{name}"
        return frozen(placed(self._loaded(key, config), config, key=key))

    def critic(self) -> Critic:
        path, given = self.config.trainer.critic.path, _trained(self.config)
        if path is not None:
            given = FrozenModel(
                path=path,
                device=given.device,
                attention=given.attention,
                rope_parameters=given.rope_parameters,
            )
        return Critic(placed(self._loaded("trainer.critic", given), given))

    def _loaded(self, name: str, config: FrozenModel) -> PreTrainedModel:
        try:
            model, tokenizer = load(config, seed=self.config.seed)
        except ConfigError as error:
            raise ConfigError(f"`{name}`: {error}") from error
        message = _other_tokens(self.tokenizer, tokenizer)
        if message is not None:
            raise ConfigError(
                f"`{name}` has another vocabulary than the policy: {message}; take a model with "
                "the policy's"
            )
        if vocabulary(model) < len(self.tokenizer):
            raise ConfigError(
                f"`{name}` has {vocabulary(model)} tokens, the policy's tokenizer has "
                f"{len(self.tokenizer)}; take a model with the policy's vocabulary"
            )
        return model


def _other_tokens(ours: PreTrainedTokenizerFast, theirs: PreTrainedTokenizerFast) -> str | None:
    """Return how the tokens of two tokenizers differ, or None."""
    one, other = ours.get_vocab(), theirs.get_vocab()
    if one == other:
        return None
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    first = names[0]
    return (
        f"`{first}` is {_token(other.get(first))} there and {_token(one.get(first))} here, and "
        f"{len(names) - 1} more differ"
    )


def _token(number: int | None) -> str:
    return "no token" if number is None else f"token {number}"


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose name has a match for one of the patterns.

    A parameter with several names, such as tied weights, is frozen if any of them matches. Raises
    ConfigError for a pattern that matches nothing, and if no trained parameter remains.
    """
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]
    for pattern in patterns:
        found = [parameter for name, parameter in named if re.search(pattern, name)]
        if not found:
            raise ConfigError(
                f"`trainer.freeze` names `{pattern}`, and no trained parameter of the policy "
                f"matches; some of their names are {_some(named)}"
            )
        for parameter in found:
            parameter.requires_grad = False
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"`trainer.freeze` matches all trained parameters of the policy, such as "
            f"{_some(named)}; leave some to be trained"
        )


def _some(named: Sequence[tuple[str, object]]) -> str:
    places = sorted({0, len(named) // 2, len(named) - 1})
    return ", ".join(f"`{named[place][0]}`" for place in places)


def learned(network: nn.Module) -> dict[str, Any]:
    """Return the state that training changes: only the adapter's, if the network has one."""
    state = network.state_dict()
    return adapter_part(state) if has_adapter(network) else state


def learn_from(name: str, network: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state that `learned` returned; JobError if it belongs to another network."""
    message = difference(learned(network), state)
    if message is not None:
        raise JobError(
            f"the checkpoint is of another {name}: {message}; restore the model that the run was "
            "started with, or name a new run with `--set name=...`"
        )
    # Not strict: `learned` leaves out what training does not change. Names were compared above.
    network.load_state_dict(state, strict=False)
