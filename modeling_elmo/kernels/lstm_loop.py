"""The loop over the steps of a layer, and its gradient: for one direction or several at once, on every device.

The gradient of each weight is one product after the loop; autograd would sum one product per step. Each step keeps only
the values of the gates, the cell and the output. `lstm_cpu.py` and `lstm_cuda.py` say how a device multiplies.

For the shape suffixes, see `sequences.py`; the sequences of all directions have the same lengths.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .products import tanh
from .sequences import LSTMOutput, LSTMWeights, Steps, Stream
from .threads import at_once
from .torch_state import first_derivative, product_dtype

TENSORS = 7  # of a group of directions: four parameters, the input, the hidden state, the cell
Clips = tuple[float | None, float | None]  # of cells, and of projections
MOST_GATES = 1 << 28  # input gates in memory at a time without gradients: 1 GB in float32


class StackedLayer(NamedTuple):
    """The parameters of the same layer of K directions, and its options. The bias includes `forget_bias`.

    Without input weight and bias, the input of the layer is the input half of the gates; without gradients, the loop
    takes its memory.
    """

    input_weight_KGD: Tensor | None
    bias_KG: Tensor | None
    state_weight_KGP: Tensor
    projection_KPH: Tensor | None
    cell_clip: float | None
    projection_clip: float | None

    @classmethod
    def of(cls, layers: Sequence[LSTMWeights], dtype: torch.dtype) -> "StackedLayer":
        stacked = []
        for same in zip(*(layer.tensors() for layer in layers), strict=True):
            weights = [weight.to(dtype) for weight in same]
            stacked.append(weights[0][None] if len(weights) == 1 else torch.stack(weights))
        input_weight_KGD, bias_KG, state_weight_KGP = stacked[:3]
        forget_4H = bias_KG.new_zeros(4, bias_KG.shape[1] // 4)
        forget_4H[1] = layers[0].forget_bias
        projection_KPH = stacked[3] if len(stacked) > 3 else None
        clips = layers[0].cell_clip, layers[0].projection_clip
        return cls(input_weight_KGD, bias_KG + forget_4H.flatten(), state_weight_KGP, projection_KPH, *clips)


@cache
def representable(bound: float | None, dtype: torch.dtype) -> float | None:
    """A bound as a clipped value has it: 0.2 is 0.19995 in float16, and what is there was clipped."""
    return None if bound is None else torch.tensor(bound, dtype=dtype, device="cpu").item()


class Arithmetic:
    """The products of K directions as one batched product, and their cells."""

    def prepare(self, weight_KGD: Tensor) -> Any:
        """A weight for many products."""
        return weight_KGD

    def prepare_back(self, weight_KGD: Tensor) -> Any:
        """The transposed weight for the products of a backward pass."""
        return weight_KGD.mT

    def multiply(
        self,
        x_KSD: Tensor,
        weight: Any,
        *,
        bias_KG: Tensor | None = None,
        plus_KSG: Tensor | None = None,
        clip: float | None = None,
        out_KSG: Tensor | None = None,
    ) -> Tensor:
        """`x @ weight.T` with a weight or a prepared one, with an added bias or matrix, or clipped.

        Args:
            plus_KSG: the added matrix, which may hold the result afterwards.
            out_KSG: room for the result, which may be the added matrix.
        """
        if bias_KG is not None:
            plus_KSG = bias_KG[:, None]
        if plus_KSG is not None:
            return torch.baddbmm(plus_KSG, x_KSD, weight.mT, out=out_KSG)
        if clip is None:
            return torch.bmm(x_KSD, weight.mT, out=out_KSG)
        return torch.clamp(torch.bmm(x_KSD, weight.mT), -clip, clip, out=out_KSG)

    def weight_gradient(self, grad_KNG: Tensor, x_KND: Tensor) -> Tensor:
        """`grad.T @ x`, `(K, G, D)`."""
        return torch.bmm(grad_KNG.mT, x_KND)

    def forward_steps(
        self,
        gates_KNG: Tensor,
        weights: tuple[Any, Any],
        hidden_KSP: Tensor,
        cell_KSH: Tensor,
        outputs_KNP: Tensor,
        cells_KNH: Tensor,
        steps: Steps,
        clips: Clips,
        keep: bool,
    ) -> Tensor:
        """The loop over the steps, from the input half of the gates.

        Args:
            gates_KNG: may be written over.
            weights: the prepared weights of the state, and of the projection or `None`.
            outputs_KNP, cells_KNH: room for the results.
            keep: whether a backward pass follows.

        Returns:
            the values of the gates, `(K, N, G)`, of use only if they are kept.
        """
        state_weight, projection = weights
        cell_clip, projection_clip = clips
        values_KNG = gates_KNG  # of which a step takes the place, once it has read them
        if gates_KNG.dtype != cell_KSH.dtype:
            values_KNG = torch.empty_like(gates_KNG, dtype=cell_KSH.dtype)
        for size, rows in zip(steps.batch_sizes, steps.rows, strict=True):
            gates_KSG = self.multiply(hidden_KSP[:, :size], state_weight, plus_KSG=gates_KNG[:, rows])
            output_KSP, cells_KSH = outputs_KNP[:, rows], cells_KNH[:, rows]
            raw_KSH = output_KSP
            if projection is not None:
                raw_KSH = hidden_KSP.new_empty(cells_KSH.shape)
            self.cell_forward(gates_KSG, cell_KSH[:, :size], values_KNG[:, rows], cells_KSH, raw_KSH, cell_clip)
            if projection is not None:
                self.multiply(raw_KSH, projection, clip=projection_clip, out_KSG=output_KSP)
            hidden_KSP, cell_KSH = output_KSP, cells_KSH
        return values_KNG

    def backward_steps(
        self,
        grad_projected_KNP: Tensor,
        grad_cell_KSH: Tensor,
        weights: tuple[Tensor, Tensor | None],
        outputs_KNP: Tensor,
        cells_KNH: Tensor,
        values_KNG: Tensor,
        cell_KSH: Tensor,
        steps: Steps,
        clips: Clips,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loop over the steps from the last one to the first.

        Args:
            grad_projected_KNP: the gradient of the outputs; it becomes the gradient of the projection's results.
            grad_cell_KSH: the gradient of the cells at the ends; it becomes the gradient of the cells at the start.
            cell_KSH: the cells at the start.

        Returns:
            the gradient of the gates' sums `(K, N, G)`, the states before their projection `(K, N, H)`, and the
            gradient of the hidden states at the start `(K, S, P)`.
        """
        state_weight_KGP, projection_KPH = weights
        cell_clip, projection_clip = clips
        grad_hidden_KSP = grad_projected_KNP.new_zeros(*cell_KSH.shape[:2], grad_projected_KNP.shape[2])
        grad_gates_KNG = torch.empty_like(values_KNG, dtype=outputs_KNP.dtype)
        raw_KNH = torch.empty_like(cells_KNH, dtype=outputs_KNP.dtype)
        state_back = self.prepare_back(state_weight_KGP)
        projection_back = None if projection_KPH is None else self.prepare_back(projection_KPH)
        for step in reversed(range(len(steps.rows))):
            size, rows = steps.batch_sizes[step], steps.rows[step]
            before_KSH, grad_before_KSP = cell_KSH[:, :size], grad_hidden_KSP[:, :size]
            if step:
                start = steps.rows[step - 1].start
                before_KSH = cells_KNH[:, start : start + size]
                grad_before_KSP = grad_projected_KNP[:, start : start + size]
            grad_raw_KSH = grad_projected_KNP[:, rows]
            clip_gradient_(grad_raw_KSH, outputs_KNP[:, rows], projection_clip)
            if projection_back is not None:
                grad_raw_KSH = self.multiply(grad_raw_KSH, projection_back)
            given = grad_raw_KSH, values_KNG[:, rows], cells_KNH[:, rows], before_KSH
            rooms = grad_cell_KSH[:, :size], grad_gates_KNG[:, rows], raw_KNH[:, rows]
            self.cell_backward(*given, *rooms, cell_clip)
            self.multiply(grad_gates_KNG[:, rows], state_back, plus_KSG=grad_before_KSP, out_KSG=grad_before_KSP)
        return grad_gates_KNG, raw_KNH, grad_hidden_KSP

    def cell_forward(self, *arguments: Any):
        cell_forward(*arguments)

    def cell_backward(self, *arguments: Any):
        cell_backward(*arguments)


