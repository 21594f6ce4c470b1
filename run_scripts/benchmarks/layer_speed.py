"""Speed of one layer of the LSTM on a device, both directions: each kernel, the definition and `torch.nn.LSTM`.

All compute the same: no value reaches the clips, which `torch.nn.LSTM` lacks. Its weights are in the dtype of products
and flattened, as it likes them best; ours and the definition cast float32 weights at each call, as training does.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling_elmo import ELMoConfig, elmo_backend
from modeling_elmo.directions import kernel_of_both, run_layer_by_layer
from modeling_elmo.kernels.plan import REFUSALS
from modeling_elmo.kernels.sequences import Steps, Stream
from modeling_elmo.modeling_elmo import ELMoLSTM

from .device_timing import Check, errors_of, measured_row
from .model_speed import PRECISIONS, TorchLSTMLayer, computing_in, gates_of_torch
from .timing import Outputs

STEPS_BY_LAUNCHES = "fused"  # the kernel that every accelerator has
PASSES = ("forward", "with gradients")
SHAPE = ("cells", "projection", "sequences", "steps")  # of a case
DEFINITION, CUDNN = "plain definition", "torch.nn.LSTM"
MOST_RATIO_OF_TORCH = 10.0  # it returns its cells in bfloat16
NAMES_OF_TORCH = {
    "weight_ih_l0": "input_linear.weight",
    "bias_ih_l0": "input_linear.bias",
    "weight_hh_l0": "state_linear.weight",
    "weight_hr_l0": "projection.weight",
}
OF_GATES = ("input_linear.weight", "input_linear.bias", "state_linear.weight")  # whose rows are those of gates


class Layer(NamedTuple):
    """Both directions of a layer, their inputs and states, and the gradients of their results."""

    lstms: list[ELMoLSTM]
    inputs: list[Tensor]  # (N, P)
    hidden: Tensor  # (K, S, P)
    cells: Tensor  # (K, S, H)
    grad_outputs: Tensor  # (K, N, P)
    grad_cells: Tensor  # (K, S, H)
    steps: Steps

    def to(self, device: torch.device, dtype: torch.dtype) -> "Layer":
        lstms = [lstm.to(device, dtype) for lstm in self.lstms]
        inputs = [values.to(device, dtype) for values in self.inputs]
        hidden, cells = self.hidden.to(device, dtype), self.cells.to(device, dtype)
        gradients = self.grad_outputs.to(device, dtype), self.grad_cells.to(device, dtype)
        return Layer(lstms, inputs, hidden, cells, *gradients, self.steps.to(device))


def make_layer(cells: int, projection: int, sequences: int, steps: int, device: torch.device) -> Layer:
    """In float64, with mild weights that float32 has exactly, and inputs that bfloat16 has exactly."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).double()

    config = ELMoConfig(lstm_hidden_size=cells, projection_size=projection, num_hidden_layers=1, dropout=0.0)
    with torch.device(device):
        lstms = [ELMoLSTM(config).double() for _ in range(2)]
    with torch.no_grad():
        for parameter in (weight for lstm in lstms for weight in lstm.parameters()):
            spread = parameter.shape[1] ** -0.5 if parameter.dim() > 1 else 0.1
            parameter.copy_((spread * draw(*parameter.shape)).float())
    tokens = sequences * steps
    inputs = [draw(tokens, projection).bfloat16().double() for _ in lstms]
    hidden, cell = draw(2, sequences, projection) / 8, draw(2, sequences, cells) / 8
    gradients = draw(2, tokens, projection).bfloat16().double(), draw(2, sequences, cells)
    return Layer(lstms, inputs, hidden, cell, *gradients, Steps([sequences] * steps, device))


