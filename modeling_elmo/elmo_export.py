"""The biLM as `torch.export` traces it: every step of the padded batch, one after the other, under the token mask.

A masked step keeps the state. So a mask of any pattern means what it means in `pack` of `elmo_inputs.py`, and no size
of the traced program depends on a value. The backward direction reads the same steps from the last to the first.

Shape suffixes: B batch; T time; L LSTM layers; P `projection_size`; H `lstm_hidden_size`; G = 4 H gates.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .elmo_lstm import ELMoLSTM, ELMoLSTMLayer, reference_step

if TYPE_CHECKING:
    from .modeling_elmo import States


def padded_layers(
    directions: tuple[ELMoLSTM, ELMoLSTM], words_BTP: Tensor, mask_BT: Tensor, states: "States"
) -> tuple[tuple[Tensor, ...], "States"]:
    """The layers and the final states of the biLM, as in `ELMoModelOutput`.

    Args:
        directions: the forward and the backward LSTM, in eval mode.
        words_BTP: `(batch, time, projection_size)`, a vector for each position.
        mask_BT: `(batch, time)` bool, the token mask.
        states: the states at the start, as `ELMoModel.starting_states` returns them.
    """
    is_padding_BT1 = ~mask_BT[..., None]
    layers, ends = [], []
    for direction, lstm in enumerate(directions):
        outputs_BTP, own = [words_BTP], []
        for depth, layer in enumerate(lstm.layers):
            start = [state[:, depth, direction].contiguous() for state in states]
            output_BTP, *end = _padded_layer(layer, outputs_BTP[-1], mask_BT, start, reverse=direction == 1)
            outputs_BTP.append(output_BTP + outputs_BTP[-1] if depth and lstm.use_skip_connections else output_BTP)
            own.append(end)
        layers.append(outputs_BTP)
        ends.append([torch.stack(state, 1) for state in zip(*own, strict=True)])
    halves = zip(*layers, strict=True)
    hidden_states = tuple(torch.cat(pair, -1).masked_fill(is_padding_BT1, 0) for pair in halves)
    hidden, cell = (torch.stack(state, 2) for state in zip(*ends, strict=True))
    return hidden_states, (hidden, cell)


def _padded_layer(
    layer: ELMoLSTMLayer, inputs_BTP: Tensor, mask_BT: Tensor, states: list[Tensor], reverse: bool
) -> tuple[Tensor, ...]:
    """The output `(batch, time, projection_size)`, undefined at padding, and the state after each row's end."""
    from torch._higher_order_ops import scan  # private to torch: only while exporting

    def masked_step(before: list[Tensor], text: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        gates_BG, is_real_B1 = text
        after = reference_step(layer, gates_BG, *before)
        kept = [torch.where(is_real_B1, new, old) for new, old in zip(after, before, strict=True)]
        return kept, kept[0].clone()

    gates_TBG = layer.input_linear(inputs_BTP.transpose(0, 1))
    ends, outputs_TBP = scan(masked_step, states, [gates_TBG, mask_BT.t()[..., None]], reverse=reverse)
    return outputs_TBP.transpose(0, 1), *ends
