"""The choice of a backend with its reason, refusals, and models whose modules are wrapped."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from bilm_models import computed_by, tiny_model
from errors import refused
from torch import nn

from modeling_elmo import (
    ELMoForPreTraining,
    ELMoForTokenClassification,
    ELMoModel,
    ELMoTokenizer,
    elmo_backend,
)
from modeling_elmo.kernels import onednn, plan
from modeling_elmo.kernels.plan import make_plan


def test_the_choice_and_its_reason():
    layers, inputs = [nn.Linear(3, 2)], torch.randn(4, 3)
    assert make_plan(layers, inputs) == ("training", "fastest on cpu")
    assert make_plan(layers, inputs.bfloat16()) == ("reference", "training is not built for torch.bfloat16 on cpu")
    with torch.no_grad():
        assert make_plan(layers, inputs) == ("inference", "fastest on cpu")
        assert make_plan(layers, inputs.to("meta"))[1] == "inference is not built for torch.float32 on meta"
        assert "dtype is not the inputs'" in make_plan(layers, inputs.double())[1]
        with torch.autocast("cpu", torch.float16):
            reason = "training is not built for autocast in torch.float16"
            assert make_plan(layers, inputs) == ("reference", reason)
        with elmo_backend("reference"):
            assert make_plan(layers, inputs) == ("reference", "forced")
    with elmo_backend("reference"), ThreadPoolExecutor(1) as other:  # another thread is not forced
        assert other.submit(make_plan, layers, inputs).result() == ("training", "fastest on cpu")
    layers[0].register_forward_hook(lambda *_: None)
    assert "hooked" in make_plan(layers, inputs)[1]
    with refused("'training'; pass one of reference, int8, trial"), elmo_backend("training"):
        pass


@pytest.mark.parametrize("instructions", [True, False])
def test_a_processor_without_bfloat16_is_named(instructions, monkeypatch, caplog):
    dtypes = {torch.float32, torch.bfloat16} if instructions else {torch.float32}
    monkeypatch.setattr(onednn, "onednn_dtypes", lambda: dtypes)
    monkeypatch.setattr(plan, "onednn_dtypes", lambda: dtypes)
    plan.logger.warning_once.cache_clear()
    layers, inputs = [nn.Linear(3, 2)], torch.randn(4, 3)
    make_plan(layers, inputs)
    assert not caplog.messages
    with torch.autocast("cpu"):
        found = {make_plan(layers, inputs).backend for _ in range(2)}
    assert found == {"training" if instructions else "reference"} and len(caplog.messages) == 1 - instructions
    assert instructions or "no instructions for bfloat16" in caplog.text


def replica_of(network: nn.Module) -> nn.Module:
    """What `torch.nn.parallel.replicate` makes for a device: modules with plain tensors instead of parameters."""
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
    tokenizer = ELMoTokenizer(vocab=["<PAD>", "<S>", "</S>", "<UNK>", "a", "b"])
    model = tiny_model(model_class, vocab_size=len(tokenizer), num_labels=3)
    inputs = tokenizer(["a b a", "b"], padding=True, return_tensors="pt")
    options = {"labels": inputs.input_ids % 3} if model_class is not ELMoModel else {}
    model.base_model.cache_vocabulary(["a", "b"], tokenizer)
    with torch.set_grad_enabled(gradients):
        found, expected = replica_of(model)(**inputs, **options)[0], model(**inputs, **options)[0]
    torch.testing.assert_close(found, expected)
    with computed_by("fused"), torch.set_grad_enabled(gradients):
        torch.testing.assert_close(replica_of(model)(**inputs, **options)[0], expected)
    assert replica_of(model).dtype == torch.float32


def lstm_on_a_card(dtype=torch.bfloat16, cells=1024, width=256, sequences=32, device="cuda"):
    """Stand-ins of inputs, hidden states and cells."""
    tensors = []
    for size in (width, width, cells):
        tensors.append(SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(sequences, size)))
    return tensors


@pytest.mark.parametrize(
    "options, capability, reason",
    [
        ({}, (9, 0), None),
        ({"sequences": 2048}, (9, 0), None),
        ({"cells": 4096, "width": 512, "sequences": 256}, (9, 0), None),
        ({"cells": 4096, "width": 512, "sequences": 257}, (9, 0), "257 sequences of 4096 cells fill the device"),
        ({"device": "xpu"}, (9, 0), "built for CUDA, not for xpu"),
        ({"dtype": torch.float64}, (9, 0), "do not multiply torch.float64"),
        ({"cells": 1000}, (9, 0), "a width of 1000"),
        ({"width": 8}, (9, 0), "a width of 8"),
        ({}, (7, 5), "compute capability below 8.0"),
        ({}, (8, 0), "with compute capability 8.0, a layer in one launch is a trial"),
        (
            {"dtype": torch.float32},
            (9, 0),
            "in torch.float32 with compute capability 9.0, a layer in one launch is a trial",
        ),
    ],
)
def test_a_layer_in_one_launch_is_possible_or_not(options, capability, reason, monkeypatch):
    monkeypatch.setattr(plan, "_capability", lambda device: capability)
    monkeypatch.setattr(plan, "REFUSALS", {})
    found = plan._layer_obstacle(*lstm_on_a_card(**options))
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    is_trial = reason is None or "fill the device" in reason or "with compute" in reason
    with elmo_backend("trial"):
        assert (plan._layer_obstacle(*lstm_on_a_card(**options)) is None) == is_trial
    plan.REFUSALS[None] = "triton is not installed"
    if options.get("device") != "xpu":
        assert plan._layer_obstacle(*lstm_on_a_card(**options)) == "triton is not installed"


def test_a_trial_needs_its_device():
    model = tiny_model()
    inputs = {"inputs_embeds": torch.randn(1, 2, model.config.projection_size)}
    with elmo_backend("trial"), refused("'trial' was forced, but .* not for cpu"):
        model(**inputs)
    with elmo_backend("trial"):  # other layers
        assert make_plan([nn.Linear(2, 2)], torch.ones(1, 2)).backend == "training"
