"""The mix of a biLM's layers, one for each place of a task where ELMo enters (section 3.2)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_elmo import ELMoConfig


class ScalarMix(nn.Module):
    """One vector from all layers: `gamma * sum_j softmax(s)_j h_j` (equation 1).

    `scalar_mix_mode` may fix the weights: `"average"`, `"top"` or one layer's number; gamma is learned in any case.
    Keep both out of weight decay, which would pull gamma to 0; `scalar_mix_l2` is the paper's regularisation.
    """

    def __init__(self, config: ELMoConfig):
        super().__init__()
        self.mode = config.scalar_mix_mode
        self.num_layers = config.num_hidden_layers + 1
        self.layer_norm = config.scalar_mix_layer_norm
        self.l2 = config.scalar_mix_l2
        self.weights = nn.Parameter(torch.zeros(self.num_layers)) if self.mode == "learned" else None
        self.gamma = nn.Parameter(torch.ones(1))

    def layer_weights(self) -> Tensor:
        """`(layers,)`: the share of each layer, summing to one."""
        if self.weights is not None:
            return self.weights.softmax(0)
        if self.mode == "average":
            return torch.full_like(self.gamma, 1 / self.num_layers).expand(self.num_layers)
        layer = self.num_layers - 1 if self.mode == "top" else self.mode
        return F.one_hot(torch.tensor(layer, device=self.gamma.device), self.num_layers).to(self.gamma.dtype)

    def penalty(self) -> Tensor:
        """`scalar_mix_l2 * ||s||^2` on the raw weights (section 3.3); large values keep the mix near the average."""
        return self.l2 * (self.weights if self.weights is not None else self.gamma.new_zeros(1)).square().sum()

    def forward(self, hidden_states: tuple[Tensor, ...], attention_mask: Tensor | None = None) -> Tensor:
        """Mixes `layers` tensors `(batch, time, width)`; 0 where `attention_mask` `(batch, time)` is 0."""
        if len(hidden_states) != self.num_layers:
            raise ValueError(
                f"ScalarMix received {len(hidden_states)} layers; pass all {self.num_layers} of `hidden_states`."
            )
        if attention_mask is None:
            attention_mask = hidden_states[0].new_ones(hidden_states[0].shape[:2])
        mask = attention_mask.bool()
        layers = [self._normalize(layer, mask) for layer in hidden_states] if self.layer_norm else hidden_states
        mixed = sum(weight * layer for weight, layer in zip(self.layer_weights(), layers, strict=True))
        return (self.gamma * mixed).masked_fill(~mask[..., None], 0)

    def _normalize(self, layer: Tensor, mask: Tensor) -> Tensor:
        if self.layer_norm == "token":
            return F.layer_norm(layer, layer.shape[-1:])
        if self.layer_norm == "bilm":  # the original took the markers off first
            mask = mask & (mask.cumsum(1) > 1) & (mask.flip(1).cumsum(1).flip(1) > 1)
        if not mask.any():  # nothing but markers
            return layer
        variance, mean = torch.var_mean(layer[mask].float(), correction=0)
        epsilon = 1e-13 if self.layer_norm == "allennlp" else 1e-12
        return ((layer - mean) / (variance + epsilon).sqrt()).to(layer.dtype)
