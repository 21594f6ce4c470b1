"""The LSTM of accelerators, on CPU: against the definition, and its Triton kernels against plain PyTorch.

triton reads `TRITON_INTERPRET` when it is imported, so the kernels run on CPU if no device was found (`conftest.py`).
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_elmo_lstm import OPTIONS, gradients, make_batch, make_config, make_lstm, run

from modeling_elmo import elmo_backend, elmo_lstm_fused
from modeling_elmo.elmo_backends import fused_obstacle
from modeling_elmo.elmo_inputs import pack
from modeling_elmo.elmo_lstm import ELMoLSTM, kernel_of_both, run_both
from modeling_elmo.elmo_lstm_fused import Steps, cell_backward, cell_forward


@pytest.mark.parametrize("options, order", [*zip(OPTIONS, ["forward_N", "backward_N"] * 2, strict=True)])
def test_values_and_gradients_equal_the_definition(options, order):
    config = make_config(**{"cell_clip": 0.7, "projection_clip": 0.5, "num_hidden_layers": 3, **options})
    lstm = make_lstm(config, dtype=torch.float64)
    found, expected = (gradients(lstm, config, backend, order) for backend in ("fused", "reference"))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("most", [1, 600, 1 << 28])
def test_inference_keeps_few_gates_in_memory(most, monkeypatch):
    config = make_config()
    lstm, batch, rows = make_lstm(config), make_batch(config), []
    multiply = torch.baddbmm
    monkeypatch.setattr(elmo_lstm_fused, "MOST_GATES", most)
    monkeypatch.setattr(torch, "baddbmm", lambda plus, x, w: rows.append(x.shape[1]) or multiply(plus, x, w))
    with torch.no_grad(), elmo_backend("fused"):
        found = run(lstm, *batch)
    with torch.no_grad(), elmo_backend("reference"):
        expected = run(lstm, *batch)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert max(rows) == {1: 6, 600: 7, 1 << 28: 28}[most]  # tokens whose input gates are one product


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_both_directions_equal_one_after_the_other(dropout):
    config = make_config(dropout=dropout)
    lstms = [make_lstm(config, seed=seed) for seed in (0, 1)]
    tokens, mask, *states = make_batch(config)
    packing = pack(mask)
    inputs = torch.stack([tokens.flatten(0, 1)[packing.positions_N[order]] for order in packing[1:3]])
    packed = [state[:, packing.rows_S] for state in states]
    with elmo_backend("fused"):
        kernel = kernel_of_both(lstms, packing.batch_sizes, inputs)
    given = kernel, lstms, inputs, packing.batch_sizes, *(torch.stack([state] * 2) for state in packed)
    outputs, *ends = run_both(*given)
    if dropout:
        again, *_ = run_both(*given)
        assert all(layer.any() and not torch.equal(layer, same) for layer, same in zip(outputs, again, strict=True))
        return
    for number, lstm in enumerate(lstms):
        every = torch.arange(inputs.shape[1])
        with elmo_backend("reference"):
            expected, *last = lstm(inputs[number], every, packing.batch_sizes, *packed)
        torch.testing.assert_close([layer[number] for layer in outputs], expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close([end[number] for end in ends], last, atol=2e-6, rtol=1e-5)


def test_steps_of_sequences():
    """Sequences of 3, 2 and 2 tokens: rows 0 to 2, 3 to 5 and 6 are the steps; the first three are the start."""
    steps = Steps.of([3, 3, 1], torch.device("cpu"))
    assert steps.last_S.tolist() == [6, 4, 5] and steps.before_N.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_the_choice_and_its_reason():
    config = make_config()
    lstms = [make_lstm(config), make_lstm(config)]
    there, linear = torch.ones(1, device="meta"), lstms[0].layers[0].input_linear
    here = [1], torch.ones(1)
    assert kernel_of_both(lstms, *here) is None and "not built for meta" in fused_obstacle([linear], there)
    with elmo_backend("fused"):
        assert kernel_of_both(lstms, *here) is not None and kernel_of_both(lstms, [], torch.ones(0)) is None
        assert kernel_of_both(lstms, [1], torch.ones(1, dtype=torch.float64)) is None
        linear.register_forward_hook(lambda *_: None)
        assert kernel_of_both(lstms, *here) is None
        message = "'fused' was forced, but a layer is wrapped, hooked or quantized.* Use elmo_backend\\('reference'\\)"
        with pytest.raises(ValueError, match=message):
            run(lstms[0], *make_batch(config))
    lstms[0] = ELMoLSTM(config)
    lstms[0].register_forward_hook(lambda *_: None)
    with elmo_backend("fused"):
        assert kernel_of_both(lstms, *here) is None
    with elmo_backend("reference"):
        assert fused_obstacle([], torch.ones(1)) == "'reference' is forced"


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def cells(dtype, seed=0, sequences=5, width=37):
    """A slice of rows of larger tensors, as in a step: gates, cells before, and rooms for the results."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.promote_types(dtype, torch.float32)

    def rows(columns, kind):
        return torch.randn(2, 3 * sequences, columns, generator=generator).to(kind)[:, sequences : 2 * sequences]

    return {
        "gates": rows(4 * width, dtype),
        "before": rows(width, exact),
        "values": rows(4 * width, exact),
        "cells": rows(width, exact),
        "raw": rows(width, dtype),
        "grad_raw": rows(width, dtype),
        "grad_cell": rows(width, exact),
        "grad_gates": rows(4 * width, dtype),
    }


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.4, None])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [37, 1024, 1025])
def test_triton_kernels_equal_their_definition(width, dtype, clip):
    pytest.importorskip("triton", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []

    def launch(kernel):
        return lambda *tensors: elmo_lstm_fused._launch(kernel, tensors[:-1], tensors[-1])

    kernels = launch(elmo_lstm_fused._forward_in_triton), launch(elmo_lstm_fused._backward_in_triton)
    for forward, backward in (kernels, (cell_forward, cell_backward)):
        room = {name: tensor.to(device) for name, tensor in cells(dtype, width=width).items()}
        room["gates"][0, 0, 0] = torch.nan
        forward(*(room[name] for name in ("gates", "before", "values", "cells", "raw")), clip)
        assert clip is None or room["cells"].abs().nan_to_num().max() == room["cells"].new_tensor(clip)
        given = [room[name] for name in ("grad_raw", "values", "cells", "before")]
        states = {name: room[name].clone() for name in ("values", "cells", "raw")}
        backward(*given, *(room[name] for name in ("grad_cell", "grad_gates", "raw")), clip)
        found.append((states, room))
    torch.testing.assert_close(*found, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)
    assert found[0][1]["raw"][0, 0, 0].isnan() and not found[0][1]["raw"][0, 1].isnan().any()


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from modeling_elmo.elmo_lstm_fused import _backward_in_triton, _forward_in_triton

for kernel in (_forward_in_triton, _backward_in_triton):
    names = kernel.arg_names[: kernel.arg_names.index("sequences")]
    for dtype, exact, clip in (("fp64", "fp64", 3.0), ("fp32", "fp32", None), ("bf16", "fp32", 3.0)):
        types = dict.fromkeys(kernel.arg_names, "i32") | {"CLIP": "constexpr", "BLOCK": "constexpr"}
        for name in (name for name in names if not name.endswith(("_k", "_s"))):
            types[name] = f"*{dtype if name in ('gates', 'raw', 'grad_raw', 'grad_gates') else exact}"
        source = ASTSource(kernel, types, {"CLIP": clip, "BLOCK": 1024})
        print(len(compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]))
