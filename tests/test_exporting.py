"""`torch.export` of the biLM against the model itself."""

import torch
from bilm_models import seeded, tiny_model
from errors import refused


def inputs_of(rows, words):
    """States, and words with a mask of any pattern. The first row is full and the last, if there are more, is empty."""
    generator = seeded(rows * 100 + words)
    mask = torch.rand(rows, words, generator=generator) < 0.6
    mask[0], mask[1:][-1:] = True, False
    characters = torch.randint(1, 262, (rows, words, 6), generator=generator) * mask[..., None]
    states = tuple(torch.randn(rows, 2, 2, size, generator=generator) for size in (5, 7))
    return {"character_ids": characters, "attention_mask": mask.long(), "initial_states": states}


def test_an_exported_model_reads_every_size_and_mask():
    """From an example of 2 rows of 3 words. Weights are so large that both clips act."""
    sizes = {"projection_size": 5, "lstm_hidden_size": 7, "max_word_length": 6, "char_cnn_filters": [[1, 4], [3, 5]]}
    model = tiny_model(**sizes).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3)
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time")
    shapes = {"initial_states": ({0: batch}, {0: batch})}
    shapes |= dict.fromkeys(("character_ids", "attention_mask"), {0: batch, 1: time})
    exported = torch.export.export(model, (), inputs_of(2, 3), dynamic_shapes=shapes, strict=False).module()
    for rows, words in ((1, 1), (2, 40), (5, 8)):
        inputs = inputs_of(rows, words)
        found, expected = exported(**inputs), model(**inputs)
        for name in ("last_hidden_state", "elmo_embeddings", "hidden_states", "final_states"):
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
    assert (expected.final_states[1].abs() == model.config.cell_clip).any()
    assert (expected.hidden_states[1].abs() == model.config.projection_clip).any()
    with refused("`token_type_ids` cannot be exported"):
        torch.export.export(model, (), {**inputs, "token_type_ids": inputs["attention_mask"]}, strict=False)
    with refused(r"Call `model.eval\(\)`"):
        torch.export.export(model.train(), (), inputs, strict=False)
