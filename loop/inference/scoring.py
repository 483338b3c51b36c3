"""Log-probs that a model gives to tokens sampled elsewhere: an engine's optional `score`."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...store.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@runtime_checkable
class Scores(Protocol):
    """An engine or a policy that can score given tokens."""

    async def score(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Return the log-prob of each of `token_ids` after the prompt, in nats."""
        ...


def scorer(model: object, name: str) -> Scores:
    """Return a model that can score; raise ConfigError for one that cannot, such as an endpoint."""
    if isinstance(model, Scores):
        return model
    raise ConfigError(
        f"`{name}` only answers, and cannot say how likely given tokens are; "
        "take a model of a folder (`path`) or of a run (`run`)"
    )


async def score_in_thread(
    model: "PreTrainedModel",
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    temperature: float,
) -> list[float]:
    """Score by one forward pass, in a thread that leaves the event loop free.

    Sequences are not batched, so that a score does not depend on others, to the last bit.
    """
    import torch

    from ..models.token_logprobs import Scorer

    threads = torch.get_num_threads()

    def work() -> list[float]:
        if torch.get_num_threads() != threads:  # torch keeps this number per thread
            torch.set_num_threads(threads)
        ids_BT = torch.tensor([[*prompt_ids, *token_ids]], device=model.device)
        mask_BT = torch.zeros_like(ids_BT)
        mask_BT[:, len(prompt_ids) :] = 1
        with torch.no_grad():
            logprobs_BT = Scorer(model)(ids_BT, mask_BT, temperature=temperature)["logprobs"]
        return logprobs_BT[0, len(prompt_ids) :].float().tolist()

    return await asyncio.to_thread(work)
