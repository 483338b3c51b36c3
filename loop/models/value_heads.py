"""Linear heads on a language model: the score of a sequence, and the value of each token."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ...store.errors import ConfigError
from ..config import FrozenModel
from .chat_template import set_template
from .load import load, pad_id
from .rope import scale_rope

_HEAD = "score"
"""The name of the layer in transformers."""


class SequenceScorer(nn.Module):
    """A model that scores sequences; all its work is in `forward`."""

    packs = False
    """Sequences are padded."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the score of each sequence [B], read at its last trained token.

        No attention mask is needed: causal attention never sees what is after that token.
        """
        hidden_BTD = self.model.base_model(
            input_ids=token_ids_BT, use_cache=False
        ).last_hidden_state
        places_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
        last_B = (places_T * (mask_BT > 0)).amax(1)
        hidden_BD = hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
        head = getattr(self.model, _HEAD)
        with torch.autocast(hidden_BD.device.type, enabled=False):
            return head(hidden_BD.to(head.weight.dtype))[:, 0].float()


def is_reward_model(model: nn.Module) -> bool:
    """Return whether a model gives each sequence one score."""
    head = getattr(model, _HEAD, None)
    return isinstance(head, nn.Linear) and head.out_features == 1


def load_reward_model(
    config: FrozenModel, *, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load a reward model, or create one from a language model, whose scores are all 0.

    `AutoModelForSequenceClassification` loads it with `num_labels=1`. Raises ConfigError for a
    folder that is neither, and for an architecture without such a head.
    """
    if config.from_scratch is None and _is_stored(str(config.path)):
        return _stored(config)
    policy, tokenizer = load(config, seed=seed)
    return of_policy(policy, tokenizer), tokenizer


def of_policy(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a reward model with the backbone of a language model."""
    from transformers import AutoModelForSequenceClassification

    policy.config.num_labels = 1
    policy.config.pad_token_id = pad_id(tokenizer)
    try:
        model = AutoModelForSequenceClassification.from_config(policy.config)
    except ValueError as error:
        raise ConfigError(
            f"`{type(policy).__name__}` cannot be a reward model: {str(error).splitlines()[0]}"
        ) from error
    if not is_reward_model(model):
        raise ConfigError(
            f"`{type(model).__name__}` has no linear layer `{_HEAD}` to one number; take another "
            "architecture, such as Qwen3 or Llama"
        )
    model = model.to(dtype=policy.dtype)
    model.base_model.load_state_dict(policy.base_model.state_dict())
    nn.init.zeros_(getattr(model, _HEAD).weight)
    model.config.architectures = [type(model).__name__]
    return model


def _is_stored(path: str) -> bool:
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(path).architectures
    except (OSError, ValueError):  # `load` then raises the error
        return False
    return any(name.endswith("ForSequenceClassification") for name in found or ())


def _stored(config: FrozenModel) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    path, dtype = str(config.path), getattr(torch, config.dtype)
    try:
        settings = AutoConfig.from_pretrained(path)
        scale_rope(settings, config.rope_parameters)
        model = AutoModelForSequenceClassification.from_pretrained(
            path, config=settings, dtype=dtype
        )
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            f"`{path}` is not a reward model that can be loaded: {str(error).splitlines()[0]}"
        ) from error
    if not is_reward_model(model):
        raise ConfigError(f"`{path}` gives {model.config.num_labels} numbers, expected one score")
    set_template(tokenizer, config)
    return model, tokenizer


class Critic(nn.Module):
    """A language model's backbone and a linear layer to one number, which starts at 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = model.get_decoder()
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return the value of the state before each token [B, T]; 0 for the first.

        No attention mask is needed: padding is on the right, which causal attention never sees.
        """
        hidden_BTD = self.backbone(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            values_BT = self.head(hidden_BTD[:, :-1].float())[..., 0]
        return nn.functional.pad(values_BT, (1, 0))
