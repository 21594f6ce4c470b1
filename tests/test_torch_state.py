"""Private names of torch: missing or changed, they cost speed only. What needs plain operators gets the definition."""

import subprocess
import sys
from functools import reduce

import pytest
import torch
from bilm_models import computed_by, dual, jvp, needs_numbers, save, tiny_model
from places import ROOT
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from modeling_elmo import (
    ELMoForPreTraining,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
    elmo_backend,
)
from modeling_elmo.kernels import int8, onednn, torch_state
from modeling_elmo.kernels.int8 import int8_obstacle
from modeling_elmo.kernels.onednn import HAS_AVX512_BFLOAT16
from modeling_elmo.kernels.torch_state import sees_values_only

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")
TOKENIZER = ELMoTokenizer(vocab=["<PAD>", "<S>", "</S>", "<UNK>", "a", "b"])
INPUTS = TOKENIZER(["a b a", "b"], padding=True, return_tensors="pt")
FORGETFUL = (
    torch_state.private,
    torch_state.question,
    torch_state._modes,
    onednn.onednn_dtypes,
    torch_state.logger.warning_once,
    int8._can_multiply,
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


def forget():
    for function in FORGETFUL:
        function.cache_clear()


@pytest.fixture
def forgetful():
    """Nothing that was found about torch is remembered before and after the test."""
    forget()
    yield
    forget()


def make_model(cls=ELMoModel, **options):
    return tiny_model(cls, vocab_size=len(TOKENIZER), **options)


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
def test_a_private_name_that_torch_changed(name, change, tmp_path, monkeypatch, caplog, forgetful, two_threads):
    make_model(ELMoForPreTraining).save_pretrained(tmp_path)
    expected, asked = loaded_and_used(tmp_path), set()

    def look_up(step, parts, start):
        found = ".".join(parts)
        asked.add(found)
        if found != name:
            return reduce(step, parts, start)
        if change == "missing":
            raise AttributeError(found)
        return lambda _new_argument, /, *_: None

    forget()
    monkeypatch.setattr(torch_state, "reduce", look_up)
    caplog.clear()
    assert_close(loaded_and_used(tmp_path), expected, rtol=1e-4, atol=1e-5)
    told = [message for message in caplog.messages if "works as expected" in message]
    assert len(told) == (name is not None and PRIVATE[name])
    asked -= {HAS_AVX512_BFLOAT16}  # only for a warning, where the plain products compute in bfloat16
    assert asked <= PRIVATE.keys() and (name is not None or asked == PRIVATE.keys() or int8_obstacle())


@pytest.mark.parametrize("name", ["ops.mkldnn._linear_pointwise", "ops.onednn.qlinear_pointwise"])
def test_a_product_with_other_values_is_not_taken(name, monkeypatch, forgetful):
    right = torch_state.private(name)

    class Doubled:
        binary = staticmethod(lambda *arguments: 2 * right.binary(*arguments))

        def __call__(self, *arguments):
            return 2 * right(*arguments)

    torch_state.private.cache_clear()
    monkeypatch.setattr(torch_state, "reduce", lambda step, parts, start: Doubled())
    assert not onednn.onednn_dtypes() and not int8._can_multiply()


def dual_state(model, embeds, direction):
    states = model(inputs_embeds=embeds).final_states
    with forward_ad.dual_level():
        given = tuple(forward_ad.make_dual(state, state.sin()) for state in states)
        return forward_ad.unpack_dual(model(inputs_embeds=embeds, initial_states=given)[1]).tangent


def dual_weight(model, embeds, direction):
    name = "forward_lstm.layers.0.input_linear.weight"
    weight = model.get_parameter(name).detach()
    with forward_ad.dual_level():
        changed = {name: forward_ad.make_dual(weight, weight.sin())}
        output = torch.func.functional_call(model, changed, kwargs={"inputs_embeds": embeds})
        return forward_ad.unpack_dual(output[1]).tangent


@pytest.mark.parametrize("derivative", [pytest.param(jvp, marks=needs_numbers), dual, dual_state, dual_weight])
@pytest.mark.parametrize("backend, gradients", [("inference", False), ("training", True), ("fused", True)])
def test_tangents_equal_differences(backend, derivative, gradients):
    """Central differences, in float64. A path without tangents would lose a part of them in silence."""
    model = make_model(lstm_hidden_size=21, projection_size=7).double()
    embeds, direction = torch.randn(2, 2, 4, 7, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        with computed_by(backend):
            found = derivative(model, embeds, direction)
        with elmo_backend("reference"):
            expected = derivative(model, embeds, direction)
    assert_close(found, expected, rtol=1e-9, atol=1e-12)
    if derivative in (jvp, dual):
        near = [model(inputs_embeds=embeds + sign * 1e-5 * direction).elmo_embeddings for sign in (1, -1)]
        assert_close(found, (near[0] - near[1]) / 2e-5, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("model_class", [ELMoModel, ELMoForTokenClassification])
def test_multiplications_are_counted_in_full(model_class):
    model, counts = make_model(model_class).requires_grad_(False), []
    for backend in (None, "reference"):
        with FlopCounterMode(display=False) as counter, elmo_backend(backend) if backend else torch.no_grad():
            model(**INPUTS)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")
def test_a_mode_sees_public_operators():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            names.add(function.name())
            return function(*arguments, **(options or {}))

    names = set()
    with torch.no_grad(), Names():
        make_model()(**INPUTS)
    assert "aten::addmm" in names and not any(name.startswith("mkldnn") for name in names)


def test_hooks_of_all_modules_see_linear_layers():
    model, seen = make_model(), set()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(module))
    model(**INPUTS)
    handle.remove()
    assert {module for module in model.modules() if isinstance(module, torch.nn.Linear)} <= seen


def test_subclasses_of_tensors_are_seen():
    subclass = type("Logged", (torch.Tensor,), {})
    assert sees_values_only(torch.ones(1), torch.nn.Parameter(torch.ones(1)))
    assert not sees_values_only(torch.ones(1), torch.ones(1).as_subclass(subclass))


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
from modeling_elmo.run_scripts import embed, run_pretraining, run_task
model, text, output = sys.argv[1:]
embed.main(["--model", model, "--input", text, "--output", output])
"""


@pytest.mark.slow
def test_a_torch_without_distributed(tmp_path):
    """Such as ROCm's on Windows."""
    save(tmp_path, make_model(ELMoForPreTraining), TOKENIZER)
    (tmp_path / "text.txt").write_text("a b a b\n", "utf-8")
    files = [tmp_path, tmp_path / "text.txt", tmp_path / "vectors.hdf5"]
    command = [sys.executable, "-c", WITHOUT_DISTRIBUTED, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and files[-1].exists(), done.stderr
