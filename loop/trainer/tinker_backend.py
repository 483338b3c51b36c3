"""A policy whose weights are at a server of Tinker's API, and its log-probs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...store.errors import ConfigError, JobError
from ..algorithms import Algorithm
from ..config import FrozenModel, RunConfig
from ..config.backend import TinkerBackend
from ..models.chat_template import set_template
from ..models.lm_head import Temperature
from ..models.remote_weights import RemoteWeights
from ..tinker_api.client import TinkerClient
from .memory import skeleton

if TYPE_CHECKING:
    from tinker import Datum, TrainingClient
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class TinkerPolicy:
    """A low-rank adapter at a server; `scorer` computes its log-probs."""

    def __init__(
        self, settings: TinkerBackend, architecture: "PreTrainedModel", *, base: str, seed: int
    ) -> None:
        """Begin an adapter of the model that the server calls `base`.

        Raises JobError if the server does not answer, or does not have the model.
        """
        self.settings, self.architecture, self.base_model = settings, architecture, base
        self.client = TinkerClient(settings.base_url, request_timeout=settings.request_timeout)
        self.training: TrainingClient = self.client.call(
            lambda: self.client.service.create_lora_training_client(
                base_model=self.base_model, rank=settings.rank, seed=seed
            ),
            f"begin an adapter of `{self.base_model}`",
        )
        self.scorer = TinkerScorer(self)
        self.reference = BaseModelScorer(self)

    def save(self, name: str) -> RemoteWeights:
        """Keep the current adapter at the server under a new name, to be sampled from."""
        saved = self.client.wait(
            self.training.save_weights_for_sampler(name), f"save the weights `{name}`"
        )
        return RemoteWeights(
            path=saved.path, base_model=self.base_model, base_url=self.settings.base_url
        )


class _Scorer(nn.Module):
    """What both scorers share: rows without padding, and where their log-probs go."""

    packs = True
    """Whether sequences are packed without padding."""

    def __init__(self, policy: TinkerPolicy) -> None:
        super().__init__()
        self._policy = policy

    def logprobs(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """Return the log-prob of each token of some rows but the first."""
        raise NotImplementedError

    def forward(
        self,
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        temperature: Temperature = 1.0,
        statistics: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        """Return the log-probs of the tokens in the mask [B, T], 0 for the others."""
        assert tuple(statistics) == ("logprobs",), "`check_served` refuses other statistics"
        _check_temperature(temperature)
        rows = _rows(token_ids_BT, mask_BT)
        logprobs_BT = torch.zeros(mask_BT.shape)
        for place, found in zip(rows, self.logprobs(list(rows.values())), strict=True):
            logprobs_BT[place, 1 : 1 + len(found)] = torch.as_tensor(found)
        return {"logprobs": torch.where(mask_BT > 0, logprobs_BT, 0.0)}


class TinkerScorer(_Scorer):
    """Computes the trained policy's log-probs; their gradients wait here for the update."""

    def __init__(self, policy: TinkerPolicy) -> None:
        super().__init__(policy)
        self.pending: list[tuple[dict[int, list[int]], Tensor]] = []
        """The rows by their place, and the log-probs [B, T], of each pass with gradient."""

    def logprobs(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """Return the log-prob of each token of some rows but the first."""
        if not rows:  # the client refuses a request without any
            return []
        data = [datum(row, weights=torch.zeros(len(row) - 1)) for row in rows]
        policy = self._policy
        made = policy.client.wait(
            policy.training.forward(data, "cross_entropy"), "compute log-probs"
        )
        return [output["logprobs"].tolist() for output in made.loss_fn_outputs]

    def forward(
        self,
        token_ids_BT: Tensor,
        mask_BT: Tensor,
        *,
        temperature: Temperature = 1.0,
        statistics: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        """Return the log-probs of the tokens in the mask [B, T], 0 for the others."""
        found = super().forward(
            token_ids_BT, mask_BT, temperature=temperature, statistics=statistics
        )
        if torch.is_grad_enabled():
            found["logprobs"].requires_grad_()
            self.pending.append((_rows(token_ids_BT, mask_BT), found["logprobs"]))
        return found


class BaseModelScorer(_Scorer):
    """Computes the log-probs of the base model, which is the policy that training began with."""

    def logprobs(self, rows: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """Return the log-prob of each token of some rows but the first."""
        from tinker import ModelInput

        policy = self._policy
        what = "score with the base model"
        sampler = policy.client.call(
            lambda: policy.client.service.create_sampling_client(base_model=policy.base_model), what
        )
        asked = [sampler.compute_logprobs(ModelInput.from_ints(list(row))) for row in rows]
        return [
            _numbers(policy.client.wait(one, what), row)
            for one, row in zip(asked, rows, strict=True)
        ]


_DISTRIBUTIONS = frozenset({"entropy", "old_entropy", "old_discriminator", "vocabulary"})
_VALUES = frozenset({"values", "old_values"})
_OF_TORCH = (
    *("critic", "freeze", "weight_decay_params", "packing", "micro_batch_tokens"),
    *("max_logits_bytes", "precision", "gradient_checkpointing", "offload", "compile"),
    "distributed",
)
"""Keys of `trainer` that say how torch trains, of which a server knows nothing."""


def check_served(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise ConfigError for what a server of Tinker's API cannot do, before any work."""
    if config.trainer.backend.tinker is None:
        return
    if (problem := _refused(algorithm) or _unfit(config)) is not None:
        raise ConfigError(f"`trainer.backend` is tinker, and {problem}")


def _refused(algorithm: Algorithm) -> str | None:
    """Return which need of an algorithm a server does not meet, or None."""
    name, needs = type(algorithm).__name__, algorithm.needs | algorithm.companion_needs
    if algorithm.network == "reward_model":
        return f"`{name}` trains a reward model; servers train language models only"
    if needs & _VALUES:
        return f"`{name}` trains a value model, which servers do not; take grpo or another one"
    if found := sorted(needs & _DISTRIBUTIONS):
        return (
            f"`{name}` needs {found[0]}, which is of whole distributions, and servers return the "
            "log-probs of tokens only; leave out the part that needs it, such as `entropy_coef`"
        )
    return None


def _unfit(config: RunConfig) -> str | None:
    """Return which setting of a run has no meaning there, or None."""
    trainer, explorer, schedule = config.trainer, config.explorer, config.schedule
    if config.model.path is None or config.model.lora is not None:
        return (
            "`model` must have a `path`, a folder or hub name whose tokenizer and configuration "
            "are those of the server's model, and no `lora`: `rank` is the adapter's"
        )
    if config.model.rope_parameters is not None:
        return "the server has its own; leave `model.rope_parameters` out"
    if named := [key for key in _OF_TORCH if key in trainer.model_fields_set]:
        return f"`trainer.{named[0]}` is about torch here, which does not train; leave it out"
    if trainer.optimizer != "adamw" or trainer.optimizer_kwargs.keys() - {"eps"}:
        return "servers update by AdamW; leave `trainer.optimizer` out, and all kwargs but `eps`"
    if explorer is None:
        return None
    if explorer.engine.tinker is None:
        return (
            "the weights stay there, so that nothing else can sample; set `explorer.engine: tinker`"
        )
    if schedule.max_ahead or schedule.streaming:
        return (
            "the explorer may be ahead of the trainer by `schedule`; SkyRL samples from the "
            "weights as they are, so that they must not change meanwhile; take on_policy"
        )
    if schedule.weight_transport != "store":
        return "weights do not travel; leave `schedule.weight_transport` out"
    return None


def architecture(model: FrozenModel) -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Return a model without numbers, and its tokenizer; ConfigError if there is none."""
    from transformers import AutoTokenizer

    found = skeleton(model)  # first, since it says what is wrong with the path
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model.path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"`{model.path}` has no tokenizer that can be read: {str(error).splitlines()[0]}; set "
            "`model.path` to a folder or hub name that has the tokenizer of the server's model"
        ) from error
    set_template(tokenizer, model)
    return found, tokenizer


def _rows(token_ids_BT: Tensor, mask_BT: Tensor) -> dict[int, list[int]]:
    """Return the tokens up to the last one that counts, by the places of rows that have any."""
    # The first token of a row never counts, since nothing predicts it.
    last_B = (torch.arange(mask_BT.shape[1]) * (mask_BT > 0)).amax(1).tolist()
    ids = token_ids_BT.tolist()
    return {i: ids[i][: last + 1] for i, last in enumerate(last_B) if last}


def datum(row: Sequence[int], **inputs: Tensor) -> "Datum":
    """Return a row with what a loss needs of each token but the first."""
    from tinker import Datum, ModelInput

    targets = torch.tensor(row[1:])
    return Datum(
        model_input=ModelInput.from_ints(list(row[:-1])),
        loss_fn_inputs={"target_tokens": targets, **inputs},  # type: ignore[dict-item]
    )


def _numbers(found: Sequence[float | None], row: Sequence[int]) -> list[float]:
    """Return the log-probs of all tokens but the first, which some servers give as None."""
    return [float("nan") if x is None else x for x in found][-(len(row) - 1) :]


def _check_temperature(temperature: Temperature) -> None:
    given = torch.as_tensor(temperature)
    if (given != 1).any():
        other = given[given != 1].flatten()[0]
        raise JobError(
            f"a row was sampled at temperature {other:g}, and servers of Tinker's API compute "
            "log-probs at 1; leave such rows out with `trainer.where: temperature = 1`"
        )
