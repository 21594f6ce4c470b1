"""Products against torch.nn.functional.linear; the choice of the backend; calls at once against one after the other."""

import math
import multiprocessing
import platform
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modeling_elmo import (
    ELMoConfig,
    ELMoForPreTraining,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
    directions,
    elmo_backend,
)
from modeling_elmo.kernels import lstm_cpu, onednn, plan, products, threads
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.kernels.onednn import bfloat16_obstacle, onednn_dtypes, processor_name
from modeling_elmo.kernels.plan import choose_backend, forced_backend
from modeling_elmo.kernels.products import Transposed, fast_linear, packed, product, tanh
from modeling_elmo.kernels.threads import at_once, can_use_threads, own_share


def test_torch_2_8_does_not_know_the_processor(monkeypatch):
    """And the package is imported all the same."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "A processor"}, raising=False)
    assert processor_name() == "A processor"
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert processor_name() == (platform.processor() or platform.machine()) != ""


@pytest.fixture(params=["oneDNN", "oneDNN on Intel", "public operators"])
def operators(request, monkeypatch):
    if request.param == "public operators":
        monkeypatch.setattr(onednn, "onednn_dtypes", frozenset)
        monkeypatch.setattr(plan, "onednn_dtypes", frozenset)
    elif not onednn_dtypes():
        pytest.skip("this build of torch has no oneDNN linear operators")
    monkeypatch.setattr(products, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(products, "_is_intel", request.param == "oneDNN on Intel")
    return request.param


@pytest.mark.parametrize("rows, keep", [(0, None), (1, True), (5, False), (130, None), (1, "transposed")])
def test_product_equals_linear(operators, rows, keep):
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(24, 17)), torch.randn(24)
    inputs, other = torch.randn(rows, 17), torch.randn(rows, 24)
    with torch.no_grad():
        if keep == "transposed":
            stored = Transposed(weight.t().contiguous())
        else:
            stored = weight if keep is None else packed(weight, keep)
        expected = F.linear(inputs, weight, bias)
        torch.testing.assert_close(product(inputs, stored, bias), expected)
        torch.testing.assert_close(product(inputs, stored), F.linear(inputs, weight))
        torch.testing.assert_close(product(inputs, stored, bias, plus_NG=other.clone()), expected + other)
        torch.testing.assert_close(product(inputs, stored, plus_NG=other.clone()), F.linear(inputs, weight) + other)
        clipped = product(inputs, stored, bias, clip=0.5)
        torch.testing.assert_close(clipped, expected.clamp(-0.5, 0.5))
        assert not rows or (clipped.abs() == 0.5).any()
        assert clipped.is_contiguous()


def outcome(linear, inputs):
    """The output, and the gradients that are wanted."""
    wanted = [tensor for tensor in (inputs, *linear.parameters()) if tensor.requires_grad]
    for output in (fast_linear(linear, inputs), linear(inputs)):
        yield [output, *torch.autograd.grad(output.sin().sum(), wanted)]


FROZEN = [(), ("weight", "bias"), ("inputs",)]


@pytest.mark.parametrize("frozen, bias", [*((names, True) for names in FROZEN), ((), False)])
def test_gradients_equal_linear(operators, frozen, bias):
    torch.manual_seed(0)
    linear, inputs = nn.Linear(17, 24, bias=bias), torch.randn(9, 17, requires_grad="inputs" not in frozen)
    for name, parameter in linear.named_parameters():
        parameter.requires_grad_(name not in frozen)
    assert choose_backend([linear], inputs)[0] == "training"
    torch.testing.assert_close(*outcome(linear, inputs))


def test_parts_of_larger_matrices(monkeypatch):
    monkeypatch.setattr(products, "FEW_PRODUCTS", 1)
    values = torch.randn(2, 3, 12)
    for part in (values[..., :6], values[..., ::2], values[:, 0, 6:], values[:0, :, :6]):
        torch.testing.assert_close(*outcome(nn.Linear(6, 4), part.requires_grad_()))


def test_a_changed_linear_is_called():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    inputs, hooked = torch.randn(4, 3), nn.Linear(3, 2)
    hooked.register_forward_hook(lambda module, arguments, output: output + 1)
    for linear in (Doubled(3, 2), hooked):
        torch.testing.assert_close(fast_linear(linear, inputs), linear(inputs))
    with torch.autocast("cpu"):
        assert fast_linear(nn.Linear(3, 2), inputs).dtype == torch.bfloat16
    calls, linear = [], nn.Linear(3, 2)
    linear.register_full_backward_hook(lambda *_: calls.append(1))
    fast_linear(linear, inputs.requires_grad_()).sum().backward()
    assert calls == [1]


def test_the_choice_and_its_reason():
    layers, inputs = [nn.Linear(3, 2)], torch.randn(4, 3)
    assert choose_backend(layers, inputs) == ("training", "CPU training")
    assert choose_backend(layers, inputs.bfloat16()) == ("reference", "training is not built for torch.bfloat16 on cpu")
    with torch.no_grad():
        assert choose_backend(layers, inputs) == ("inference", "CPU inference")
        assert choose_backend(layers, inputs.to("meta"))[1] == "inference is not built for torch.float32 on meta"
        assert "dtype is not the inputs'" in choose_backend(layers, inputs.double())[1]
        with torch.autocast("cpu", torch.float16):
            reason = "training is not built for autocast in torch.float16"
            assert choose_backend(layers, inputs) == ("reference", reason)
        with elmo_backend("reference"):
            assert choose_backend(layers, inputs) == ("reference", "forced")
        with elmo_backend("training"):
            assert choose_backend(layers, inputs) == ("training", "forced")
    with elmo_backend("inference"), pytest.raises(ValueError, match="'inference' was forced, but gradients are needed"):
        choose_backend(layers, inputs)
    with elmo_backend("reference"), ThreadPoolExecutor(1) as other:  # another thread is not forced
        assert other.submit(choose_backend, layers, inputs).result() == ("training", "CPU training")
    layers[0].register_forward_hook(lambda *_: None)
    assert "hooked" in choose_backend(layers, inputs)[1]
    with pytest.raises(ValueError, match="'cudnn'; pass one of reference, "), elmo_backend("cudnn"):
        pass


def test_tanh_is_exact_to_rounding():
    values = torch.cat([torch.linspace(-12, 12, 100_001), torch.tensor([0.0, math.inf, -math.inf, 1e-30])])
    for out in (None, torch.empty_like(values)):
        found = tanh(values, out)
        assert out is None or found is out
        torch.testing.assert_close(found.double(), values.double().tanh(), rtol=0, atol=2e-7)
    assert tanh(torch.tensor(math.nan)).isnan()
    torch.testing.assert_close(tanh(values.double()), values.double().tanh(), rtol=0, atol=0)


@pytest.mark.parametrize("instructions", [True, False])
def test_a_processor_without_bfloat16_is_named(instructions, monkeypatch, caplog):
    dtypes = {torch.float32, torch.bfloat16} if instructions else {torch.float32}
    monkeypatch.setattr(onednn, "onednn_dtypes", lambda: dtypes)
    monkeypatch.setattr(plan, "onednn_dtypes", lambda: dtypes)
    plan.logger.warning_once.cache_clear()
    layers, inputs = [nn.Linear(3, 2)], torch.randn(4, 3)
    choose_backend(layers, inputs)
    assert not caplog.messages
    with torch.autocast("cpu"):
        found = {choose_backend(layers, inputs)[0] for _ in range(2)}
    assert found == {"training" if instructions else "reference"} and len(caplog.messages) == 1 - instructions
    assert instructions or "no instructions for bfloat16" in caplog.text


@pytest.mark.parametrize(
    "machine, of_onednn, of_avx512, is_fast",
    [
        ("x86_64", True, True, True),
        ("AMD64", True, False, False),  # emulated
        ("x86_64", False, False, False),
        ("aarch64", True, False, True),
        ("arm64", False, False, False),
    ],
)
def test_bfloat16_needs_instructions_of_its_own(machine, of_onednn, of_avx512, is_fast, monkeypatch):
    dtypes = {torch.float32, torch.bfloat16} if of_onednn else {torch.float32}
    monkeypatch.setattr(onednn, "onednn_dtypes", lambda: dtypes)
    monkeypatch.setattr(plan, "onednn_dtypes", lambda: dtypes)
    monkeypatch.setattr(onednn.platform, "machine", lambda: machine)
    monkeypatch.setattr(onednn, "question", lambda name: lambda: of_avx512)
    assert bfloat16_obstacle() == (None if is_fast else "this processor has no instructions for bfloat16")


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="a file of Linux")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_bfloat16_on_this_machine():
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    flags = set(re.search(r"^(?:flags|Features)\s*:(.*)", text, re.MULTILINE)[1].split())
    assert (bfloat16_obstacle() is None) == bool(flags & {"avx512_bf16", "bf16"})


def replica_of(network: nn.Module) -> nn.Module:
    """What `torch.nn.parallel.replicate` makes for a device: modules with plain tensors in the place of parameters."""
    modules = list(network.modules())
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        replica._former_parameters = {}
        for name, child in module._modules.items():
            replica._modules[name] = None if child is None else replicas[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                replica._former_parameters[name] = parameter * 1
                setattr(replica, name, replica._former_parameters[name])
    return replicas[network]


@pytest.mark.parametrize(
    "model_class, gradients", [(ELMoModel, False), (ELMoForPreTraining, True), (ELMoForTokenClassification, True)]
)
def test_replicas_of_data_parallel(model_class, gradients):
    """Trainer makes them if there are several devices and one process."""
    torch.manual_seed(0)
    tokenizer = ELMoTokenizer(vocab=["<PAD>", "<S>", "</S>", "<UNK>", "a", "b"])
    model = model_class(ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), num_labels=3)).eval()
    inputs = tokenizer(["a b a", "b"], padding=True, return_tensors="pt")
    options = {"labels": inputs.input_ids % 3} if model_class is not ELMoModel else {}
    model.base_model.cache_vocabulary(["a", "b"], tokenizer)
    with torch.set_grad_enabled(gradients):
        found, expected = replica_of(model)(**inputs, **options)[0], model(**inputs, **options)[0]
    torch.testing.assert_close(found, expected)
    with elmo_backend("fused"), pytest.raises(ValueError, match="a layer is wrapped"):
        replica_of(model)(**inputs, **options)
    assert replica_of(model).dtype == torch.float32


# Both directions at once: values, gradients and counts are those of one direction after the other

TEXTS = ["The cat sat on the mat .", "No .", "A dog that nobody knew sat there , too , and said nothing at all ."]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def used(monkeypatch, onednn_at_any_size, two_threads):
    """Numbers of calls that ran at once, in this test; any work is enough for two threads."""
    numbers = []

    def recorded(calls, threads):
        numbers.append(len(calls))
        return at_once(calls, threads)

    monkeypatch.setattr(directions, "at_once", recorded)
    monkeypatch.setattr(lstm_cpu, "at_once", recorded)
    monkeypatch.setattr(directions, "FEW_MULTIPLICATIONS", 0)
    monkeypatch.setattr(directions, "FEW_IN_TRAINING", 0)
    return numbers


def make_model(model_class=ELMoModel, **options):
    torch.manual_seed(0)
    sizes = {"lstm_hidden_size": 21, "projection_size": 7, "cell_clip": 0.5, "projection_clip": 0.2, "dropout": 0.0}
    return model_class(ELMoConfig.from_preset("tiny", **(sizes | options))).eval()


def encoded(texts=TEXTS):
    return ELMoTokenizer()(texts, padding=True, return_tensors="pt")


@pytest.mark.parametrize("few, calls", [(0, 2), (1e12, 1)])
@pytest.mark.parametrize("mode", ["float32", "int8", "bfloat16"])
def test_vectors_and_states(mode, few, calls, used, monkeypatch):
    if obstacle := {"float32": lambda: None, "int8": int8_obstacle, "bfloat16": bfloat16_obstacle}[mode]():
        pytest.skip(obstacle)
    model, encoding = make_model().requires_grad_(False), encoded()
    monkeypatch.setattr(directions, "FEW_MULTIPLICATIONS", few)
    monkeypatch.setattr(directions, "FEW_IN_TRAINING", few)
    if mode == "int8":
        model = model.quantize()
    context = torch.autocast("cpu", torch.bfloat16) if mode == "bfloat16" else nullcontext()
    with context:
        first = model(**encoding)
        found = model(**encoding, initial_states=first.final_states)
        assert used == [calls] * 2
        with elmo_backend("reference"):
            expected = model(**encoding, initial_states=first.final_states)
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if mode == "float32" else {"rtol": 0.05, "atol": 0.02}
    pairs = ([each.float() for each in (*output.hidden_states, *output.final_states)] for output in (found, expected))
    torch.testing.assert_close(*pairs, **tolerance)


UNCLIPPED = {"cell_clip": None, "use_skip_connections": False}


@pytest.mark.parametrize("options, frozen", [({}, False), ({"lstm_hidden_size": 7}, True), (UNCLIPPED, False)])
def test_gradients_equal_the_definition(options, frozen, used):
    model, encoding = make_model(**options).double(), encoded()
    if frozen:
        model.forward_lstm.layers[0].state_linear.requires_grad_(False)
    states = [state.detach().requires_grad_() for state in model(**encoding).final_states]
    wanted = [*states, *(p for name, p in model.named_parameters() if p.requires_grad and "mix" not in name)]

    def gradients():
        output = model(**encoding, initial_states=states)
        total = output.last_hidden_state.square().sum() + output.final_states[1].sum()
        again = torch.autograd.grad(total, wanted, retain_graph=True)
        assert all(torch.equal(*pair) for pair in zip(again, torch.autograd.grad(total, wanted), strict=True))
        return again

    used.clear()
    found = gradients()
    assert used == [2] * 6  # two layers forward, and two backward passes of them
    with elmo_backend("reference"):
        torch.testing.assert_close(found, gradients())


def test_a_backward_pass_frees_what_was_kept(used):
    model = make_model()
    total = model(**encoded()).last_hidden_state.sum()
    nodes = [total.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following]
    layers = {id(node): node for node in nodes if getattr(node, "directions", 1) == 2}.values()
    assert [vars(layer).keys() for layer in layers] == [{"settings", "directions"}] * 2  # autograd frees the rest
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_dropout_repeats_itself(used):
    model, encoding = make_model(ELMoForPreTraining, vocab_size=50, dropout=0.4).train(), encoded()
    labels = torch.randint(1, 50, encoding.attention_mask.shape)
    weight = model.elmo.forward_lstm.layers[1].state_linear.weight
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        losses = [model(**encoding, labels=labels).loss for _ in range(3)]
        found.append([*losses, *torch.autograd.grad(sum(losses), weight)])
    assert all(map(torch.equal, *found)) and len({loss.item() for loss in losses}) == 3 and set(used) == {2}
    used.clear()  # without gradients, both directions draw from one generator, and run one after the other
    for _ in range(2):
        torch.manual_seed(1)
        with torch.no_grad():
            found.append(model.elmo(**encoding).last_hidden_state)
    assert torch.equal(found[2], found[3]) and 2 not in used


def test_hooks_of_parameters_run_once(used):
    model, calls = make_model(), []
    model.forward_lstm.layers[0].projection.weight.register_hook(calls.append)
    model(**encoded()).last_hidden_state.sum().backward()
    assert used and len(calls) == 1


def test_what_watches_operators_sees_both_directions(used):
    model, encoding = make_model().requires_grad_(False), encoded()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(**encoding)
    (sigmoids,) = (event.count for event in profile.key_averages() if event.key == "aten::sigmoid_")
    steps = max(len(text.split()) for text in TEXTS) + 2
    assert sigmoids == 2 * model.config.num_hidden_layers * steps and not used


def test_callers_in_several_threads(used):
    model = make_model().requires_grad_(False)
    encodings = [encoded(TEXTS[: number % 3 + 1]) for number in range(12)]
    expected = [model(**each).last_hidden_state for each in encodings]
    with ThreadPoolExecutor(4, initializer=lambda: torch.set_num_threads(2)) as pool:
        found = list(pool.map(lambda each: model(**each).last_hidden_state, encodings))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_callers_share_the_threads_of_torch(two_threads):
    """The second of two callers at the same time computes alone, and each has its own number again afterwards."""

    def compute():
        with own_share(), own_share():  # a head, and the biLM in it
            inside = torch.get_num_threads()
        return inside, torch.get_num_threads()

    with ThreadPoolExecutor(1) as second:
        assert second.submit(compute).result() == (2, 2)
        with own_share():
            assert second.submit(compute).result() == (1, 2) and torch.get_num_threads() == 2
    model, encoding, inside = make_model().requires_grad_(False), encoded(), []
    model.char_encoder.register_forward_hook(lambda *_: inside.append(torch.get_num_threads()))
    with own_share(), ThreadPoolExecutor(1) as second:
        second.submit(lambda: model(**encoding)).result()
    assert inside == [1]


def test_calls_run_together_in_the_modes_of_the_caller(two_threads):
    together = threading.Barrier(2)

    def call():
        together.wait(timeout=60)  # the other one runs, too
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), dtype, forced_backend()
        return threading.current_thread().name, torch.get_num_threads(), *modes

    for number in (1, 2, 1):
        found = at_once([call, call], number)
        assert found[0][0] != found[1][0] == threading.current_thread().name
        assert {each[1:] for each in found} == {(number, False, True, None, None)}
        assert torch.get_num_threads() == 2
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), elmo_backend("reference"):
        assert at_once([call, call], 1)[0][2:] == (True, False, torch.bfloat16, "reference")


def test_the_number_of_threads_is_the_users_in_all_threads(monkeypatch, two_threads):
    """Setting it for all threads, even for a moment, would reach a thread that starts in this moment."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: pytest.fail(f"set to {number} for all"))

    def new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    assert at_once([torch.get_num_threads, new_thread], 1) == [1, 2] and new_thread() == torch.get_num_threads() == 2
    monkeypatch.undo()
    assert can_use_threads(torch.device("cpu")) and not can_use_threads(torch.device("meta"))
    torch.set_num_threads(1)
    assert not can_use_threads(torch.device("cpu"))


