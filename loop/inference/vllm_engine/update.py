"""One update of the weights of a running vLLM."""

import asyncio
import json
from typing import Any

from ....store.errors import JobError
from ..incoming_weights import IncomingWeights
from ..shared_tensors import SharedBlock
from .backend import Backend, DiedError


async def update(
    backend: Backend, new: IncomingWeights, block: SharedBlock, *, is_verified: bool
) -> tuple[int, int]:
    """Replace the weights between two tokens; requests under way end with the tokens so far.

    Returns the number of tensors loaded, and of those compared with what the model then holds.
    Raises JobError if the weights are not what was published, and the old ones stay; DiedError if
    vLLM ended, or holds other weights.
    """
    if new.state is None:
        source: dict[str, Any] = {"file": str(new.file)}
    else:
        # Before requests are stopped. No worker reads the block now: they copy what they load.
        source = await asyncio.to_thread(block.write, new.state)
    digest = new.loaded_digest if is_verified else None
    await backend.pause()
    asked = {"name": new.name, "source": source, "digest": digest, "adapter": new.adapter}
    found = await backend.call("take_in", json.dumps(asked))
    if refused := [one["refused"] for one in found if "refused" in one]:
        if len(refused) < len(found):
            raise DiedError(f"some workers of vLLM have the new weights, and one not: {refused[0]}")
        await backend.resume()
        raise JobError(f"{refused[0]}; restore or retrain it")
    if differ := [name for one in found for name in one["differ"]]:
        raise DiedError(f"vLLM holds other weights than it was given: `{differ[0]}` differs")
    # Before requests start again: the label of a token says which weights sampled it.
    await backend.label(json.dumps([new.version, new.digest]))
    await backend.resume()
    return sum(one["given"] for one in found), sum(one["compared"] for one in found)


def is_verified(number: int, share: float) -> bool:
    """Return whether an update is verified: an even share of all, and always the first.

    >>> [number for number in range(9) if is_verified(number, 0.25)]
    [0, 3, 7]
    """
    return number == 0 or int(number * share) < int((number + 1) * share)
