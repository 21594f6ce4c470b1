"""The choice of a backend with its reason, refusals, and models whose modules are wrapped."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bilm_models import computed_by, tiny_model
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
    with pytest.raises(ValueError, match="'training'; pass one of reference, int8"), elmo_backend("training"):
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
