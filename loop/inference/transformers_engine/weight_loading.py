"""Load new weights into a model in use: all of them, as published, or the old ones stay."""

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ....store.errors import JobError
from ...models.state_dict import put_state, state_of, weights_digest
from ...models.weights import Weights


def load_weights(model: PreTrainedModel, weights: Weights) -> str:
    """Load weights into a model of the same shape; return the digest of what it then holds.

    Raises JobError if they are missing, damaged, or of another model; the old ones stay.
    """
    source, given = _given(weights)
    # The digest is of what the model then holds, so a failed or partial load is noticed too.
    before = {name: tensor.clone() for name, tensor in state_of(model, names=given).items()}
    put_state(model, given, source=source)
    digest = _digest(given, state_of(model, names=given))
    if digest != weights.digest:
        put_state(model, before)
        raise JobError(
            f"{source} is not what was published: its digest differs; restore or retrain it"
        )
    return digest


def _given(weights: Weights) -> tuple[str, Mapping[str, Tensor]]:
    """Return where weights come from, for messages, and their tensors."""
    if weights.state is not None:
        return f"what came of version {weights.version}", weights.state
    path = weights.existing_file()
    try:
        return f"`{path}`", load_file(path)
    except SafetensorError as error:
        raise JobError(
            f"`{path}` is not what was published: {error}; restore or retrain it"
        ) from error


def _digest(given: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> str:
    """Return the digest of the loaded tensors; of the given ones if the model rounded them."""
    rounded = any(given[name].dtype != tensor.dtype for name, tensor in loaded.items())
    return weights_digest(given if rounded else loaded)
