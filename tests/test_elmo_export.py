"""The model under `torch.export`, against loops in float64 and against itself, at sizes other than those traced."""

import pytest
import torch
from plain_elmo import PlainELMo

from modeling_elmo import ELMoConfig, ELMoModel

SIZES = {"projection_size": 5, "lstm_hidden_size": 7, "max_word_length": 6, "char_cnn_filters": [[1, 4], [3, 5]]}


@pytest.fixture(scope="module")
def model() -> ELMoModel:
    """Weights so large that both clips act."""
    torch.manual_seed(0)
    model = ELMoModel(ELMoConfig.from_preset("tiny", **SIZES)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3)
    return model


def inputs_of(rows: int, words: int, holes: bool = True) -> dict[str, torch.Tensor]:
    """Words with a mask of any pattern. The first row is full and the last, if there are more, is empty."""
    generator = torch.Generator().manual_seed(rows * 100 + words)
    mask = torch.rand(rows, words, generator=generator) < 0.6 if holes else torch.ones(rows, words, dtype=torch.bool)
    mask[0] = True
    mask[1:][-1:] = not holes
    characters = torch.randint(1, 262, (rows, words, SIZES["max_word_length"]), generator=generator)
    return {"character_ids": characters * mask[..., None], "attention_mask": mask.long()}


def states_of(model: ELMoModel, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return model(**inputs_of(rows, 4, holes=False)).final_states


@pytest.fixture(scope="module")
def exported(model):
    """`torch.export` of the model itself, with states, from an example of 2 rows of 3 words."""
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    inputs = {**inputs_of(2, 3), "initial_states": states_of(model, 2)}
    shapes = {"initial_states": ({0: batch}, {0: batch})}
    shapes |= dict.fromkeys(("character_ids", "attention_mask"), {0: batch, 1: time})
    return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False).module()


@pytest.mark.parametrize(("rows", "words"), [(1, 1), (1, 9), (3, 1), (2, 3), (5, 8), (2, 40)])
def test_every_size_and_mask(model, exported, rows, words):
    inputs = {**inputs_of(rows, words), "initial_states": states_of(model, rows)}
    found, expected = exported(**inputs), model(**inputs)
    for name in ("last_hidden_state", "elmo_embeddings", "hidden_states", "final_states"):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


def test_against_loops_in_float64(model, exported):
    """A row without its masked words is a text of its own."""
    inputs = inputs_of(4, 7)
    found = exported(**inputs, initial_states=tuple(torch.zeros_like(state) for state in states_of(model, 4)))
    plain = PlainELMo(model.state_dict(), model.config)
    for row, real in enumerate(inputs["attention_mask"].bool()):
        layers = torch.stack(found.hidden_states)[:, row]
        assert not layers[:, ~real].any()
        if real.any():
            expected = torch.from_numpy(plain(inputs["character_ids"][row, real].numpy())).float()
            torch.testing.assert_close(layers[:, real], expected, rtol=0, atol=1e-5)


def test_both_clips_act(model):
    """Otherwise the tests above would say nothing about them."""
    output = model(**inputs_of(3, 8, holes=False))
    assert (output.final_states[1].abs() == model.config.cell_clip).any()
    assert (output.hidden_states[1].abs() == model.config.projection_clip).any()


def test_two_texts_in_a_row_are_refused(model):
    inputs = inputs_of(2, 3)
    with pytest.raises(ValueError, match="`token_type_ids` cannot be exported. Leave them out, and give each text its"):
        torch.export.export(model, (), {**inputs, "token_type_ids": inputs["attention_mask"]}, strict=False)


def test_training_mode_is_refused(model):
    with pytest.raises(ValueError, match=r"in training mode cannot be exported. Call `model.eval\(\)` before"):
        torch.export.export(ELMoModel(model.config).train(), (), inputs_of(2, 3), strict=False)
