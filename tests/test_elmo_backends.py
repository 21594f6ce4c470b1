"""Products with and without oneDNN against torch.nn.functional.linear; the choice of the backend."""

import math
from concurrent.futures import ThreadPoolExecutor

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
    elmo_backend,
    elmo_backends,
)
from modeling_elmo.elmo_backends import (
    choose_backend,
    fast_linear,
    packed,
    product,
    suits_mkl,
    tanh,
    weight_gradient,
)
from modeling_elmo.elmo_operators import onednn_dtypes


@pytest.fixture(params=["oneDNN", "oneDNN on Intel", "public operators"])
def operators(request, monkeypatch):
    if request.param == "public operators":
        monkeypatch.setattr(elmo_backends, "onednn_dtypes", frozenset)
    elif not onednn_dtypes():
        pytest.skip("this build of torch has no oneDNN linear operators")
    monkeypatch.setattr(elmo_backends, "FEW_PRODUCTS", 0)
    monkeypatch.setattr(elmo_backends, "_is_intel", request.param == "oneDNN on Intel")
    return request.param


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 130])
@pytest.mark.parametrize("keep", [None, True, False])
def test_product_equals_linear(operators, rows, keep):
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(24, 17)), torch.randn(24)
    inputs, other = torch.randn(rows, 17), torch.randn(rows, 24)
    with torch.no_grad():
        stored = weight if keep is None else packed(weight, keep)
        expected = F.linear(inputs, weight, bias)
        torch.testing.assert_close(product(inputs, stored, bias), expected)
        torch.testing.assert_close(product(inputs, stored), F.linear(inputs, weight))
        torch.testing.assert_close(product(inputs, stored, bias, plus_NG=other), expected + other)
        clipped = product(inputs, stored, bias, clip=0.5)
        torch.testing.assert_close(clipped, expected.clamp(-0.5, 0.5))
        assert not rows or (clipped.abs() == 0.5).any()
        assert clipped.is_contiguous()


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("inputs",), ("bias", "inputs")])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_linear(operators, frozen, bias):
    torch.manual_seed(0)
    linear, inputs = nn.Linear(17, 24, bias=bias), torch.randn(9, 17, requires_grad="inputs" not in frozen)
    for name, parameter in linear.named_parameters():
        parameter.requires_grad_(name not in frozen)
    wanted = [tensor for tensor in (inputs, *linear.parameters()) if tensor.requires_grad]
    mine, theirs = (
        torch.autograd.grad(f(inputs).sin().sum(), wanted) for f in (lambda x: fast_linear(linear, x), linear)
    )
    assert choose_backend([linear], inputs)[0] == "training"
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected)


def test_parts_of_larger_matrices(monkeypatch):
    monkeypatch.setattr(elmo_backends, "FEW_PRODUCTS", 1)
    linear, values = nn.Linear(6, 4), torch.randn(2, 3, 12)
    for part in (values[..., :6], values[..., ::2], values[:, 0, 6:], values[:0, :, :6]):
        wanted = [part.requires_grad_(), *linear.parameters()]
        (mine, *others), (theirs, *expected) = (
            (output, *torch.autograd.grad(output.sin().sum(), wanted))
            for output in (fast_linear(linear, part), linear(part))
        )
        torch.testing.assert_close([mine, *others], [theirs, *expected])


@pytest.mark.parametrize("rows, inputs, outputs, is_copied", [(300, 4, 8, True), (300, 8, 4, False), (9, 4, 8, False)])
def test_the_gradient_of_a_weight_and_its_layout(rows, inputs, outputs, is_copied, monkeypatch):
    """Autograd copies a gradient whose layout differs from the weight's."""
    monkeypatch.setattr(elmo_backends, "FEW_PRODUCTS", 1)
    monkeypatch.setattr(elmo_backends, "_is_intel", False)
    grad, read = torch.randn(rows, outputs), torch.randn(rows, inputs)
    found = weight_gradient(grad, read)
    torch.testing.assert_close(found, torch.einsum("ng,nd->gd", grad, read), rtol=1e-4, atol=1e-4)
    assert found.is_contiguous() is not (is_copied or not torch.backends.mkldnn.is_available())


def test_on_intel_mkl_takes_single_rows_and_transposed_weights(monkeypatch):
    weight = torch.randn(4, 4)
    for is_intel in (True, False):
        monkeypatch.setattr(elmo_backends, "_is_intel", is_intel)
        found = [suits_mkl(rows, used) for rows, used in ((2, weight), (1, weight), (2, weight.t()))]
        assert found == [False, is_intel, is_intel]


def test_a_changed_linear_is_called():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    inputs, linear = torch.randn(4, 3), Doubled(3, 2)
    torch.testing.assert_close(fast_linear(linear, inputs), linear(inputs))
    linear = nn.Linear(3, 2)
    linear.register_forward_hook(lambda module, arguments, output: output + 1)
    torch.testing.assert_close(fast_linear(linear, inputs), linear(inputs))
    with torch.autocast("cpu"):
        assert fast_linear(nn.Linear(3, 2), inputs).dtype == torch.bfloat16


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
    layers[0].register_forward_hook(lambda *_: None)
    assert "hooked" in choose_backend(layers, inputs)[1]
    message = "no backend 'cudnn'; pass one of reference, inference, training, int8, fused"
    with pytest.raises(ValueError, match=message), elmo_backend("cudnn"):
        pass


def test_forcing_a_backend_stays_in_its_thread():
    layers, inputs = [nn.Linear(3, 2)], torch.randn(4, 3)
    with elmo_backend("reference"), ThreadPoolExecutor(1) as other:
        assert other.submit(choose_backend, layers, inputs).result() == ("training", "CPU training")


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
    monkeypatch.setattr(elmo_backends, "onednn_dtypes", lambda: dtypes)
    elmo_backends.logger.warning_once.cache_clear()
    layers, inputs = [nn.Linear(3, 2)], torch.randn(4, 3)
    for _ in range(2):
        choose_backend(layers, inputs)
        assert not caplog.messages
    with torch.autocast("cpu"):
        found = {choose_backend(layers, inputs)[0] for _ in range(2)}
    slow = "Products in bfloat16 are slower here than in float32: this processor has no instructions for bfloat16."
    assert (found, caplog.messages) == ({"training"}, []) if instructions else ({"reference"}, [slow])


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


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("model_class", [ELMoModel, ELMoForPreTraining, ELMoForTokenClassification])
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
    message = "'fused' was forced, but a layer is wrapped"
    with elmo_backend("fused"), pytest.raises(ValueError, match=message):
        replica_of(model)(**inputs, **options)
    assert replica_of(model).dtype == torch.float32


def test_backward_hooks_run():
    calls, linear = [], nn.Linear(3, 2)
    linear.register_full_backward_hook(lambda *_: calls.append(1))
    fast_linear(linear, torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert calls == [1]
