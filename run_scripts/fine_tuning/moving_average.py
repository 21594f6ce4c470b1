"""An exponential moving average of the trained weights, for evaluation and for the saved model.

torch's `AveragedModel` copies the whole model, a frozen biLM included; this class keeps the trained weights only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback

TRAINED = "trained_weights.safetensors"  # in a checkpoint, whose model has the averages


class MovingAverage(TrainerCallback):
    """After each step, `average <- d * average + (1 - d) * weight` for every trained weight.

    `d` is `min(decay, (1 + step) / (10 + step))`: small at first, so that the initial weights are soon forgotten. A
    decay of 0.999 is reached at step 8,990.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.averages: dict[str, Tensor] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.averages:  # a checkpoint has loaded its own
            self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def on_step_end(self, args, state, control, **kwargs):
        decay = min(self.decay, (1 + state.global_step) / (10 + state.global_step))
        torch._foreach_lerp_(list(self.averages.values()), list(self.weights.values()), 1 - decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """A context in which the model has the averages in place of its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def keep(self):
        """Leaves the averages in the model."""
        self._exchange()

    @torch.no_grad()
    def _exchange(self):
        for name, average in self.averages.items():
            weight = self.weights[name]
            before = weight.detach().clone()
            weight.copy_(average)
            average.copy_(before)

    def save_trained(self, folder: Path):
        """Saves the weights, beside a model that has the averages."""
        save_file({name: weight.detach().contiguous() for name, weight in self.weights.items()}, folder / TRAINED)

    @torch.no_grad()
    def load_trained(self, folder: Path):
        """Takes the averages from the model, which has just loaded them, and loads the weights into it."""
        self.averages = {name: weight.detach().clone() for name, weight in self.weights.items()}
        for name, weight in load_file(folder / TRAINED).items():
            self.weights[name].copy_(weight)