def layer_rows(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each precision, pass and implementation of `case["implementations"]`."""
    cells, projection, sequences, steps = (case[name] for name in SHAPE)
    exact = make_layer(cells, projection, sequences, steps, device)
    layer = exact._replace(lstms=copy.deepcopy(exact.lstms)).to(device, torch.float32)
    expected = {name: run_definition(exact, name) for name in PASSES}
    for precision, largest_error in PRECISIONS.items():
        with computing_in(device, precision):
            checks = {}
            for name in PASSES:
                errors = errors_of(run_definition(layer, name), expected[name])
                checks[name] = Check(expected[name], errors, largest_error)
            for implementation in case["implementations"]:
                call = implementation_of(implementation, layer, precision)
                for name, check in checks.items():
                    if implementation == CUDNN:
                        check = check._replace(most_ratio=MOST_RATIO_OF_TORCH)
                    row = {"precision": precision, "implementation": implementation, "pass": name}
                    yield row | measured_row(partial(call, name), check, device)


def compile_layer(case: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Runs the kernels of a case on few steps. Triton compiles them, and stores them for the process that measures."""
    layer = make_layer(case["cells"], case["projection"], case["sequences"], 2, device).to(device, torch.float32)
    for precision in PRECISIONS:
        for implementation, name in product(case["implementations"], PASSES):
            with computing_in(device, precision), suppress(RuntimeError):  # which will be told when it is measured
                implementation_of(implementation, layer, precision)(name)
    yield from ()


def implementation_of(name: str, layer: Layer, precision: str) -> Callable[[str], Outputs]:
    if name == DEFINITION:
        return partial(run_definition, layer)
    if name == CUDNN:
        return torch_lstm(layer, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    return partial(run_kernel, layer, name)


def run_definition(layer: Layer, name: str) -> Outputs:
    def forward(inputs: list[Tensor]) -> list[Any]:
        streams = [Stream(values, layer.steps) for values in inputs]
        states = zip(layer.lstms, streams, layer.hidden, layer.cells, strict=True)
        with elmo_backend("reference"):
            return [lstm(stream, hidden[None], cell[None]) for lstm, stream, hidden, cell in states]

    return results_of_pass(layer, forward, name)


def run_kernel(layer: Layer, kernel: str, name: str) -> Outputs:
    def forward(inputs: list[Tensor]) -> list[Any]:
        streams = [Stream(values, layer.steps) for values in inputs]
        starts = list(zip(layer.hidden[:, None], layer.cells[:, None], strict=True))
        of_both = kernel_of_both(layer.lstms, layer.steps.batch_sizes, kernel)
        assert of_both is not None
        results = run_layer_by_layer(of_both, layer.lstms, streams, starts)
        refusal = REFUSALS.get(None) or REFUSALS.get(layer.cells.device)
        if kernel != STEPS_BY_LAUNCHES and refusal:  # which computed instead
            raise RuntimeError(refusal)
        return results

    return results_of_pass(layer, forward, name)


def results_of_pass(layer: Layer, forward: Callable[[list[Tensor]], list[Any]], name: str) -> Outputs:
    """Outputs and cells of both directions or, with gradients, the gradients of inputs and weights, too."""
    wants_gradients = name != PASSES[0]
    inputs = [values.detach().requires_grad_(wants_gradients) for values in layer.inputs]
    leaves: Outputs = {}
    for number, lstm in enumerate(layer.lstms):
        leaves[f"gradient {number} of inputs"] = inputs[number]
        for kind, parameter in lstm.named_parameters():
            leaves[f"gradient {number} of {kind}"] = parameter
    with torch.set_grad_enabled(wants_gradients):
        results = [(outputs[0], cells[0]) for outputs, _, cells in forward(inputs)]
        return with_gradients(layer, results, leaves)


def with_gradients(layer: Layer, results: list[tuple[Tensor, Tensor]], leaves: dict[str, Tensor]) -> Outputs:
    found = {}
    given = []
    for number, (outputs, cells) in enumerate(results):
        found |= {f"outputs {number}": outputs, f"cells {number}": cells}
        given += [layer.grad_outputs[number].to(outputs.dtype), layer.grad_cells[number].to(cells.dtype)]
    if torch.is_grad_enabled():
        gradients = torch.autograd.grad(list(found.values()), list(leaves.values()), given)
        found |= dict(zip(leaves, gradients, strict=True))
    return {name: value.detach() for name, value in found.items()}


def torch_lstm(layer: Layer, dtype: torch.dtype) -> Callable[[str], Outputs]:
    """`torch.nn.LSTM` with the layer's weights, on `(steps, sequences, P)`: all sequences have the same length."""
    modules = []
    for lstm in layer.lstms:
        module = TorchLSTMLayer(lstm.layers[0]).lstm.to(layer.cells.device, dtype)
        module.flatten_parameters()
        modules.append(module)

    def run(name: str) -> Outputs:
        wants_gradients = name != PASSES[0]
        leaves: Outputs = {}
        results = []
        with torch.set_grad_enabled(wants_gradients), torch.autocast(layer.cells.device.type, enabled=False):
            for number, module in enumerate(modules):
                inputs = layer.inputs[number].detach().to(dtype).requires_grad_(wants_gradients)
                steps = inputs.view(-1, layer.steps.batch_sizes[0], inputs.shape[1])
                states = layer.hidden[number, None].to(dtype), layer.cells[number, None].to(dtype)
                outputs, (_, cells) = module(steps, states)
                results.append((outputs.flatten(0, 1), cells[0]))
                leaves[f"gradient {number} of inputs"] = inputs
                for theirs, ours in NAMES_OF_TORCH.items():
                    leaves[f"gradient {number} of layers.0.{ours}"] = getattr(module, theirs)
            found = with_gradients(layer, results, leaves)
        for key, value in found.items():
            if key.startswith("gradient") and key.endswith(OF_GATES):
                found[key] = gates_of_torch(value)  # which swaps two of them, so it also turns them back
        return found

    return run
