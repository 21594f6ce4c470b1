"""The model that a run starts from: new models, and checkpoints with another vocabulary."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from bilm_models import save, tiny_model
from pretraining_worker import LINES, MODEL, arguments_of, assert_same, options_of, pretrain
from task_worker import written

from modeling_elmo import ELMoConfig, ELMoForPreTraining, ELMoTokenizer
from modeling_elmo.run_scripts.pretraining.corpus import Corpus, CorpusArguments
from modeling_elmo.run_scripts.pretraining.loop import PretrainingArguments
from modeling_elmo.run_scripts.pretraining.starting_model import (
    ModelArguments,
    RunStart,
    begin_with_frequencies,
    load_checkpoint,
)
from modeling_elmo.run_scripts.program.command_line import ProgramParser
from modeling_elmo.tokenization.elmo_characters import read_vocabulary

MARKERS = ["<S>", "</S>", "<UNK>"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model of 120 words with its tokenizer, in the folder `run`."""
    folder = tmp_path_factory.mktemp("base")
    words = sorted({*" ".join(LINES[:60]).split()})[:116]
    return save_model(folder, vocab=[*MARKERS, *words], pre_tokenization="whitespace")


def save_model(folder: Path, **options) -> Path:
    tokenizer = ELMoTokenizer(max_word_length=12, **options)
    save(folder / "run", tiny_model(ELMoForPreTraining, **MODEL, vocab_size=len(tokenizer)), tokenizer)
    return folder


def start(folder: Path, base: Path | None = None, **options) -> tuple[ELMoForPreTraining, ELMoTokenizer]:
    """The model and tokenizer that a run with these options starts from: a new model, or the checkpoint in `base`."""
    folder.mkdir(exist_ok=True)
    options = options_of(folder, **options)
    if base is not None:
        options |= {"model_name_or_path": base / "run", "preset": None, "config_overrides": None}
    if "vocabulary_file" in options:
        options["vocabulary_size"] = None
    parser = ProgramParser(ModelArguments, CorpusArguments, PretrainingArguments)
    model, corpus, training = parser.parse(arguments_of(options))
    run = RunStart(Accelerator(cpu=True), model, corpus, training, Corpus.from_arguments(corpus), held_out=None)
    return run.starting_model()


def test_sizes_and_overrides_of_a_new_model(tmp_path):
    overrides = {"cell_clip": None, "num_hidden_layers": 1}
    model, tokenizer = start(tmp_path, config_overrides=overrides, softmax_type="sampled")
    expected = overrides | {"vocab_size": 120, "lstm_hidden_size": 12, "softmax_type": "sampled", "num_sampled": 20}
    assert model.config.to_dict().items() >= expected.items()
    words = read_vocabulary(tmp_path / "run" / "vocab.txt")
    assert words == tokenizer.convert_ids_to_tokens(range(120))
    counts = Counter(" ".join(LINES[:60]).split())
    assert words[4:] == sorted(words[4:], key=counts.__getitem__, reverse=True)


def test_seeds_decide_the_first_weights(tmp_path):
    options = {"max_steps": 1, "validation_file": None}
    one, two = (pretrain(tmp_path, output_dir=tmp_path / str(seed), seed=seed, **options) for seed in (1, 2))
    assert not torch.equal(one.plain_model.softmax.weight, two.plain_model.softmax.weight)


def test_keeping_the_vocabulary(base, tmp_path):
    model, tokenizer = start(tmp_path, base, vocabulary_size=None)
    assert_same(model.state_dict(), ELMoForPreTraining.from_pretrained(base / "run").state_dict())
    assert tokenizer.get_vocab() == ELMoTokenizer.from_pretrained(base / "run").get_vocab()


@pytest.mark.parametrize("kind", ["extend", "replace"])
def test_words_in_both_vocabularies_keep_their_rows(kind, base, tmp_path):
    old_model, old = ELMoForPreTraining.from_pretrained(base / "run"), ELMoTokenizer.from_pretrained(base / "run")
    old_ids = old.get_vocab()
    shared = [word for word in old_ids if not word.startswith("<")][::2]
    file = written(tmp_path / "words.txt", "\n".join(["new1", *shared, *MARKERS, "밥"]))
    model, tokenizer = start(tmp_path, base, vocabulary=kind, vocabulary_file=file)
    ids = tokenizer.get_vocab()
    expected = {*shared, "new1", "밥", "<PAD>", *MARKERS} | (set(old_ids) if kind == "extend" else set())
    assert set(ids) == expected and model.config.vocab_size == len(expected) == len(model.softmax.weight)
    both = ids.keys() & old_ids.keys()
    assert kind == "replace" or all(ids[word] == old_ids[word] for word in both)
    for name in ("weight", "bias"):
        rows, old_rows = getattr(model.softmax, name), getattr(old_model.softmax, name)
        assert all(torch.equal(rows[ids[word]], old_rows[old_ids[word]]) for word in both)
    assert_same(model.elmo.state_dict(), old_model.elmo.state_dict())
    tokens = tokenizer([["밥", "gone"]], is_split_into_words=True)["input_ids"][0]
    assert list(tokens) == [1, ids["밥"], 3, 2]