"""


@pytest.mark.slow
def test_triton_kernels_compile_for_a_gpu():
    """Without a GPU. The interpreter takes more Python than the compiler."""
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    sizes = done.stdout.split()
    assert len(sizes) == 6 and all(int(size) > 0 for size in sizes), done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backend", ["fused", "training"])
def test_cuda_equals_the_definition(backend, options):
    config = make_config(**{"cell_clip": 0.7, "projection_clip": 0.5, **options})
    lstm = make_lstm(config, dtype=torch.float64).cuda()
    found, expected = (gradients(lstm, config, name, "forward_N", "cuda") for name in (backend, "reference"))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_triton_launches_on_the_device_of_the_tensors(monkeypatch):
    """It would launch on the current one, which is 0 for each process until something sets it."""
    current, launched = [0], []
    exchanged = lambda index: (current[0], current.__setitem__(0, index))[0]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchanged)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchanged)
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *_, **__: launched.append(current[0])})()
    monkeypatch.setattr(elmo_lstm_fused, "triton", SimpleNamespace(next_power_of_2=int, cdiv=lambda *_: 1))
    tensor = SimpleNamespace(
        device=torch.device("cuda", 1), is_cuda=True, get_device=lambda: 1, shape=(2, 3, 4), stride=lambda: (12, 4, 1)
    )
    elmo_lstm_fused.run_cells(print, kernel, *(tensor,) * 5, clip=None)
    assert launched == [1] and current == [0]
