"""Entities of the tagging pipeline end within their text."""

import pytest

from modeling_elmo import ELMoConfig, ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.heads.tagger_pipeline import ELMoTokenClassificationPipeline


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("delimiter", [" ", ""])
def test_no_entity_ends_behind_its_text(strategy, delimiter):
    """Of given words, some of which are empty."""
    tokenizer = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>"])
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), head="linear", id2label={0: "I-PER"})
    options = {"tokenizer": tokenizer, "aggregation_strategy": strategy}
    find = ELMoTokenClassificationPipeline(model=ELMoForTokenClassification(config), **options)
    for words in (["Ana", "Paris", ""], ["", "a", "", "b"], [""]):
        length = len(delimiter.join(words))
        found = find([words], is_split_into_words=True, delimiter=delimiter)[0]
        assert max(entity["end"] for entity in found) == length
        assert all(entity["start"] <= entity["end"] for entity in found)
