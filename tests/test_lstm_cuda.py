"""The LSTM of accelerators, on CPU: both directions at once, and its Triton kernels against plain PyTorch.

triton reads `TRITON_INTERPRET` when it is imported, so the kernels run on CPU if no device was found (`conftest.py`).
"""

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from bilm_models import computed_by, make_config, make_lstm, make_sequences, run_lstm, seeded
from places import ROOT

from modeling_elmo import ELMoModel, elmo_backend
from modeling_elmo.kernels import lstm_cuda, lstm_loop
from modeling_elmo.kernels.lstm_loop import cell_backward, cell_forward
from modeling_elmo.kernels.plan import make_plan
from modeling_elmo.shipping import MODULES, generate


@pytest.mark.parametrize("most", [1, 600, 1 << 28])
def test_inference_keeps_few_gates_in_memory(most, monkeypatch):
    config = make_config()
    lstm, batch = make_lstm(config), make_sequences(config)
    monkeypatch.setattr(lstm_loop, "MOST_GATES", most)
    with torch.no_grad(), computed_by("fused"), patch("torch.baddbmm", wraps=torch.baddbmm) as products:
        found = run_lstm(lstm, *batch)
    with torch.no_grad(), elmo_backend("reference"):
        torch.testing.assert_close(found, run_lstm(lstm, *batch), atol=2e-6, rtol=1e-5)
    rows = max(call.args[1].shape[1] for call in products.call_args_list)
    assert rows == {1: 6, 600: 7, 1 << 28: 28}[most]  # tokens whose input gates are one product


def make_model_and_batch(**options):
    """A batch of vectors, in double precision."""
    model = ELMoModel(make_config(**options)).double()
    tokens, mask, *_ = make_sequences(model.config, torch.float64)
    return model, {"inputs_embeds": tokens, "attention_mask": mask.long()}


@pytest.fixture
def directions(monkeypatch):
    """The number of directions in each call of the cells."""
    numbers = []
    monkeypatch.setattr(lstm_cuda, "cell_forward", lambda *rooms: numbers.append(len(rooms[0])) or cell_forward(*rooms))
    return numbers


def test_both_directions_equal_one_after_the_other(directions):
    model, batch = make_model_and_batch()
    states = [state.detach().requires_grad_() for state in model(**batch).final_states]
    wanted, found = [*states, *model.forward_lstm.parameters(), *model.backward_lstm.parameters()], []
    for backend in ("fused", "reference"):
        with computed_by(backend):
            output = model(**batch, initial_states=states)
        loss = output.elmo_embeddings.sin().sum() + output.final_states[1].sum()
        found.append([output.hidden_states, output.final_states, torch.autograd.grad(loss, wanted)])
    torch.testing.assert_close(*found)
    assert directions == [2] * 2 * 9  # layers, steps
    model, batch = make_model_and_batch(dropout=0.5)
    with computed_by("fused"):
        first, again = (model.train()(**batch).hidden_states[1:] for _ in range(2))
    assert all(layer.any() and not torch.equal(layer, same) for layer, same in zip(first, again, strict=True))


def test_hooks_are_not_bypassed(directions):
    model, batch = make_model_and_batch()
    model.forward_lstm.register_forward_hook(lambda *_: directions.append("hook"))
    with computed_by("fused"):
        model(**batch)
        assert "hook" in directions and 2 not in directions
        linear = model.forward_lstm.layers[0].input_linear
        linear.register_forward_hook(lambda *_: None)
        assert "a layer is wrapped, hooked" in make_plan([linear], torch.ones(1), is_lstm=True).reason
        before = len(directions)
        model(**batch)
        assert len(directions) - before < before


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def cells(dtype, seed=0, sequences=5, width=37):
    """A slice of rows of larger tensors, as in a step: gates, cells before, and rooms for the results."""
    generator = seeded(seed)
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
        return lambda *tensors: lstm_cuda._launch(kernel, tensors[:-1], tensors[-1])

    kernels = launch(lstm_cuda._forward_in_triton), launch(lstm_cuda._backward_in_triton)
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
from MODULE import _backward_in_triton, _forward_in_triton

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
@pytest.mark.parametrize("module", ["modeling_elmo.kernels.lstm_cuda", "generated.modeling_elmo"])
def test_triton_kernels_compile_for_a_gpu(module, tmp_path):
    """Without a GPU. The interpreter takes more Python than the compiler. Triton reads the source of a kernel."""
    pytest.importorskip("triton", reason="triton is not installed")
    (tmp_path / "generated").mkdir()
    for name in MODULES:
        (tmp_path / "generated" / name).write_bytes(generate(name))
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    code = COMPILE.replace("MODULE", module)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    sizes = done.stdout.split()
    assert len(sizes) == 6 and all(int(size) > 0 for size in sizes), done.stderr[-2000:]


def test_triton_launches_on_the_device_of_the_tensors(monkeypatch):
    """It would launch on the current one, which is 0 for each process until something sets it."""
    current, launched = [0], []
    exchanged = lambda index: (current[0], current.__setitem__(0, index))[0]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchanged)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchanged)
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *_, **__: launched.append(current[0])})()
    monkeypatch.setattr(lstm_cuda, "triton", SimpleNamespace(next_power_of_2=int, cdiv=lambda *_: 1))
    tensor = SimpleNamespace(
        device=torch.device("cuda", 1), is_cuda=True, get_device=lambda: 1, shape=(2, 3, 4), stride=lambda: (12, 4, 1)
    )
    lstm_cuda.run_cells(print, kernel, *(tensor,) * 5, None)
    assert launched == [1] and current == [0]
