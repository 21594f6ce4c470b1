"""A head's own word features `x_k` against a table of words and a plain convolution over characters."""

from unittest.mock import patch

import pytest
import torch
from plain_elmo import PlainELMo

from modeling_elmo import ELMoConfig
from modeling_elmo.heads.task_model import TokenFeatures

SIZES = {"vocab_size": 11, "char_vocab_size": 30, "max_word_length": 7, "task_word_embedding_size": 6}
SIZES |= {"task_char_embedding_size": 3, "task_char_cnn_filters": [[1, 4], [3, 5]]}


def make_config(**overrides) -> ELMoConfig:
    return ELMoConfig.from_preset("tiny", **{**SIZES, **overrides})


def make_features(**overrides) -> TokenFeatures:
    torch.manual_seed(0)
    features = TokenFeatures(make_config(**overrides))
    with torch.no_grad():
        for parameter in features.parameters():
            parameter.normal_()
    return features


def make_words():
    """Repeated words, with ids at masked positions too."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 11, (3, 5), generator=generator)
    spelling = torch.randint(1, 30, (11, 7), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]]).bool()
    return spelling[words], words, mask


@pytest.mark.parametrize("missing", [None, "words", "characters", "filters"])
def test_features_are_a_table_and_a_convolution(missing):
    options = {"words": {"task_word_embedding_size": 0}, "filters": {"task_char_cnn_filters": []}}
    options["characters"] = {"char_vocab_size": 0, "word_embedding_size": 2}
    features = make_features(**options.get(missing, {}))
    characters, words, mask = make_words()
    found = features(
        None if missing in ("characters", "filters") else characters, None if missing == "words" else words, mask
    )
    assert found.shape == (mask.sum(), features.output_size)
    assert features.output_size == 6 * (missing != "words") + 9 * (missing in (None, "words"))
    filters = make_config(char_cnn_filters=SIZES["task_char_cnn_filters"], num_highway_layers=0)
    plain = PlainELMo(features.state_dict(), filters)
    for vector, (row, place) in zip(found, mask.nonzero().tolist(), strict=True):
        expected = [] if missing == "words" else [features.word_embeddings.weight[words[row, place]]]
        if features.char_encoder is not None:
            expected.append(torch.from_numpy(plain.token(characters[row, place].numpy())).float())
        torch.testing.assert_close(vector, torch.cat(expected))


def test_each_distinct_word_is_encoded_once_but_a_hook_sees_every_position():
    features, (characters, words, mask) = make_features(), make_words()
    with patch.object(features.char_encoder, "forward", wraps=features.char_encoder.forward) as encode:
        expected, seen = features(characters, words, mask), []
    assert len(encode.call_args.args[0]) == len(words[mask].unique()) < mask.sum()
    features.char_encoder.char_embeddings.register_forward_hook(lambda *call: seen.append(call[2]))
    torch.testing.assert_close(features(characters, words, mask), expected)
    assert seen[0].shape[:3] == characters.shape


@pytest.mark.parametrize("given, expected", [(None, 6**-0.5), (0.2, 0.2)])
def test_the_table_is_drawn_with_vectors_of_length_one_or_as_given(given, expected):
    features = TokenFeatures(make_config(vocab_size=2000), given)
    features.initialize_parameters()
    weight = features.word_embeddings.weight.detach()
    assert weight.std() == pytest.approx(expected, rel=0.02) and abs(weight.mean()) < 0.02
