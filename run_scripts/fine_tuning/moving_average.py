"""An exponential moving average of the weights that are trained, for evaluation and for what is saved."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

TRAINED = "trained_weights.safetensors"  # of a checkpoint, whose model holds the averages


class MovingAverage(TrainerCallback):
    """After each step: `average <- d * average + (1 - d) * weight`, of every weight that is trained.

    `d` is `min(decay, (1 + step) / (10 + step))`, so that where the weights started is soon forgotten: at a decay of
    0.999 the bound is reached at step 8,990.

    Args:
        model: of the training, as it starts.
        decay: from 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float):
        if not 0 <= decay < 1:
            raise ValueError(f"`decay` is {decay}; pass a number from 0 up to 1, 1 excluded, such as 0.999.")
        self.decay = decay
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.averages: dict[str, Tensor] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.averages:  # a checkpoint brings its own
            self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        torch._foreach_lerp_(list(self.averages.values()), list(self.weights.values()), 1 - decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model holds the averages; afterwards, its weights again."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def keep(self):
        """The model holds the averages from now on."""
        self._exchange()

    @torch.no_grad()
    def _exchange(self):
        for name, average in self.averages.items():
            weight = self.weights[name]
            before = weight.detach().clone()
            weight.copy_(average)
            average.copy_(before)

    def save_trained(self, folder: Path):
        """The weights themselves, beside a model that holds the averages."""
        save_file({name: weight.detach().contiguous() for name, weight in self.weights.items()}, folder / TRAINED)

    @torch.no_grad()
    def load_trained(self, folder: Path):
        """After the averages were loaded into the model: keeps these, and puts the weights in their place."""
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        for name, weight in load_file(folder / TRAINED).items():
            self.weights[name].copy_(weight)
