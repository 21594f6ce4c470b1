"""Final states are a pair for users, and an output with rows for pipelines."""

import pickle

import pytest
import torch
from accelerate.utils import recursively_apply
from bilm_models import both_classes, make_batch, make_model
from torch.testing import assert_close
from transformers.utils import ModelOutput

pytestmark = pytest.mark.usefixtures("onednn_at_any_size")


@both_classes
def test_final_states_are_a_pair_whose_items_have_rows(cls):
    """Pipelines read `items()`. What is made of these items, or of a pickle, has the pair again."""
    model = make_model(cls).requires_grad_(False)
    output = model(**make_batch(model.config))
    states = dict(output.items())["final_states"]
    assert isinstance(states, ModelOutput) and list(states) == ["hidden", "cell"]
    batch = make_batch(model.config)
    assert_close(model(**batch, initial_states=states), model(**batch, initial_states=output.final_states))
    others = type(output)(output.items()), recursively_apply(torch.clone, output), pickle.loads(pickle.dumps(output))
    for pair in (output["final_states"], output.to_tuple()[-1], *(other.final_states for other in others)):
        assert type(pair) is tuple
        assert_close(pair, output.final_states)
    assert_close(model(**batch, return_dict=False), output.to_tuple())
