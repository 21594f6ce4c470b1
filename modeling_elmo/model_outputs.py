"""What `forward` of the biLM returns."""

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput

from .inputs import States, option_that_takes_labels


class StatesOutput(ModelOutput):
    """An output whose `final_states` are a pair, and among its `items()` an output of their own.

    Pipelines read the items of a batch, and split by row what they know: tensors and nested outputs, but no pairs.
    """

    def items(self):
        items = dict(super().items())
        if states := items.get("final_states"):
            items["final_states"] = ModelOutput(hidden=states[0], cell=states[1])
        return items.items()

    def __getitem__(self, key):
        return dict(super().items())[key] if isinstance(key, str) else super().__getitem__(key)

    def __setitem__(self, key, value):
        super().__setitem__(key, tuple(value.values()) if key == "final_states" and isinstance(value, dict) else value)


@dataclass
class ELMoModelOutput(StatesOutput):
    """Output of `ELMoModel`. All vectors are zeros at padding.

    Shape:
        last_hidden_state: `(batch, time, 2 * projection_size)`, the top biLSTM layer, forward half first.
        elmo_embeddings: `(batch, time, 2 * projection_size)`, the mix of all layers (equation 1), or `None`.
        hidden_states: `num_hidden_layers + 1` tensors of the same shape. The first is the token layer, twice.
        final_states: `hidden (batch, layers, 2, projection_size)` and `cell (batch, layers, 2, lstm_hidden_size)` at
            the end of each direction, for `initial_states` of the next call; `None` if a row has two texts.
    """

    last_hidden_state: Tensor | None = None
    elmo_embeddings: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None


@dataclass
class ELMoForPreTrainingOutput(StatesOutput):
    """Output of `ELMoForPreTraining`.

    Shape:
        loss: `()`, the mean of both directions' losses (section 3.1), in nats per prediction.
        forward_loss, backward_loss: `()`, the loss of each direction, for reports only: they have no gradient.
        hidden_states: as in `ELMoModelOutput`; only on request, and only if both directions read the same text.
        final_states: as in `ELMoModelOutput`.
    """

    loss: Tensor | None = None
    forward_loss: Tensor | None = None
    backward_loss: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    final_states: States | None = None

    def __getitem__(self, key):
        if key == "logits":
            option = option_that_takes_labels()
            reader = "" if option is None else f", which Trainer's `{option}` reads"
            advice = "call `score` or `predict_words`" if option is None else "leave it out"
            raise KeyError(f"The output has losses and no `logits`{reader}; {advice}.")
        return super().__getitem__(key)
