"""The output layer of the language model: a softmax over words, shared by both directions.

Shape suffixes: N predictions; P `projection_size`; V `vocab_size`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 1 << 25  # logits held at a time: 128 MB in float32, whatever the vocabulary


class ELMoSoftmax(nn.Module):
    """A full softmax; `<PAD>` is no class and has no probability."""

    def __init__(self, config):
        super().__init__()
        if config.softmax_type != "full":
            raise ValueError(
                f"`softmax_type` is {config.softmax_type!r}, which this version does not compute; pass 'full'."
            )
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.projection_size))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))
        self.pad_token_id = config.pad_token_id

    def logits(self, hidden_NP: Tensor) -> Tensor:
        """Unnormalised log-probabilities, `(N, V)`, of every word; minus infinity for `<PAD>`."""
        padding_V = torch.arange(len(self.bias), device=hidden_NP.device) == self.pad_token_id
        return F.linear(hidden_NP, self.weight, self.bias).masked_fill(padding_V, float("-inf"))

    def forward(self, hidden_NP: Tensor, targets_N: Tensor) -> Tensor:
        """Negative log-likelihood `(N,)` of each target, in float32.

        Chunks of predictions are recomputed in the backward pass, so that `(N, V)` logits never stand in memory.
        """
        rows = max(1, CHUNK_LOGITS // len(self.bias))
        chunks = zip(hidden_NP.split(rows), targets_N.split(rows), strict=True)
        return torch.cat([checkpoint(self._loss, *chunk, use_reentrant=False) for chunk in chunks])

    def _loss(self, hidden_NP: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(hidden_NP).float(), targets_N, reduction="none")
