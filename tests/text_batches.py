"""Corpora, a tokenizer, and readable contents of batches, for the tests of sentence batches and of streams."""

from pathlib import Path

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.batches import LMBatch
from modeling_elmo.run_scripts.pretraining.corpus import Corpus

TEXT = Path(__file__).parent / "fixtures" / "text"
ENGLISH = (TEXT / "en.txt").read_text(encoding="utf-8").splitlines()
KOREAN = (TEXT / "ko.txt").read_text(encoding="utf-8").splitlines()
WORDS = sorted({word for line in [*ENGLISH, *KOREAN, "sea is"] for word in line.split()})
TOKENIZER = ELMoTokenizer(vocab=["<S>", "</S>", "<UNK>", *WORDS], max_word_length=40)
SPLIT = {"is_split_into_words": True}


def two_files() -> Corpus:
    """444 lines."""
    return Corpus.from_files([str(TEXT / "en.txt"), str(TEXT / "ko.txt")])


def write(path: Path, lines) -> Corpus:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Corpus.from_files([str(path)])


def decoded(character_ids, input_ids) -> list[list[str]]:
    """The words of each row without padding, from the characters. They must be the words of the ids."""
    rows = TOKENIZER.decode_characters(character_ids)
    ids = [row[row > 0] for row in input_ids]
    assert rows == [TOKENIZER.convert_ids_to_tokens(row.tolist()) for row in ids]
    return rows


def assert_same_batches(batches, expected):
    batches, expected = list(map(_content, batches)), list(map(_content, expected))
    assert len(batches) == len(expected)
    assert all(one == other for one, other in zip(batches, expected, strict=True))


def _content(batch: LMBatch) -> tuple:
    inputs = {name: (tensor.dtype, tensor.tolist()) for name, tensor in batch.inputs.items()}
    return inputs, batch.epoch, batch.fraction, batch.num_predictions, batch.num_unknown


def tiny_model() -> ELMoForPreTraining:
    sizes = {"char_embedding_size": 4, "char_cnn_filters": [[1, 4], [2, 4]], "projection_size": 8}
    return ELMoForPreTraining(
        ELMoConfig(vocab_size=len(TOKENIZER), max_word_length=40, lstm_hidden_size=16, **sizes)
    ).train()
