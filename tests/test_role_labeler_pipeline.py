"""The pipeline of semantic roles against the model, a row at a time, and spans in plain loops."""

import re
from unittest.mock import patch

import pytest
import torch
from bilm_models import save
from datasets import Dataset
from errors import refused
from head_models import ROLE_NAMES, make_role_pipeline
from transformers import pipeline

from modeling_elmo import (
    ELMoConfig,
    ELMoForTokenClassification,
    ELMoTokenizer,
)
from modeling_elmo.heads import role_labeler_pipeline
from modeling_elmo.heads.role_labeler_pipeline import ELMoSemanticRolePipeline

TEXTS = ["The cat, which slept, ate the fish.", "Snow fell", "They gave it up: he said so, at least to us."]
WORDS_GIVEN = {"is_split_into_words": True}
WORDS = [["The", "cat", "ate", "the", "fish", "."], ["Snow", "fell"]]


@pytest.fixture(scope="module", params=["right", "left"])
def pipe(request) -> ELMoSemanticRolePipeline:
    return make_role_pipeline(request.param)


@torch.no_grad()
def plain_tags(pipe, words: list[str], predicate: int | None) -> tuple[list[str], list[float], list[int]]:
    """Tags, their probabilities, and the predicates that the model finds, from a row of its own."""
    inputs = pipe.tokenizer([words], is_split_into_words=True, return_tensors="pt")
    if predicate is not None:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        inputs["token_type_ids"][0, 1 + predicate] = 1
    output = pipe.model(**inputs)
    labels = output.predictions[0, 1:-1].tolist()
    probabilities = [output.logits[0, place, label].exp().item() for place, label in enumerate(labels, 1)]
    found = [word for word in range(len(words)) if output.predicate_logits[0, 1 + word] > 0]
    return [ROLE_NAMES[label] for label in labels], probabilities, found


def plain_result(pipe, text: str, words: list[str], predicates: list[int] | None = None) -> dict:
    """The pipeline's result: every span of words is searched for in the text, from left to right."""
    places, end = [], 0
    for word in words:
        places.append(text.index(word, end))
        end = places[-1] + len(word)
    verbs = []
    for predicate in plain_tags(pipe, words, None)[2] if predicates is None else predicates:
        tags, probabilities, _ = plain_tags(pipe, words, predicate)
        description, arguments, first = [], [], 0
        while first < len(tags):
            role, last = tags[first][2:], first
            while role and last + 1 < len(tags) and tags[last + 1] == f"I-{role}":
                last += 1
            part = " ".join(words[first : last + 1])
            description.append(f"[{role}: {part}]" if role else part)
            if role not in ("", "V", "C-V"):
                start, stop = places[first], places[last] + len(words[last])
                score = sum(probabilities[first : last + 1]) / (last + 1 - first)
                span = {"start": start, "end": stop, "text": text[start:stop]}
                arguments.append({"role": role, **span, "score": pytest.approx(score, rel=1e-4, abs=1e-6)})
            first = last + 1
        verb = {"verb": words[predicate], "description": " ".join(description), "tags": tags}
        verbs.append({**verb, "arguments": arguments})
    return {"words": words, "verbs": verbs}


def words_of(pipe, text: str) -> list[str]:
    return pipe.tokenizer.splitter.words(text)


@pytest.mark.parametrize("text", TEXTS)
def test_predicates_are_found_and_labeled(pipe, text):
    words = words_of(pipe, text)
    expected = plain_result(pipe, text, words)
    pipe.model.train()
    assert pipe(text) == expected
    assert len(expected["verbs"]) > (text != "Snow fell")  # the random model finds some


def test_all_parts_of_a_result_occur(pipe):
    verbs = [verb for text in TEXTS for verb in pipe(text, predicates=[*range(len(words_of(pipe, text)))])["verbs"]]
    arguments = [argument for verb in verbs for argument in verb["arguments"]]
    assert {argument["role"] for argument in arguments} == {"ARG0", "R-ARG0"}
    assert {"O", "B-V", "I-ARG0"} <= {tag for verb in verbs for tag in verb["tags"]}
    assert any(len(argument["text"].split()) > 2 for argument in arguments)


def test_predicates_may_be_given(pipe):
    for chosen in ([2], [5, 0, 3], []):
        expected = plain_result(pipe, TEXTS[0], words_of(pipe, TEXTS[0]), chosen)
        assert pipe(TEXTS[0], predicates=chosen) == expected
        assert [verb["verb"] for verb in expected["verbs"]] == [expected["words"][word] for word in chosen]
    assert pipe(TEXTS[1], predicates=(1,)) == pipe(TEXTS[1:2], predicates=[[1]])[0]


def test_words_may_be_given(pipe):
    """Each is a word, whatever it contains."""
    reader = ELMoSemanticRolePipeline(model=pipe.model, tokenizer=pipe.tokenizer, **WORDS_GIVEN)
    for words in (*WORDS, ["New York", "fell"]):
        expected = plain_result(pipe, " ".join(words), words)
        assert pipe(words, **WORDS_GIVEN) == pipe(tuple(words), **WORDS_GIVEN) == reader(words) == expected
        given = pipe(words, **WORDS_GIVEN, predicates=[1])
        assert given == plain_result(pipe, " ".join(words), words, [1])
    assert pipe(WORDS, **WORDS_GIVEN) == [pipe(words, **WORDS_GIVEN) for words in WORDS]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_several_sentences(pipe, batch_size):
    expected = [plain_result(pipe, text, words_of(pipe, text)) for text in TEXTS]
    assert pipe(TEXTS, batch_size=batch_size) == expected
    assert pipe(Dataset.from_dict({"text": TEXTS})["text"], batch_size=batch_size) == expected
    chosen = [[1], None, [2, 0]]
    expected = [plain_result(pipe, text, words_of(pipe, text), each) for text, each in zip(TEXTS, chosen, strict=True)]
    assert pipe(TEXTS, predicates=chosen, batch_size=batch_size) == expected
    assert pipe([]) == []
    with patch.object(pipe.model.config, "return_dict", False):
        assert pipe(TEXTS, predicates=chosen, batch_size=batch_size) == expected