def run_direction(
    arithmetic: Arithmetic, layer: LSTMWeights, stream: Stream, hidden_SP: Tensor, cell_SH: Tensor
) -> LSTMOutput:
    """Runs a layer of one direction."""
    inputs_KND, states = stream.tokens_ND[None], (hidden_SP[None], cell_SH[None])
    outputs_KNP, hidden_KSP, cell_KSH = run_layer(arithmetic, [layer], inputs_KND, *states, stream.steps)
    return outputs_KNP[0], hidden_KSP[0], cell_KSH[0]


def run_layer(
    arithmetic: Arithmetic,
    layers: Sequence[LSTMWeights],
    inputs_KND: Tensor,
    hidden_KSP: Tensor,
    cell_KSH: Tensor,
    steps: Steps,
) -> LSTMOutput:
    """Runs the same layer of several directions. Under autocast, cells stay in float32.

    Returns:
        `(outputs_KNP, hidden_KSP, cell_KSH)`: the outputs, and the states after each sequence's end.
    """
    layer = StackedLayer.of(layers, product_dtype(inputs_KND))
    return run_groups(arithmetic, [layer], [inputs_KND], [hidden_KSP], [cell_KSH], steps)[0]


def run_groups(
    arithmetic: Arithmetic,
    layers: Sequence[StackedLayer],
    inputs: Sequence[Tensor],
    hidden: Sequence[Tensor],
    cells: Sequence[Tensor],
    steps: Steps,
    threads: int = 0,
) -> list[LSTMOutput]:
    """`run_layer` of several groups of directions, at once with `threads` each if there are several.

    The parameters are in the dtype of products.
    """
    dtype = product_dtype(inputs[0])
    with torch.autocast(inputs[0].device.type, enabled=False):  # the dtypes are chosen
        tensors: list[Tensor | None] = []
        for layer, inputs_KND, hidden_KSP, cell_KSH in zip(layers, inputs, hidden, cells, strict=True):
            tensors += [*layer[:4], inputs_KND.to(dtype), hidden_KSP.to(dtype), cell_KSH]
        clips = representable(layer.cell_clip, cell_KSH.dtype), representable(layer.projection_clip, dtype)
        settings = arithmetic, steps, clips, threads
        if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
            results = BackpropagationThroughTime.apply(settings, *tensors)
        else:
            calls = [partial(_forward_pass, settings, False, *group) for group in _groups(tensors, TENSORS)]
            results = []
            for outputs_KNP, cells_KNH, _ in _results(calls, threads):
                results += [outputs_KNP, cells_KNH.index_select(1, steps.last_S)]
        return [
            (outputs_KNP, outputs_KNP.index_select(1, steps.last_S), final_KSH)
            for outputs_KNP, final_KSH in _groups(results, 2)
        ]


