"""The clipped projected LSTM on CPUs: inference in place, and training with a hand-written backward pass.

`ELMoLSTMLayer` is the definition. For the shape suffixes, see `sequences.py`.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .lstm_loop import Arithmetic, run_direction, run_groups
from .products import packed, prepared, product, tanh, weight_gradient
from .sequences import LSTMOutput, LSTMWeights, Steps, Stream

CHUNK_ROWS = 256  # rows of input gates per product: one (tokens x 4H) block would page-fault on every call
MOST_WORDS = 1024  # maximum distinct words whose input gates are kept: 64 KB each at the original size


def inference_lstm(layer: LSTMWeights, stream: Stream, hidden_SP: Tensor, cell_SH: Tensor) -> LSTMOutput:
    """CPU inference, in float or in 8 bits: in place, without gradients. Cells are float.

    The input gates of a repeated word are computed once. Each step has as few operators as possible: for one sentence,
    starting them takes as long as computing.
    """
    batch_sizes = stream.steps.batch_sizes
    most = batch_sizes[0]
    state_weight = prepared(layer.state_linear, most)
    projection = None if layer.projection is None else prepared(layer.projection, most)
    clip, ended, cell_SH = layer.cell_clip, [], cell_SH.clone()
    outputs_NP = stream.inputs.new_empty(sum(batch_sizes), hidden_SP.shape[-1])
    for plus_SG, output_SP in zip(_input_gates(layer, stream), outputs_NP.split(batch_sizes), strict=True):
        size = len(output_SP)
        if size < most:
            ended.append(hidden_SP[size:])
            hidden_SP, most = hidden_SP[:size], size
        gates_SG = product(hidden_SP, state_weight, plus_NG=plus_SG).to(cell_SH.dtype)
        i, f, o, g = gates_SG.chunk(4, dim=-1)
        g.mul_(2)
        gates_SG.sigmoid_()  # of g: tanh(g) = 2 sigmoid(2 g) - 1
        cell = cell_SH[:size].mul_(f).addcmul_(i, g, value=2).sub_(i)
        if clip is not None:
            cell.clamp_(-clip, clip)
        raw_SH = tanh(cell).mul_(o).to(outputs_NP.dtype)
        output_SP.copy_(raw_SH if projection is None else product(raw_SH, projection, clip=layer.projection_clip))
        hidden_SP = output_SP
    return outputs_NP, torch.cat([hidden_SP, *ended[::-1]]), cell_SH


def _input_gates(layer: LSTMWeights, stream: Stream) -> Iterator[Tensor]:
    """The input half of the gates of each step, computed for whole steps of about `CHUNK_ROWS` rows at a time."""
    weight = prepared(layer.input_linear)
    bias_G = _run_time_bias(layer.bias_G, layer.forget_bias)
    index_N: Any = stream.index_N
    are_kept = index_N is not None and len(stream.inputs) <= min(0.8 * len(index_N), MOST_WORDS)
    rows_XG = product(stream.inputs, weight, bias_G) if are_kept else stream.tokens_ND
    start, end, sizes = 0, 0, []
    batch_sizes = stream.steps.batch_sizes
    for size, following in zip(batch_sizes, [*batch_sizes[1:], CHUNK_ROWS], strict=True):
        sizes.append(size)
        end += size
        if end - start + following > CHUNK_ROWS:
            rows = slice(start, end)
            gates_CG = rows_XG[index_N[rows]] if are_kept else product(rows_XG[rows], weight, bias_G)
            yield from gates_CG.split(sizes)
            start, sizes = end, []


class SingleArithmetic(Arithmetic):
    """Products of one direction, with oneDNN where it is faster."""

    def prepare(self, weight_KGD):
        return packed(weight_KGD[0], keep=False)  # weights change after every training step

    def multiply(self, x_KSD, weight, *, bias_KG=None, plus_KSG=None, clip=None, out_KSG=None):
        weight_GD = weight[0] if isinstance(weight, Tensor) else weight
        bias_G = None if bias_KG is None else bias_KG[0]
        plus_SG = None if plus_KSG is None else plus_KSG[0]
        result_SG = product(x_KSD[0], weight_GD, bias_G, plus_NG=plus_SG, clip=clip)
        if plus_KSG is not None and result_SG is plus_SG:
            return plus_KSG  # not a view with other strides, which no operator may write over
        return result_SG[None] if out_KSG is None else out_KSG.copy_(result_SG[None])

    def multiply_back(self, x_KSG, weight_KGD, sum_KSD=None):
        result_KSD = product(x_KSG[0], weight_KGD[0].t())[None]
        return result_KSD if sum_KSD is None else sum_KSD.add_(result_KSD)

    def weight_gradient(self, grad_KNG, x_KND):
        return weight_gradient(grad_KNG[0], x_KND[0])[None]


training_lstm = partial(run_direction, SingleArithmetic())


def threaded_layer(
    layers: Sequence[LSTMWeights], inputs_KND: Tensor, hidden_KSP: Tensor, cell_KSH: Tensor, steps: Steps
) -> LSTMOutput:
    """CPU training of both directions at once, each with half of torch's threads."""
    groups = [[layer] for layer in layers]
    inputs, hidden, cells = inputs_KND.split(1), hidden_KSP.split(1), cell_KSH.split(1)
    threads = torch.get_num_threads() // 2
    results = run_groups(SingleArithmetic(), groups, inputs, hidden, cells, steps, threads)
    outputs_KNP, hidden_KSP, cell_KSH = (torch.cat(parts) for parts in zip(*results, strict=True))
    return outputs_KNP, hidden_KSP, cell_KSH


def _run_time_bias(bias_G: Tensor, forget_bias: float) -> Tensor:
    """The stored bias with `forget_bias` added to the forget gate's part."""
    i, f, o, g = bias_G.chunk(4)
    return torch.cat([i, f + forget_bias, o, g])