@pytest.mark.parametrize("pipe, batch_size", [("right", 1), ("left", 2)], indirect=["pipe"])
def test_data_sets_are_read_row_by_row(pipe, check_streams, batch_size):
    words = {"is_split_into_words": True}
    for rows, options in ((TEXTS * 2, {}), (WORDS * 3, words), (TEXTS, {"predicates": [[0], [], [1]]})):
        check_streams(pipe, rows, pipe(rows, **options, batch_size=batch_size), **options, batch_size=batch_size)
    with refused("shorter"):
        list(pipe(iter(TEXTS), predicates=iter([[0], [1]])))
    with refused("A sentence is {'text': 'a b'}"):
        list(pipe(iter([{"text": "a b"}])))


@pytest.mark.parametrize("options", [{"use_elmo": False}, {"freeze_bilm": False}, {"head": "linear"}])
def test_other_networks(options):
    pipe = make_role_pipeline(**{"task_word_embedding_size": 4} | options)
    assert pipe(TEXTS, batch_size=2) == [plain_result(pipe, text, words_of(pipe, text)) for text in TEXTS]


@pytest.mark.parametrize("options", [{}, {"predicates": [1, 2, 3]}])
def test_a_frozen_bilm_reads_a_sentence_once(pipe, options):
    with patch.object(pipe.model.elmo, "forward", wraps=pipe.model.elmo.forward) as read:
        assert len(pipe(TEXTS[0], **options)["verbs"]) > 1
    assert [len(call.args[0]) for call in read.call_args_list] == [1]


def test_memory_does_not_grow_with_the_number_of_predicates(pipe, monkeypatch):
    texts = [plain_result(pipe, text, words_of(pipe, text)) for text in TEXTS]
    monkeypatch.setattr(role_labeler_pipeline, "MOST_TOKENS", 30)
    with patch.object(pipe.model.encoder, "forward", wraps=pipe.model.encoder.forward) as read:
        assert pipe(TEXTS, batch_size=2) == texts
    sizes = [len(call.args[0]) for call in read.call_args_list]
    assert len(sizes) > 4 and max(sizes[1:]) <= 30  # after the search for predicates


@pytest.mark.parametrize(
    "inputs, options, shown",
    [
        (["a b", " "], {}, "The sentence ' ' has no words"),
        ([3], {}, "A sentence is 3"),
        ([["a", "b"]], {}, r"A sentence is \['a', 'b'\]; .*is_split_into_words=True"),
        ({"text": "a b"}, {}, "Received {'text': 'a b'}"),
        ([["a"], ["b", ""]], WORDS_GIVEN, r"A sentence is \['b', ''\]"),
        ("a b", WORDS_GIVEN, "A sentence is 'a b'"),
        *(("a b", {"predicates": value}, re.escape(f"are {value}")) for value in ([2], [1, 1], 1, [[1]])),
        (["a b", "c"], {"predicates": [0, 1]}, "are 0; pass a list"),
        (["a b", "c"], {"predicates": [[0]]}, "2 sentences have `predicates` for 1"),
        ("a b", {"verbs": [0]}, "verbs"),
    ],
)
def test_calls_that_are_refused(pipe, inputs, options, shown):
    with refused(shown, (TypeError, ValueError)):
        pipe(inputs, **options)


def test_markers_that_a_sentence_spells_are_no_words_of_a_role(pipe):
    tokenizer = ELMoTokenizer(
        vocab=["<S>", "</S>", "<UNK>"], pre_tokenization="whitespace", literal_markers=True, padding_side="right"
    )
    reads_markers = ELMoSemanticRolePipeline(model=pipe.model, tokenizer=tokenizer)
    result = reads_markers("a </S> b", predicates=[0])
    assert result["words"] == ["a", "</S>", "b"] and result["verbs"][0]["tags"][1] == "O"


@pytest.mark.parametrize("pipe", ["right"], indirect=True)
def test_folders_have_the_pipeline(pipe, tmp_path):
    save(tmp_path / "roles", pipe.model, pipe.tokenizer)
    expected = pipe(TEXTS[0])
    for task in ("semantic-role-labeling", None):
        loaded = pipeline(task, model=str(tmp_path / "roles"), trust_remote_code=True)
        assert loaded(TEXTS[0])["verbs"][0]["tags"] == expected["verbs"][0]["tags"]
        assert type(loaded).__name__ == "ELMoSemanticRolePipeline"
    given = pipeline("semantic-role-labeling", model=pipe.model, tokenizer=pipe.tokenizer)
    assert type(given) is ELMoSemanticRolePipeline and given(TEXTS[0]) == expected
    config = ELMoConfig.from_pretrained(tmp_path / "roles")
    ELMoForTokenClassification(config).save_pretrained(tmp_path / "tagger")
    assert not hasattr(ELMoConfig.from_pretrained(tmp_path / "tagger"), "custom_pipelines")
