"""The part of a vocabulary whose logits a process computes, where an LM head is divided."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class VocabularyPart:
    """Logits of one process [C, V'], of a vocabulary V that a group divides; None: all of it."""

    group: ProcessGroup | None = None
    start: int = 0
    """The first token of the part."""

    def sum(self, values: Tensor) -> Tensor:
        """Add up values over the group, in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def logsumexp(self, logits_CV: Tensor) -> Tensor:
        """Return the logarithm of the sum of exponentials over the whole vocabulary: [C]."""
        norm_C = torch.logsumexp(logits_CV, dim=-1)
        if self.group is None:
            return norm_C
        # the largest first, so that no exponential overflows
        largest_C = norm_C.clone()
        dist.all_reduce(largest_C, dist.ReduceOp.MAX, group=self.group)
        return largest_C + self.sum((norm_C - largest_C).exp_()).log_()

    def pick(self, logits_CV: Tensor, token_C: Tensor) -> Tensor:
        """Return the logit of each token: [C]."""
        place_C, is_here_C = self.places(token_C, logits_CV.shape[-1])
        return self.sum(logits_CV.gather(-1, place_C[:, None])[:, 0].where(is_here_C, 0.0))

    def places(self, token_C: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return the column of each token, and whether it is in this part; if not, it is 0."""
        place_C = token_C - self.start
        is_here_C = (place_C >= 0) & (place_C < size)
        return place_C.where(is_here_C, 0), is_here_C


def own_part(parameter: Tensor) -> tuple[Tensor, VocabularyPart]:
    """Return a head's parameter as this process has it, and its part of the vocabulary."""
    if not isinstance(parameter, DTensor):
        return parameter, VocabularyPart()
    local, mesh = parameter.to_local(), parameter.device_mesh
    if parameter.placements != (Shard(0),):
        return local, VocabularyPart()
    # The sizes are equal: a head is divided only where the vocabulary can be.
    return local, VocabularyPart(mesh.get_group(), mesh.get_local_rank() * len(local))
