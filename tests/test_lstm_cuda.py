"""The LSTM of accelerators, on CPU: both directions at once, and its Triton kernels against plain PyTorch.

triton reads `TRITON_INTERPRET` when it is imported, so the kernels run on CPU if no device was found (`conftest.py`).
"""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from bilm_models import computed_by, filled_with_nan, make_config, make_lstm, make_sequences, run_lstm, seeded
from places import ROOT
from triton_compiler import words_printed

from modeling_elmo import ELMoModel, elmo_backend
from modeling_elmo.kernels import lstm_cuda, lstm_loop
from modeling_elmo.kernels.lstm_cuda import LayerArithmetic, StepArithmetic
from modeling_elmo.kernels.lstm_loop import cell_backward, cell_forward
from modeling_elmo.kernels.plan import make_plan
from modeling_elmo.kernels.sequences import Steps, StepsInRoom

with suppress(ImportError):  # without triton, its tests are skipped
    from many_programs import broken, together, with_bfloat16


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

    kernels = launch(lstm_cuda._cells_forward), launch(lstm_cuda._cells_backward)
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
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from MODULE import _cells_backward, _cells_forward, _layer_backward, _layer_forward, choose_tiles

CELLS = {"cell", "cells", "grad_cell", "parts", "before"}  # in float32 if products are in half precision
NUMBERS = {"steps", "counters"}
PRODUCTS = {
    "gates", "state_weight", "projection", "hidden", "raw", "outputs", "grad_outputs", "grad_gates", "grad_hidden",
    "grad_raw",
}


def compiled(kernel, capability, constants, dtype, exact, values, **options):
    types = {}
    for name in kernel.arg_names:
        types[name] = "constexpr" if name in constants else "i32"
        if name in PRODUCTS:
            types[name] = f"*{dtype}"
        elif name in CELLS:
            types[name] = f"*{exact}"
        elif name == "values":
            types[name] = f"*{values}"
        elif name in NUMBERS:
            types[name] = "*i32"
    aligned = [(number,) for number, kind in enumerate(types.values()) if kind.startswith("*")]
    attributes = dict.fromkeys(aligned, [["tt.divisibility", 16]])
    source = ASTSource(kernel, types, constants, attributes)
    result = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(result.asm["cubin"])
    return result.metadata.shared


for kernel in (_cells_forward, _cells_backward):
    for dtype, exact, clip in (("fp64", "fp64", 3.0), ("fp32", "fp32", None), ("bf16", "fp32", 3.0)):
        print(compiled(kernel, 80, {"CLIP": clip, "BLOCK": 1024}, dtype, exact, exact))
for capability, memory in ((80, 163 << 10), (90, 227 << 10)):
    for sequences, cells, width, dtype, grouped in SIZES:
        for kernel in (_layer_forward, _layer_backward):
            tiles = choose_tiles(sequences, cells, width, getattr(torch, dtype), kernel is _layer_forward, memory)
            tiles = dict(tiles)
            options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
            constants = {
                "CELL_CLIP": 3.0, "PROJECTION_CLIP": 3.0, "K": 2, "H": cells, "P": width, "IS_PROJECTED": True,
                "GROUPED": grouped, "POLL": grouped, "PRECISION": "tf32x3", **tiles,
            }
            if kernel is _layer_forward:
                constants["KEEP"] = True
            short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
            shared = compiled(kernel, capability, constants, short, "fp32", short, **options)
            assert shared <= memory, (capability, sequences, cells, dtype, shared)
            print(shared)
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["modeling_elmo.kernels.lstm_cuda", "generated.modeling_elmo"])
def test_triton_kernels_compile_for_a_gpu(module, tmp_path):
    """Without a GPU. The interpreter takes more Python than the compiler. Triton reads the source of a kernel."""
    sizes = [(64, 1024, 256, "bfloat16", False)]
    if "generated" not in module:  # which has the same kernels
        sizes += [(128, 4096, 512, "float32", True), (512, 1024, 256, "bfloat16", True)]
    printed = words_printed(COMPILE.replace("SIZES", repr(sizes)), module, tmp_path)
    assert len(printed) == 6 + 4 * len(sizes)


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


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"BS": 16, "BH": 16, "BK": 16, "BT": 16, "BP": 16, "BL": 16, "num_warps": 4, "num_stages": 1}
LAYERS = {  # cells, outputs, running sequences of each step, clips
    "one sequence": (32, 16, [1, 1, 1], 3.0),
    "lengths of 1": (64, 32, [33], 0.1),
    "clips are hit": (32, 16, [37, 20, 20, 1], 0.2),
    "no clips": (64, 32, [19, 7, 7, 2, 1], None),
    "no projection": (32, 32, [18, 5, 1], 0.3),
}


