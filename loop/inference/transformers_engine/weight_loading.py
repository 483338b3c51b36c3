"""New weights in a model that is in use: whole and as they were published, or the old ones stay."""

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ....store.errors import JobError
from ...models.digest import weights_digest
from ...models.state_dict import put_state, state_of
from ...models.weights import PublishedWeights, Weights


def load_weights(model: PreTrainedModel, weights: Weights) -> str:
    """Put weights into a model of the same shape; return the digest of what it then holds.

    Raises JobError when they are gone, damaged, or another model's; then the old ones stay.
    """
    place, given = _given(weights)
    before = {name: tensor.clone() for name, tensor in state_of(model, names=given).items()}
    put_state(model, given, told=place)
    digest = _digest(given, state_of(model, names=given))
    if digest != weights.digest:
        put_state(model, before)
        raise JobError(
            f"{place} is not what was published: its digest is another; restore or retrain it"
        )
    return digest


def _given(weights: Weights) -> tuple[str, Mapping[str, Tensor]]:
    """Return what is to be taken in, and where it lies, in words."""
    if weights.state is not None:
        return f"what came of version {weights.version}", weights.state
    assert weights.folder is not None, "weights come in a folder or in memory"
    path = PublishedWeights(weights.version, weights.folder, weights.digest).file
    if not path.is_file():
        raise JobError(f"the weights of version {weights.version} are gone: there is no `{path}`")
    try:
        return f"`{path}`", load_file(path)
    except SafetensorError as error:
        raise JobError(
            f"`{path}` is not what was published: {error}; restore or retrain it"
        ) from error


def _digest(given: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> str:
    """Digest what is loaded; where the model rounds, what it was rounded from."""
    rounded = any(given[name].dtype != tensor.dtype for name, tensor in loaded.items())
    return weights_digest(given if rounded else loaded)
