"""The average of the weights equals a plain loop of its formula, and model and files get the right weights."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modeling_elmo.run_scripts.fine_tuning.moving_average import TRAINED, MovingAverage

FROZEN = "frozen.weight"


def network(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    layers = nn.ModuleDict({"trained": nn.Linear(3, 2), "frozen": nn.Linear(2, 1, bias=False)})
    layers["frozen"].requires_grad_(False)
    return layers


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def started(model: nn.Module, decay: float = 0.999) -> MovingAverage:
    average = MovingAverage(model, decay)
    average.on_train_begin(None, SimpleNamespace(global_step=0), None)
    return average


@torch.no_grad()
def train(model: nn.Module, average: MovingAverage, steps: range = range(1, 4)) -> list[dict[str, Tensor]]:
    """Changes the weights at random, and returns them before the first step and after each step."""
    history = [weights_of(model)]
    for step in steps:
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn_like(weight))
        average.on_step_end(None, SimpleNamespace(global_step=step), None)
        history.append(weights_of(model))
    return history


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])  # reached at the first step, at the third, never
def test_averages_follow_the_formula(decay):
    model = network()
    average = started(model, decay)
    start, *history = train(model, average, range(1, 21))
    for name, found in average.averages.items():
        expected = start[name].double()
        for step, weights in enumerate(history, 1):
            d = min(decay, (1 + step) / (10 + step))
            expected = d * expected + (1 - d) * weights[name].double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_frozen_weights_have_no_average(tmp_path):
    model = network()
    average = started(model)
    start = train(model, average)[0]
    assert average.averages.keys() == {"trained.weight", "trained.bias"}
    average.save_trained(tmp_path)
    assert load_file(tmp_path / TRAINED).keys() == average.averages.keys()
    with average.in_model():
        assert torch.equal(model["frozen"].weight, start[FROZEN])
    assert torch.equal(model["frozen"].weight, start[FROZEN])


def test_the_model_has_the_averages_inside_the_context():
    model = network()
    average = started(model)
    weights = train(model, average)[-1]
    averages = {name: value.clone() for name, value in average.averages.items()}
    parameters = dict(model.named_parameters())
    with average.in_model():
        assert equal(weights_of(model), averages | {FROZEN: weights[FROZEN]})
    with pytest.raises(KeyboardInterrupt), average.in_model():
        raise KeyboardInterrupt
    assert equal(weights_of(model), weights) and equal(average.averages, averages)
    assert all(parameters[name] is weight for name, weight in model.named_parameters())  # the optimizer refers to them


def test_a_checkpoint_restores_averages_and_weights(tmp_path):
    model = network()
    average = started(model)
    weights = train(model, average)[-1]
    average.save_trained(tmp_path)
    with average.in_model():
        saved = {name: value.clone() for name, value in model.state_dict().items()}

    other = network(seed=1)
    resumed = MovingAverage(other, 0.999)
    other.load_state_dict(saved)
    resumed.load_trained(tmp_path)
    resumed.on_train_begin(None, SimpleNamespace(global_step=3), None)
    assert equal(resumed.averages, average.averages)
    assert equal(weights_of(other), weights)
    for each, its_average in ((model, average), (other, resumed)):
        torch.manual_seed(2)
        train(each, its_average, range(4, 7))
    assert equal(resumed.averages, average.averages) and equal(weights_of(other), weights_of(model))