def outcome_of_layer(arithmetic, case, dtype=torch.float32, projected=True, directions=2, device="cpu", room=(0, 0)):
    """Outputs, states at the ends, and the gradients of all that a layer reads, in float64.

    `room`: tokens and sequences that are not there, after those that are, of steps that only the device knows.
    """
    cells, width, batch_sizes, clip = case
    projected = projected and cells != width
    tokens, sequences, gates = sum(batch_sizes), batch_sizes[0], 4 * cells
    generator, exact = torch.Generator().manual_seed(0), torch.promote_types(dtype, torch.float32)

    def make(*shape, scale=1.0, dtype=dtype):
        values = torch.randn(directions, *shape, generator=generator, dtype=torch.float64) * scale
        return values.to(device, dtype).requires_grad_()

    weights = [make(gates, width, scale=width**-0.5), make(gates, scale=0.1), make(gates, width, scale=width**-0.5)]
    weights.append(make(width, cells, scale=cells**-0.5) if projected else None)
    tensors = make(tokens, width), make(sequences, width, scale=0.1), make(sequences, cells, scale=0.1, dtype=exact)
    layer, steps = lstm_loop.StackedLayer(*weights, clip, clip), Steps(batch_sizes, torch.device(device))
    in_room = tensors
    if any(room):
        more = room[0], room[1], room[1]
        in_room = [F.pad(each, (0, 0, 0, size), value=0.5) for each, size in zip(tensors, more, strict=True)]
        numbers = zip(StepsInRoom.numbers(steps, sequences + room[1]), (*room, room[0]), strict=True)
        steps = StepsInRoom(*(F.pad(each, (0, size)) for each, size in numbers))
    [outputs] = lstm_loop.run_groups(arithmetic, [layer], *([tensor] for tensor in in_room), steps)
    if not any(room):
        with torch.no_grad():
            [without_gradients] = lstm_loop.run_groups(arithmetic, [layer], *([tensor] for tensor in tensors), steps)
        torch.testing.assert_close(without_gradients, outputs, rtol=0, atol=0)
    outputs = [each[:, :size] for each, size in zip(outputs, (tokens, sequences, sequences), strict=True)]
    given = [make(tokens, width), make(sequences, width), make(sequences, cells, dtype=exact)]
    wanted = [tensor for tensor in (*weights, *tensors) if tensor is not None]
    gradients = torch.autograd.grad(outputs, wanted, [value.detach() for value in given])
    return [value.detach().double().cpu() for value in (*outputs, *gradients)]


def errors(found, expected):
    """Of each result, relative to its size."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def with_tiles(monkeypatch, module=lstm_cuda, programs=1, **tiles):
    monkeypatch.setattr(module, "choose_tiles", lambda *_: SMALL | {"SPLIT": 1} | tiles)
    monkeypatch.setattr(module, "num_programs", lambda device: programs)


def interpreted(test):
    """A test whose kernels run in triton's interpreter."""
    is_there = lstm_cuda.triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
    return pytest.mark.slow(pytest.mark.skipif(not is_there, reason="needs triton, and no GPU")(test))


layers = pytest.mark.parametrize(
    "case, split",
    [pytest.param(case, split, id=f"{name}-{split}") for name, case in LAYERS.items() for split in (1, 2)],
)
barriers = pytest.mark.parametrize("grouped", [False, True], ids=["one barrier", "grouped"])


@barriers
@layers
@interpreted
def test_a_layer_in_one_launch_equals_its_steps(case, split, grouped, monkeypatch):
    programs, sequences = (5, 32) if grouped else (3, 16)
    with_tiles(monkeypatch, programs=programs, SPLIT=split, BS=sequences)
    expected = outcome_of_layer(StepArithmetic(), case, torch.float64)
    with together(), filled_with_nan():
        found = outcome_of_layer(LayerArithmetic(grouped), case)
    assert max(errors(found, expected)) < 1e-6


@barriers
@layers
@interpreted
def test_a_layer_in_a_room_equals_its_steps(case, split, grouped, monkeypatch):
    with_tiles(monkeypatch, SPLIT=split)
    expected = outcome_of_layer(StepArithmetic(), case, torch.float64)
    with filled_with_nan():
        found = outcome_of_layer(LayerArithmetic(grouped), case, room=(5, 20))
    assert max(errors(found, expected)) < 1e-6