class BackpropagationThroughTime(torch.autograd.Function):
    """The outputs and the cells after each sequence's end, `(outputs_KNP, cell_KSH)` of each group of directions."""

    @staticmethod
    def forward(ctx, settings, *tensors):
        ctx.settings, steps, threads = settings, settings[1], settings[3]
        calls, results, saved = [], [], []
        for group in _groups(tensors, TENSORS):
            calls.append(partial(_forward_pass, settings, True, *group))
        for group, kept in zip(_groups(tensors, TENSORS), _results(calls, threads), strict=True):
            outputs_KNP, cells_KNH, _ = kept
            results += [outputs_KNP, cells_KNH.index_select(1, steps.last_S)]
            *parameters, inputs_KND, hidden_KSP, cell_KSH = group
            if parameters[0] is None:
                inputs_KND = None  # gates, which no gradient needs
            saved += [*parameters, inputs_KND, hidden_KSP, cell_KSH, *kept]
        ctx.save_for_backward(*saved)
        return tuple(results)

    @staticmethod
    @first_derivative
    def backward(ctx, *gradients):
        *settings, threads = ctx.settings
        groups = zip(
            _groups(ctx.saved_tensors, TENSORS + 3),
            _groups(ctx.needs_input_grad[1:], TENSORS),
            _groups(gradients, 2),
            strict=True,
        )
        calls = [partial(_backward_pass, settings, *group) for group in groups]
        return None, *chain.from_iterable(_results(calls, threads))


