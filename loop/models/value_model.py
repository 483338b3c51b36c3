"""The network that says how much reward is still to come."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class Critic(nn.Module):
    """A language model's backbone and a linear layer to one number, which starts at 0."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = model.get_decoder()
        self.head = nn.Linear(self.backbone.config.hidden_size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return the value of the state before each token [B, T]: it has read those before it.

        No attention mask: padding stands on the right, where causal attention never looks. The
        first token has value 0.
        """
        hidden_BTD = self.backbone(input_ids=token_ids_BT, use_cache=False).last_hidden_state
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            values_BT = self.head(hidden_BTD[:, :-1].float())[..., 0]
        return nn.functional.pad(values_BT, (1, 0))
