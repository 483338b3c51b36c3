"""How likely a model finds tokens that another one sampled: an engine's optional `score`."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...store.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@runtime_checkable
class Scores(Protocol):
    """An engine, or a policy, that can say how likely given tokens are."""

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` behind the prompt, in nats."""
        ...


def that_scores(model: object, name: str) -> Scores:
    """Return a model that can score; raises ConfigError for one that cannot, as an endpoint."""
    if isinstance(model, Scores):
        return model
    raise ConfigError(
        f"`{name}` only answers, and cannot say how likely given tokens are; "
        "take a model of a folder (`path`) or of a run (`run`)"
    )


async def score_apart(
    model: "PreTrainedModel",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    temperature: float,
) -> list[float]:
    """Score by one forward pass, in a thread, so that the event loop goes on meanwhile.

    Each sequence is read alone: what is said of it depends on nothing else, to the last bit.
    """
    import torch

    threads = torch.get_num_threads()

    def work() -> list[float]:
        if torch.get_num_threads() != threads:  # each thread has a number of its own
            torch.set_num_threads(threads)
        return _score(model, prompt_ids, token_ids, temperature)

    return await asyncio.to_thread(work)


def _score(
    model: "PreTrainedModel",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    temperature: float,
) -> list[float]:
    import torch

    from ..models.token_logprobs import Scorer

    ids_BT = torch.tensor([[*prompt_ids, *token_ids]], device=model.device)
    mask_BT = torch.zeros_like(ids_BT)
    mask_BT[:, len(prompt_ids) :] = 1
    with torch.no_grad():
        found = Scorer(model)(ids_BT, mask_BT, temperature=temperature)["logprobs"]
    return found[0, len(prompt_ids) :].float().tolist()