def test_the_caller_computes_what_no_thread_is_free_for(monkeypatch, two_threads):
    for pool, is_busy in ((ThreadPoolExecutor(1), True), (ThreadPoolExecutor(1), False)):
        monkeypatch.setattr(threads, "_helpers", pool)
        released = threading.Event()
        if is_busy:
            pool.submit(released.wait)
        else:
            pool.shutdown()  # as when the interpreter ends
        names = at_once([lambda: threading.current_thread().name] * 2, 1)
        assert names == [threading.current_thread().name] * 2 and torch.get_num_threads() == 2
        released.set()


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_comes_when_all_calls_have_ended(broken, two_threads):
    ended, started = [], threading.Event()

    def fail():
        started.wait(timeout=60)
        raise ValueError("no")

    calls = [lambda: started.set() or ended.append(True)] * 2
    calls[broken] = fail
    with pytest.raises(ValueError, match="no"):
        at_once(calls, 1)
    assert ended and torch.get_num_threads() == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_process_starts_its_own_threads():
    at_once([int, int], 1)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_name_of_helper).startswith("elmo")


def _name_of_helper():
    together = threading.Barrier(2)
    return at_once(
        [lambda: together.wait(60) and None or threading.current_thread().name, lambda: together.wait(60)], 1
    )[0]