def test_a_new_vocabulary_keeps_added_markers(tmp_path):
    save_model(tmp_path, vocab=[*MARKERS, "the", "play"], extra_special_tokens=["[E1]"])
    file = written(tmp_path / "words.txt", "\n".join([*MARKERS, "opera"]))
    model, tokenizer = start(tmp_path / "new", tmp_path, vocabulary="replace", vocabulary_file=file)
    assert tokenizer("opera[E1]")["input_ids"] == [1, 4, 5, 2] and model.config.vocab_size == len(tokenizer) == 6


def extended_by(folder: Path, text: str, is_split_into_words: bool = False) -> ELMoTokenizer:
    """The tokenizer in `folder / "run"` with the words of a text."""
    options = {"train_file": written(folder / "text.txt", text), "is_split_into_words": is_split_into_words}
    return start(folder / "new", folder, vocabulary="extend", vocabulary_size=50, **options)[1]


def test_words_of_raw_text_are_counted_as_the_checkpoint_splits_them(tmp_path):
    save_model(tmp_path, vocab=[*MARKERS, "the", "play"], pre_tokenization="moses")
    words = extended_by(tmp_path, "The play was staged.\nThey didn't, he said.\n").get_vocab()
    assert {"staged", ".", "said", ","} <= words.keys() and "staged." not in words
    assert ELMoTokenizer(vocab_file=tmp_path / "new" / "run" / "vocab.txt").get_vocab() == words


@pytest.mark.parametrize("is_split_into_words", [False, True])
def test_words_are_counted_as_the_checkpoint_looks_them_up(is_split_into_words, tmp_path):
    save_model(tmp_path, vocab=[*MARKERS, "the", "play"], pre_tokenization="treebank", plain_signs=True)
    extended = extended_by(tmp_path, "the cafe\u0301 is n’t “ here ” — it is n't …\n", is_split_into_words)
    words = extended.convert_ids_to_tokens(range(6, len(extended)))
    assert sorted(words) == sorted(["café", "is", "n't", '"', "here", "--", "it", "..."])
    assert list(extended.encode_words(words)[0]) == [*range(6, len(extended))]


@pytest.mark.parametrize("kind, expected", [("extend", ["the", "n't", '"']), ("replace", ["the", '"', "n't"])])
def test_each_word_of_a_vocabulary_file_can_be_looked_up(kind, expected, tmp_path):
    base = save_model(tmp_path / "base", vocab=[*MARKERS, "the", "n't"], plain_signs=True)
    file = written(tmp_path / "words.txt", "\n".join([*MARKERS, "the", "“", "n’t", "”"]))
    _, tokenizer = start(tmp_path, base, vocabulary=kind, vocabulary_file=file)
    words = tokenizer.convert_ids_to_tokens(range(4, len(tokenizer)))
    assert words == expected
    assert list(tokenizer.encode_words(["“", "n’t", "the"])[0]) == list(tokenizer.encode_words(['"', "n't", "the"])[0])
    assert 3 not in tokenizer.encode_words(words)[0]


def test_loaded_weights_are_aligned_and_in_single_precision(base, tmp_path):
    """MKL rounds differently where they are not aligned, and a resumed run would differ from an uninterrupted one."""
    ELMoForPreTraining.from_pretrained(base / "run", dtype=torch.bfloat16).save_pretrained(tmp_path)
    ELMoTokenizer.from_pretrained(base / "run").save_pretrained(tmp_path)
    for folder in (base / "run", tmp_path):
        parameters = list(load_checkpoint(str(folder))[0].parameters())
        assert {parameter.dtype for parameter in parameters} == {torch.float32}
        assert not any(parameter.data_ptr() % 64 for parameter in parameters)


def test_another_softmax_of_a_checkpoint(base, tmp_path):
    model, _ = start(tmp_path, base, vocabulary_size=None, softmax_type="sampled")
    assert model.config.softmax_type == model.softmax.softmax_type == "sampled"
    assert torch.equal(model.softmax.weight, ELMoForPreTraining.from_pretrained(base / "run").softmax.weight)
    with pytest.raises(ValueError, match="--num_sampled 9 has no effect on a softmax of type full"):
        start(tmp_path, base, vocabulary_size=None, num_sampled=9)


def test_a_tokenizer_instead_of_a_vocabulary(base, tmp_path):
    _, tokenizer = start(tmp_path, tokenizer_name=base / "run", vocabulary_size=None, config_overrides=None)
    assert tokenizer.get_vocab() == ELMoTokenizer.from_pretrained(base / "run").get_vocab()


@pytest.mark.parametrize("softmax_type", ["full", "adaptive"])
def test_a_new_softmax_begins_with_the_frequencies(softmax_type):
    """For states of 0: of all words, or of those in the head and of the clusters of an adaptive softmax."""
    config = ELMoConfig.from_preset("tiny", vocab_size=60, softmax_type=softmax_type)
    model, shares_V = ELMoForPreTraining(config), torch.rand(60, dtype=torch.float64)
    shares_V[0] = 0  # of <PAD>
    shares_V /= shares_V.sum()
    begin_with_frequencies(model, shares_V.log().numpy())
    found_V = model.softmax(torch.zeros(1, config.projection_size))[0].exp().double()
    if softmax_type == "adaptive":
        cutoffs = [cutoff + 1 for cutoff in model.softmax.adaptive.cutoffs]  # <PAD> is before them
        found_V, shares_V = (
            torch.cat([each[: cutoffs[0]], torch.stack([part.sum() for part in each.tensor_split(cutoffs[:-1])[1:]])])
            for each in (found_V, shares_V)
        )
    torch.testing.assert_close(found_V, shares_V, rtol=1e-5, atol=1e-7)