BARRIER = r"( +)arrivals \+= members\n +_wait_for_all\(.*\)\n"
MISTAKES = {  # most of them in the backward kernel, whose source comes last
    "no barrier after the cells": lambda source: without_barrier(source, -3),
    "no barrier after the parts": lambda source: without_barrier(source, -2),
    "no barrier after a step": lambda source: without_barrier(source, -1),
    "one arrival too many": lambda source: replace_last(source, "arrivals += members", "arrivals += members + 1"),
    "cached states": lambda source: by_way_of_the_cache(source, "x_tile = "),
    "cached parts": lambda source: by_way_of_the_cache(source, "total += tl.load(parts"),
    "cached cells": lambda source: by_way_of_the_cache(source, "of_cell = tl.load(of_cells"),
}


def without_barrier(source, number):
    start, end = [*re.finditer(BARRIER, source)][number].span()
    return source[:start] + source[end:]


def by_way_of_the_cache(source, line):
    start = source.index(line)
    return source[:start] + source[start:].replace(', cache_modifier=".cg"', "", 1)


def replace_last(source, old, new):
    return new.join(source.rsplit(old, 1))


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
@interpreted
def test_mistakes_between_programs_are_found(mistake, monkeypatch, tmp_path, request):
    """The test above would see them."""
    sizes = (16, 32) if "cached states" in request.node.name else (32, 16)  # a line has rows of two steps
    module = broken(lstm_cuda, mistake, tmp_path, monkeypatch)
    with_tiles(monkeypatch, module, programs=3, SPLIT=1 if sizes[0] == 16 else 2)
    case = *sizes, [51, 51, 51, 19, 7, 7], 3.0
    expected = outcome_of_layer(StepArithmetic(), case, torch.float64)
    for seed in range(6):
        try:
            with together(seed, timeout=15):
                found = outcome_of_layer(module.LayerArithmetic(), case)
        except (AssertionError, TimeoutError):
            return
        if not max(errors(found, expected)) < 1e-6:
            return
    pytest.fail("not found")


@barriers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@interpreted
def test_half_precision(dtype, grouped, monkeypatch):
    """Errors equal the errors of the steps, which keep the values of gates in float32."""
    with_tiles(monkeypatch, SPLIT=2)
    case = 32, 16, [37, 20, 20, 1], 3.0
    expected = outcome_of_layer(StepArithmetic(), case, torch.float64)
    steps = errors(outcome_of_layer(StepArithmetic(), case, dtype), expected)
    with with_bfloat16():
        layer = errors(outcome_of_layer(LayerArithmetic(grouped), case, dtype), expected)
    assert all(error < 2 * of_steps for error, of_steps in zip(layer, steps, strict=True)), (layer, steps)


def test_a_model_runs_in_one_launch_for_each_layer(monkeypatch):
    """In both directions, or in one. A launch that the driver refuses takes the steps, and says so."""
    launched = []

    def run(self, gates_KNG, *arguments):
        launched.append(len(gates_KNG))
        return StepArithmetic.forward_steps(self, gates_KNG, *arguments)

    monkeypatch.setattr(LayerArithmetic, "forward_steps", run)
    monkeypatch.setattr(LayerArithmetic, "backward_steps", StepArithmetic.backward_steps)
    model, batch = make_model_and_batch()
    for kernel in ("persistent", "grouped"):
        with computed_by(kernel):
            found = model(**batch)
            model.forward_lstm.register_forward_hook(lambda *_: None)
            model(**batch)
        model.forward_lstm._forward_hooks.clear()
        assert launched == [2, 2, 1, 1, 1, 1]  # layers
        launched.clear()
        with elmo_backend("reference"):
            torch.testing.assert_close(found, model(**batch))


