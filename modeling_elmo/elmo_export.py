"""The biLM as `torch.export` traces it: every step of the padded batch, one after the other, under the token mask.

A masked step keeps the state. So a mask of any pattern means what it means in `pack` of `elmo_inputs.py`, and no size
of the traced program depends on a value. The backward direction reads the same steps from the last to the first.

Shape suffixes: B batch; T time; L LSTM layers; P `projection_size`; H `lstm_hidden_size`; G = 4 H gates.
"""

import torch
from torch import Tensor

from .elmo_lstm import ELMoLSTM, ELMoLSTMLayer, reference_step
from .elmo_operators import private


def padded_lstm(
    lstm: ELMoLSTM, words_BTP: Tensor, mask_BT: Tensor, states: list[Tensor], reverse: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Runs one direction over padded rows, in eval mode.

    Args:
        words_BTP: a vector for each position.
        mask_BT: bool, the token mask.
        states: hidden `(batch, layers, projection_size)` and cell `(batch, layers, lstm_hidden_size)` at the start.

    Returns:
        `(outputs, hidden_BLP, cell_BLH)`: the output of each layer, `(batch, time, projection_size)`, undefined at
        padding, and the state after each row's end.
    """
    outputs, ends = [words_BTP], []
    for depth, layer in enumerate(lstm.layers):
        start = [state[:, depth].contiguous() for state in states]
        output_BTP, *end = _padded_layer(layer, outputs[-1], mask_BT, start, reverse)  # type: ignore[arg-type]
        outputs.append(output_BTP + outputs[-1] if depth and lstm.use_skip_connections else output_BTP)
        ends.append(end)
    hidden, cell = zip(*ends, strict=True)
    return outputs[1:], torch.stack(hidden, 1), torch.stack(cell, 1)


def _padded_layer(
    layer: ELMoLSTMLayer, inputs_BTP: Tensor, mask_BT: Tensor, states: list[Tensor], reverse: bool
) -> tuple[Tensor, ...]:
    if (scan := private("_higher_order_ops.scan")) is None:
        raise ImportError(f"torch {torch.__version__} has no `scan`, so ELMo cannot be exported. Use another release.")

    def masked_step(before: list[Tensor], text: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        gates_BG, is_real_B1 = text
        after = reference_step(layer, gates_BG, *before)
        kept = [torch.where(is_real_B1, new, old) for new, old in zip(after, before, strict=True)]
        return kept, kept[0].clone()

    gates_TBG = layer.input_linear(inputs_BTP.transpose(0, 1))
    ends, outputs_TBP = scan(masked_step, states, [gates_TBG, mask_BT.t()[..., None]], reverse=reverse)
    return outputs_TBP.transpose(0, 1), *ends