def _groups(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _results(calls: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    return at_once(calls, threads) if len(calls) > 1 else [calls[0]()]


def _forward_pass(
    settings, keep: bool, input_weight_KGD, bias_KG, state_weight_KGP, projection_KPH, inputs_KND, hidden_KSP, cell_KSH
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, cells and, if they are kept, the values of the gates: `(K, N, ...)`."""
    arithmetic, steps, clips, _ = settings
    directions, tokens, _ = inputs_KND.shape
    outputs_KNP = steps.new_rows(hidden_KSP, directions, tokens, hidden_KSP.shape[2])
    cells_KNH = cell_KSH.new_empty(directions, tokens, cell_KSH.shape[2])
    weights = (
        arithmetic.prepare(state_weight_KGP),
        None if projection_KPH is None else arithmetic.prepare(projection_KPH),
    )
    gates = directions * state_weight_KGP.shape[1]
    most = tokens if keep else max(steps.batch_sizes[0], MOST_GATES // gates)
    for chunk, rows in steps.chunks(most):  # whose input gates are in memory
        gates_KNG = inputs_KND[:, rows]
        if input_weight_KGD is not None:
            gates_KNG = arithmetic.multiply(gates_KNG, input_weight_KGD, bias_KG=bias_KG)
        elif keep:
            gates_KNG = gates_KNG.clone()  # autograd's own, which a step must not write over
        rooms = outputs_KNP[:, rows], cells_KNH[:, rows]
        values_KNG = arithmetic.forward_steps(gates_KNG, weights, hidden_KSP, cell_KSH, *rooms, chunk, clips, keep)
        if chunk is not steps:
            last = chunk.rows[-1]
            hidden_KSP, cell_KSH = (room[:, last] for room in rooms)
    return outputs_KNP, cells_KNH, values_KNG


def _backward_pass(settings, saved, wanted, gradients) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors of `_forward_pass`; `None` where none is wanted."""
    arithmetic, steps, clips = settings
    input_weight_KGD, _, state_weight_KGP, projection_KPH, inputs_KND, hidden_KSP, cell_KSH = saved[:TENSORS]
    outputs_KNP, cells_KNH, values_KNG = saved[TENSORS:]
    grad_projected_KNP, grad_cell_KSH = (gradient.clone() for gradient in gradients)
    weights = state_weight_KGP, projection_KPH
    kept = outputs_KNP, cells_KNH, values_KNG, cell_KSH
    steps_back = arithmetic.backward_steps(grad_projected_KNP, grad_cell_KSH, weights, *kept, steps, clips)
    grad_gates_KNG, raw_KNH, grad_hidden_KSP = steps_back
    before_KNP = torch.cat([hidden_KSP, outputs_KNP], 1).index_select(1, steps.before_N)
    grad_inputs_KND = grad_gates_KNG if wanted[4] else None
    if grad_inputs_KND is not None and input_weight_KGD is not None:
        grad_inputs_KND = arithmetic.multiply(grad_gates_KNG, input_weight_KGD.mT)
    return (
        arithmetic.weight_gradient(grad_gates_KNG, inputs_KND) if wanted[0] else None,
        grad_gates_KNG.sum(1) if wanted[1] else None,
        arithmetic.weight_gradient(grad_gates_KNG, before_KNP) if wanted[2] else None,
        arithmetic.weight_gradient(grad_projected_KNP, raw_KNH) if wanted[3] else None,
        grad_inputs_KND,
        grad_hidden_KSP,
        grad_cell_KSH,
    )


def cell_forward(gates_KSG, before_KSH, values_KSG, cells_KSH, raw_KSH, clip: float | None):
    """A step of the cells, from the sums of the gates.

    Args:
        gates_KSG, before_KSH: the sums in the order i, f, o, g, and the cells before the step.
        values_KSG, cells_KSH, raw_KSH: room for the gates' values, the cells, and the state before its projection.
    """
    width = cells_KSH.shape[2]
    gates_KSG = gates_KSG.to(cells_KSH.dtype)
    torch.sigmoid(gates_KSG[..., : 3 * width], out=values_KSG[..., : 3 * width])
    tanh(gates_KSG[..., 3 * width :], out=values_KSG[..., 3 * width :])
    i, f, o, g = values_KSG.chunk(4, dim=2)
    torch.mul(before_KSH, f, out=cells_KSH).addcmul_(i, g)
    if clip is not None:
        cells_KSH.clamp_(-clip, clip)
    torch.mul(tanh(cells_KSH), o, out=raw_KSH)


def cell_backward(
    grad_raw_KSH, values_KSG, cells_KSH, before_KSH, grad_cell_KSH, grad_gates_KSG, raw_KSH, clip: float | None
):
    """The gradient of `cell_forward`.

    Args:
        grad_cell_KSH: the gradient of the cells after the step; it becomes the gradient of the cells before it.
        grad_gates_KSG, raw_KSH: room for the gradient of the gates' sums, and for the state before its projection.
    """
    aten, width = torch.ops.aten, cells_KSH.shape[2]
    i, f, o, g = values_KSG.chunk(4, dim=2)
    squashed_KSH = tanh(cells_KSH)
    torch.mul(o, squashed_KSH, out=raw_KSH)
    grad_raw_KSH = grad_raw_KSH.to(cells_KSH.dtype)
    grad_cell_KSH.add_(aten.tanh_backward(grad_raw_KSH * o, squashed_KSH))
    clip_gradient_(grad_cell_KSH, cells_KSH, clip)
    exact_KSG = grad_gates_KSG
    if grad_gates_KSG.dtype != cells_KSH.dtype:
        exact_KSG = torch.empty_like(values_KSG)
    di, df, do, dg = exact_KSG.chunk(4, dim=2)
    torch.mul(grad_cell_KSH, g, out=di)
    torch.mul(grad_cell_KSH, before_KSH, out=df)
    torch.mul(grad_raw_KSH, squashed_KSH, out=do)
    sigmoids_KSX = exact_KSG[..., : 3 * width]
    aten.sigmoid_backward(sigmoids_KSX, values_KSG[..., : 3 * width], grad_input=sigmoids_KSX)
    aten.tanh_backward(grad_cell_KSH * i, g, grad_input=dg)
    grad_cell_KSH.mul_(f)
    if exact_KSG is not grad_gates_KSG:
        grad_gates_KSG.copy_(exact_KSG)


def clip_gradient_(grad: Tensor, values: Tensor, bound: float | None):
    """Sets a gradient to 0 where a value reached its bound."""
    if bound is not None:
        torch.ops.aten.hardtanh_backward(grad, values, -bound, bound, grad_input=grad)
