"""Token masks, and batches packed for the LSTMs, against definitions in loops."""

from unittest.mock import Mock

import pytest
import torch
from bilm_models import make_batch, seeded
from errors import refused
from head_models import HEADS, fails, make_config

from modeling_elmo import ELMoConfig, ELMoForCoreferenceResolution, ELMoForPreTraining, ELMoModel
from modeling_elmo.encoder import pack_words
from modeling_elmo.inputs import pack, token_mask
from modeling_elmo.kernels.torch_state import to_device

WORD_LEVEL = {"char_vocab_size": 0, "word_embedding_size": 4}
MODELS = {
    "biLM": (ELMoModel, {}),
    "word-level biLM": (ELMoModel, WORD_LEVEL),
    "language model": (ELMoForPreTraining, {}),
    "word-level language model": (ELMoForPreTraining, WORD_LEVEL),
    "coreference": (ELMoForCoreferenceResolution, {"use_speakers": True, "num_genres": 2}),
    **HEADS,
}


@pytest.mark.parametrize("seed", range(5))
def test_pack_visits_every_token_in_order(seed):
    """Against sequences found in loops: runs of equal types among the unmasked positions of a row."""
    generator = seeded(seed)
    mask = torch.rand(6, 8, generator=generator) < 0.6
    types = (torch.arange(8) >= torch.randint(0, 8, (6, 1), generator=generator)).long()
    packing = pack(mask, types)
    sequences = []
    for row in range(6):
        for kind in (0, 1):
            columns = [t for t in range(8) if mask[row, t] and types[row, t] == kind]
            if columns:
                sequences.append((row, [row * 8 + t for t in columns]))
    sequences.sort(key=lambda item: -len(item[1]))  # longest first; the sort is stable
    assert packing.rows_S.tolist() == [row for row, _ in sequences]
    for order, step in ((packing.forward_N, 1), (packing.backward_N, -1)):
        expected = []
        for time in range(len(sequences[0][1])):
            expected += [positions[::step][time] for _, positions in sequences if time < len(positions)]
        assert packing.positions_N[order].tolist() == expected
    assert packing.steps.batch_sizes == [sum(t < len(p) for _, p in sequences) for t in range(len(sequences[0][1]))]


def test_token_mask_without_attention_mask():
    """Characters that are all 0, and the id of <PAD> in word-level models, are padding."""
    characters = torch.tensor([[[3, 0], [0, 5], [0, 0]]])
    config = ELMoConfig.from_preset("tiny", max_word_length=3, char_cnn_filters=[[1, 2]])
    padded = torch.nn.functional.pad(characters, (0, 1))
    assert token_mask(config, padded).tolist() == [[True, True, False]]
    ids = {"pad_token_id": 2, "eos_token_id": 0}
    word_level = ELMoConfig.from_preset("tiny", char_vocab_size=0, word_embedding_size=4, **ids)
    words = torch.tensor([[0, 2, 1]])
    assert token_mask(word_level, input_ids=words).tolist() == [[True, False, True]]
    word_level.pad_token_id = word_level.unk_token_id
    with refused("'pad_token_id': 3, .*'unk_token_id': 3}; pass different ids"):
        token_mask(word_level, input_ids=words)
    assert token_mask(word_level, input_ids=words, attention_mask=torch.ones_like(words)).all()
    assert token_mask(word_level, inputs_embeds=torch.ones(1, 3, word_level.projection_size)).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64, torch.uint16])
def test_ids_must_be_integers(dtype):
    config = ELMoConfig.from_preset("tiny", max_word_length=3, char_cnn_filters=[[1, 2]])
    characters = torch.ones(1, 2, 3, dtype=torch.long)
    words = characters[..., 0]
    for name, ids in (("character_ids", characters), ("input_ids", words), ("token_type_ids", words)):
        with refused(f"`{name}` has dtype {dtype}"):
            token_mask(config, **{"character_ids": characters, name: ids.to(dtype)})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of torch.jit
@pytest.mark.parametrize("cls, options", MODELS.values(), ids=MODELS)
def test_what_code_for_every_model_does(cls, options):
    """It passes `dummy_inputs` and arguments that ask nothing, may have another default device, and may trace."""
    torch.manual_seed(0)
    model = cls(make_config(**options)).eval().requires_grad_(False)
    inputs = model.dummy_inputs
    expected = model(**inputs).to_tuple()
    usual = dict.fromkeys(("head_mask", "position_ids", "past_key_values", "inputs_embeds", "cache_position"))
    with torch.device("meta"):
        found = model(**inputs, **usual, use_cache=False, output_attentions=False).to_tuple()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for name, value, shown in (("use_cache", True, "True"), ("head_mask", torch.ones(2), "a tensor")):
        fails(f"`{name}` is {shown}, but {cls.__name__} has no such input", model, **inputs, **{name: value})
    fails("use_cash", model, **inputs, use_cash=1)
    for trace in (lambda: torch.jit.trace(model, example_kwarg_inputs=inputs), lambda: torch.jit.script(model)):
        fails("`torch.export.export`, or `elmo export`", trace)


WORDS_AND_CHARACTERS = {"word_embedding_size": 4}


@pytest.mark.parametrize("options", [{}, WORD_LEVEL, WORDS_AND_CHARACTERS], ids=["characters", "words", "both"])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_packed_words_are_the_batch(options, is_hooked):
    """The same loss and gradients, to the bit, as from the ids and the mask, in one text and in two streams."""
    torch.manual_seed(0)
    model = ELMoForPreTraining(make_config(**options))
    if is_hooked:
        model.elmo.token_encoder()[0].register_forward_hook(lambda *_: None)
    batch, backward = (make_batch(model.config, lengths) for lengths in ([5, 1, 7], [7, 3, 2]))
    packed, backward_packed = (pack_words(model.config, **each) for each in (batch, backward))
    labels, backward_labels = (
        each["input_ids"].masked_fill(each["input_ids"] == 0, -100) for each in (batch, backward)
    )
    targets = {"forward_targets": labels, "backward_targets": backward_labels}
    streams = batch | {f"backward_{name}": values for name, values in backward.items()}
    packed_streams = {"packed_batch": packed, "backward_packed_batch": backward_packed}
    for raw, given, words in (
        (batch, {"packed_batch": packed}, {"labels": labels}),
        (streams, packed_streams, targets),
    ):
        found = []
        for inputs in (raw, given):
            loss = model(**inputs, **words).loss
            found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(*found, rtol=0, atol=0)
    message = "A packed batch has the ids of its words and no padding; pass it without ids and `attention_mask`"
    fails(message, model, **batch, packed_batch=packed)
    fails(message, model, **packed_streams, backward_input_ids=batch["input_ids"])


def test_copies_to_devices_without_pinned_memory_wait():
    tensor = Mock(device=torch.device("cpu"))
    for kind in ("mps", "xla"):
        tensor.reset_mock()
        to_device(tensor, torch.device(kind))
        tensor.to.assert_called_once_with(torch.device(kind))
        tensor.pin_memory.assert_not_called()
