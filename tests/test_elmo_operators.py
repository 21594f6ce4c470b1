"""Private names of torch: missing or changed, they cost speed only. What needs plain operators gets the definition."""

import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from modeling_elmo import (
    ELMoConfig,
    ELMoForPreTraining,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
    elmo_backend,
    elmo_operators,
)
from modeling_elmo.elmo_operators import int8_obstacle, sees_values_only

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")

TOKENIZER = ELMoTokenizer(vocab=["<PAD>", "<S>", "</S>", "<UNK>", "a", "b"])
INPUTS = TOKENIZER(["a b a", "b"], padding=True, return_tensors="pt")
FORGETFUL = (
    elmo_operators.private,
    elmo_operators.question,
    elmo_operators._modes,
    elmo_operators.onednn_dtypes,
    elmo_operators.logger.warning_once,
    elmo_operators._can_multiply,
)
PRIVATE = {  # each private name, and whether a warning names it: where the processor lacks 8 bits, not all are used
    "ops.mkldnn._linear_pointwise": torch.backends.mkldnn.is_available(),
    "ops.mkldnn._reorder_linear_weight": torch.backends.mkldnn.is_available(),
    "ops.mkldnn._is_mkldnn_bf16_supported": torch.backends.mkldnn.is_available(),
    "ops.onednn.qlinear_prepack": int8_obstacle() is None,
    "ops.onednn.qlinear_pointwise": int8_obstacle() is None,
    "cpu._is_vnni_supported": torch.backends.mkldnn.is_available(),
    "utils._python_dispatch._get_current_dispatch_mode": True,
    "utils._python_dispatch.TorchDispatchMode": True,
    "_C._functorch.peek_interpreter_stack": True,
    "nn.modules.module._has_any_global_hook": True,
    "autograd._profiler_enabled": True,
}


@pytest.fixture
def forgetful():
    """Nothing that was found about torch is remembered before and after the test."""
    for function in FORGETFUL:
        function.cache_clear()
    yield
    for function in FORGETFUL:
        function.cache_clear()


def make_model(cls=ELMoModel, **options):
    torch.manual_seed(0)
    return cls(ELMoConfig.from_preset("tiny", vocab_size=len(TOKENIZER), dropout=0.0, **options)).eval()


def loaded_and_used(folder) -> list[torch.Tensor]:
    """Vectors, a loss, gradients, and vectors in 8 bits, of a model from a folder."""
    model = ELMoForPreTraining.from_pretrained(folder)
    with torch.no_grad():
        vectors = model.elmo(**INPUTS).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            model.elmo(**INPUTS)
    loss = model(**INPUTS, labels=INPUTS.input_ids).loss
    loss.backward()
    found = [vectors, loss, *(parameter.grad for parameter in model.parameters())]
    quantized = ELMoModel.from_pretrained(folder).quantize()
    with torch.no_grad():
        return [*found, 0 * quantized(**INPUTS).last_hidden_state]  # finite: their values are tested elsewhere


CHANGED = ["ops.mkldnn._linear_pointwise", "ops.onednn.qlinear_pointwise", "cpu._is_vnni_supported"]
CHANGED += ["utils._python_dispatch._get_current_dispatch_mode", "_C._functorch.peek_interpreter_stack"]