def test_a_refused_launch_takes_the_steps(monkeypatch, warnings_of_transformers):
    cuda, refusals = torch.device("cuda"), {}
    monkeypatch.setattr(lstm_cuda, "REFUSALS", refusals)

    def refuse():
        raise RuntimeError("too many programs")

    assert not lstm_cuda._is_run(refuse, cuda, is_trial=False)
    assert "too many programs" in refusals[cuda] and "Its numbers are right" in warnings_of_transformers.text
    with pytest.raises(RuntimeError, match="too many programs"):
        lstm_cuda._is_run(refuse, cuda, is_trial=True)
    refusals[torch.device("cpu")] = "refused"
    case = LAYERS["clips are hit"]
    found = outcome_of_layer(LayerArithmetic(), case, torch.float64)
    torch.testing.assert_close(found, outcome_of_layer(StepArithmetic(), case, torch.float64))


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("memory", [227 << 10, 163 << 10, 99 << 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tiles_fill_their_products(dtype, memory, forward):
    for sequences in (1, 60, 129, 500, 2000):
        for cells, width in ((16, 16), (48, 16), (1024, 128), (4096, 512), (1040, 528)):
            tiles = lstm_cuda.choose_tiles(sequences, cells, width, dtype, forward, memory)
            length = cells if forward else 4 * cells
            assert not cells % tiles["BH"] and not width % tiles["BK"] and not width % tiles["BP"]
            assert not length % (tiles["SPLIT"] * tiles["BL"]) and not tiles["BS"] % tiles["BT"]
            assert min(value for name, value in tiles.items() if name.startswith("B")) >= 16


def test_clips_of_half_precision():
    """0.2 is 0.19995 in float16. What is there was clipped, and has no gradient."""
    case = LAYERS["clips are hit"]
    expected = outcome_of_layer(StepArithmetic(), case, torch.float64)
    assert max(errors(outcome_of_layer(StepArithmetic(), case, torch.float16), expected)) < 5e-3


ARITHMETICS = {"steps": StepArithmetic(), "one barrier": LayerArithmetic(), "grouped": LayerArithmetic(grouped=True)}
CARD_LAYERS = {  # with the tiles of their size
    **LAYERS,
    "tiny": (64, 16, [40, 40, 7, 1], 3.0),
    "small": (1024, 128, [70, 70, 33, 20, 1], 3.0),
    "shipped": (1024, 256, [512] * 3 + [300, 17], 3.0),
    "original": (4096, 512, [40, 40, 12, 1], 3.0),
}


def print_errors_on_a_card(arithmetic, case, dtype, tf32):
    """The child of the next test."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    layer = CARD_LAYERS[case]
    if dtype != torch.float32:  # where a value rounds to a bound, or not, by chance
        layer = *layer[:3], 3.0
    expected = outcome_of_layer(StepArithmetic(), layer, torch.float64)
    found = [outcome_of_layer(ARITHMETICS[arithmetic], layer, dtype, device=DEVICE) for _ in range(2)]
    torch.testing.assert_close(*found, rtol=0, atol=0)  # the same bits
    print(json.dumps(errors(found[0], expected)))


@pytest.mark.gpu
@pytest.mark.parametrize("tf32", [False, True], ids=["", "TF32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("arithmetic", ["one barrier", "grouped"])
@pytest.mark.parametrize("case", CARD_LAYERS)
def test_errors_on_a_card(case, arithmetic, dtype, tf32):
    """Each output and gradient is as near to float64 as that of the steps. A wrong barrier hangs: in a process."""
    if DEVICE == "cpu" or (tf32 and dtype != "float32"):
        pytest.skip("needs a GPU, and TF32 is about float32")
    found = {}
    for name in ("steps", arithmetic):
        call = f"test_lstm_cuda.print_errors_on_a_card({name!r}, {case!r}, torch.{dtype}, {tf32})"
        command = [sys.executable, "-c", f"import test_lstm_cuda, torch; {call}"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stderr[-2000:]
        found[name] = json.loads(done.stdout.splitlines()[-1])
    for layer, steps in zip(found[arithmetic], found["steps"], strict=True):
        assert layer < 2 * steps + 1e-6, found


@barriers
@interpreted
def test_nan_stays_in_its_sequence(grouped, monkeypatch):
    with_tiles(monkeypatch)
    batch_sizes, generator = [3, 3, 2], torch.Generator().manual_seed(0)
    weights = [torch.randn(1, *shape, generator=generator) for shape in ((128, 16), (128,), (128, 16), (16, 32))]
    states = [[torch.zeros(1, 3, size)] for size in (16, 32)]
    tokens = torch.randn(1, 8, 16, generator=generator)
    found = []
    for value in (0.0, torch.nan):
        tokens[0, 4] = value  # the second sequence at the second step
        given = [[tokens.clone().requires_grad_()], *states]
        layer, steps = lstm_loop.StackedLayer(*weights, 3.0, 3.0), Steps(batch_sizes, torch.device("cpu"))
        [(outputs, *_)] = lstm_loop.run_groups(LayerArithmetic(grouped), [layer], *given, steps)
        (gradient,) = torch.autograd.grad(outputs.sum(), given[0])
        found.append((outputs, gradient))
    others = [0, 2, 3, 5, 6]  # rows of the first and the third sequence
    for without, with_nan in zip(*found, strict=True):
        torch.testing.assert_close(with_nan[0, others], without[0, others], rtol=0, atol=0)
    assert found[1][0][0, [4, 7]].isnan().all() and not found[1][0][0, 1].isnan().any()
