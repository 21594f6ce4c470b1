"""The biLM as `torch.export` traces it: all time steps of padded rows, one after the other.

Shape suffixes: B rows; T time; P `projection_size`; G gates.
"""

from typing import Any

import torch
from torch import Tensor

from .inputs import States, join_states, starting_states, token_mask
from .kernels.scan import masked_scan


def run_in_export(
    model: Any, character_ids, input_ids, attention_mask, token_type_ids, inputs_embeds, initial_states
) -> tuple[tuple[Tensor, ...], Tensor, States | None]:
    """The layers of `ELMoModel`, the token mask and the final states, as `torch.export` traces them.

    Every step of the padded rows is computed, one after the other, without checks of values. A masked step keeps the
    state, so a mask of any pattern means what it means in `pack`, and no size of the traced program depends on a value.
    The backward direction reads the same steps from the last to the first.
    """
    if token_type_ids is not None:
        raise ValueError("`token_type_ids` cannot be exported. Leave them out, and give each text its own row.")
    if model.training:
        raise ValueError("A model in training mode cannot be exported. Call `model.eval()` before.")
    mask_BT = token_mask(model.config, character_ids, input_ids, attention_mask, None, inputs_embeds)
    if inputs_embeds is None:
        inputs_embeds = model.compute_words(model.word_ids(character_ids, input_ids).long())
    words_BTP = inputs_embeds.to(model.dtype)
    states = starting_states(model.config, initial_states, words_BTP, mask_BT.shape[0])
    starts = [[state[:, :, direction] for state in states] for direction in range(2)]
    forward, *forward_ends = _padded_lstm(model.forward_lstm, words_BTP, mask_BT, starts[0], reverse=False)
    backward, *backward_ends = _padded_lstm(model.backward_lstm, words_BTP, mask_BT, starts[1], reverse=True)
    halves = zip([words_BTP, *forward], [words_BTP, *backward], strict=True)
    hidden_states = tuple(torch.cat(pair, -1).masked_fill(~mask_BT[..., None], 0) for pair in halves)
    return hidden_states, mask_BT, join_states(forward_ends, backward_ends)


def _padded_lstm(
    lstm: Any, words_BTP: Tensor, mask_BT: Tensor, states: list[Tensor], reverse: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """One direction over padded rows: the output of each layer, undefined at padding, and the states at the end."""
    outputs, ends = [words_BTP], []
    for depth, layer in enumerate(lstm.layers):
        start = [state[:, depth].contiguous() for state in states]
        gates_TBG = layer.input_linear(outputs[-1].transpose(0, 1))
        end, output_TBP = masked_scan(layer.step, start, gates_TBG, mask_BT, reverse)
        output_BTP = output_TBP.transpose(0, 1)
        outputs.append(output_BTP + outputs[-1] if depth and lstm.use_skip_connections else output_BTP)
        ends.append(end)
    hidden, cell = zip(*ends, strict=True)
    return outputs[1:], torch.stack(hidden, 1), torch.stack(cell, 1)