@pytest.mark.parametrize(
    "name, change", [*((name, "missing") for name in (None, *PRIVATE)), *((name, "changed") for name in CHANGED)]
)
def test_a_private_name_that_torch_changed(name, change, tmp_path, monkeypatch, caplog, forgetful):
    make_model(ELMoForPreTraining).save_pretrained(tmp_path)
    threads, asked = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    expected = loaded_and_used(tmp_path)

    def look_up(step, parts, start):
        found = ".".join(parts)
        asked.add(found)
        if found != name:
            return reduce(step, parts, start)
        if change == "missing":
            raise AttributeError(found)
        return lambda _new_argument, /, *_: None

    for function in FORGETFUL:
        function.cache_clear()
    monkeypatch.setattr(elmo_operators, "reduce", look_up)
    caplog.clear()
    try:
        torch.testing.assert_close(loaded_and_used(tmp_path), expected, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(threads)
    told = [message for message in caplog.messages if "works as expected" in message]
    assert len(told) == (name is not None and PRIVATE[name])
    assert asked <= PRIVATE.keys() and (name is not None or asked == PRIVATE.keys() or int8_obstacle())


@pytest.mark.parametrize("name", ["ops.mkldnn._linear_pointwise", "ops.onednn.qlinear_pointwise"])
def test_a_product_with_other_values_is_not_taken(name, monkeypatch, forgetful):
    right = elmo_operators.private(name)

    class Doubled:
        binary = staticmethod(lambda *arguments: 2 * right.binary(*arguments))

        def __call__(self, *arguments):
            return 2 * right(*arguments)

    elmo_operators.private.cache_clear()
    monkeypatch.setattr(elmo_operators, "reduce", lambda step, parts, start: Doubled())
    assert not elmo_operators.onednn_dtypes() and not elmo_operators._can_multiply()


def jvp(model, embeds, direction):
    return torch.func.jvp(lambda x: model(inputs_embeds=x).elmo_embeddings, (embeds,), (direction,))[1]


def dual(model, embeds, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(inputs_embeds=forward_ad.make_dual(embeds, direction))[1]).tangent


def dual_state(model, embeds, direction):
    states = model(inputs_embeds=embeds).final_states
    with forward_ad.dual_level():
        given = tuple(forward_ad.make_dual(state, state.sin()) for state in states)
        return forward_ad.unpack_dual(model(inputs_embeds=embeds, initial_states=given)[1]).tangent


def dual_weight(model, embeds, direction):
    linear, weight = model.forward_lstm.layers[0].input_linear, model.forward_lstm.layers[0].input_linear.weight
    with forward_ad.dual_level():
        del linear.weight
        linear.weight = forward_ad.make_dual(weight.detach(), weight.detach().sin())
        try:
            return forward_ad.unpack_dual(model(inputs_embeds=embeds)[1]).tangent
        finally:
            del linear.weight
            linear.weight = weight


@pytest.mark.parametrize("derivative", [jvp, dual, dual_state, dual_weight])
@pytest.mark.parametrize("backend, gradients", [("inference", False), ("inference", True), ("fused", True)])
def test_tangents_equal_differences(backend, derivative, gradients):
    """Central differences, in float64. A path without tangents would lose a part of them in silence."""
    model = make_model(lstm_hidden_size=21, projection_size=7).double()
    embeds, direction = torch.randn(2, 2, 4, 7, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        found = derivative(model, embeds, direction)
        with elmo_backend("reference"):
            expected = derivative(model, embeds, direction)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if derivative in (jvp, dual):
        near = [model(inputs_embeds=embeds + sign * 1e-5 * direction).elmo_embeddings for sign in (1, -1)]
        torch.testing.assert_close(found, (near[0] - near[1]) / 2e-5, rtol=1e-4, atol=1e-8)
    if backend == "fused":
        with elmo_backend("fused"), pytest.raises(ValueError, match="'fused' was forced, but "):
            derivative(model, embeds, direction)


@pytest.mark.skipif(int8_obstacle() is not None, reason=str(int8_obstacle()))
@pytest.mark.parametrize("derivative", [jvp, dual])
def test_a_quantized_model_has_no_tangents(derivative):
    model = make_model().quantize()
    embeds = torch.randn(2, 1, 3, model.config.projection_size)
    with torch.no_grad(), pytest.raises(ValueError, match="A quantized layer has no gradients"):
        derivative(model, *embeds)


@pytest.mark.parametrize("model_class", [ELMoModel, ELMoForTokenClassification])
def test_multiplications_are_counted_in_full(model_class):
    model, counts = make_model(model_class).requires_grad_(False), []
    for backend in (None, "reference"):
        with FlopCounterMode(display=False) as counter, elmo_backend(backend) if backend else torch.no_grad():
            model(**INPUTS)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_a_forced_path_is_watched_as_it_is():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            names.add(function.name())
            return function(*arguments, **(options or {}))

    model, names = make_model(), set()
    with torch.no_grad(), elmo_backend("inference"), Names():
        model(**INPUTS)
    assert "mkldnn::_linear_pointwise" in names
    names.clear()
    with torch.no_grad(), Names():
        model(**INPUTS)
    assert "aten::addmm" in names and not any(name.startswith("mkldnn") for name in names)


def test_hooks_of_all_modules_see_linear_layers():
    model, seen = make_model(), []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        model(**INPUTS)
    finally:
        handle.remove()
    assert {id(module) for module in model.modules() if isinstance(module, torch.nn.Linear)} <= {*map(id, seen)}


def test_subclasses_of_tensors_are_seen():
    class Logged(torch.Tensor):
        pass

    assert sees_values_only(torch.ones(1), torch.nn.Parameter(torch.ones(1)))
    assert not sees_values_only(torch.ones(1), torch.ones(1).as_subclass(Logged))


WITHOUT_DISTRIBUTED = """
import importlib.abc, sys

class WithoutBindings(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for binding in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                vars(sys.modules["torch._C"]).pop(binding, None)

sys.meta_path.insert(0, WithoutBindings())
import torch
assert not torch.distributed.is_available()
from modeling_elmo.run_scripts import embed, run_ner, run_pretraining
embed.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_torch_without_distributed(tmp_path):
    """Such as ROCm's on Windows."""
    make_model(ELMoForPreTraining).save_pretrained(tmp_path / "biLM")
    TOKENIZER.save_pretrained(tmp_path / "biLM")
    (tmp_path / "text.txt").write_text("a b a b\n", encoding="utf-8")
    options = f"--model {tmp_path}/biLM --input {tmp_path}/text.txt --output {tmp_path}/vectors.hdf5"
    command = [sys.executable, "-c", WITHOUT_DISTRIBUTED, *options.split()]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0 and (tmp_path / "vectors.hdf5").exists(), run.stderr
