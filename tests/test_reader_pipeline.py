"""The question-answering pipeline against a decoder in plain loops over all windows."""

import itertools
import math

import pytest
import torch
from bilm_models import make_tokenizer, save
from datasets import Dataset
from errors import refused
from transformers import pipeline

from modeling_elmo import ELMoConfig, ELMoForQuestionAnswering, ELMoForTokenClassification, ELMoTokenizer
from modeling_elmo.heads.reader_pipeline import ELMoQuestionAnsweringPipeline

QUESTION = "Who wrote it?"
CONTEXT = "Ada Lovelace (1815) wrote the first program, in 1843. Charles Babbage built no engine; they met in London."
SHORT = {"max_seq_len": 16, "doc_stride": 4}


@pytest.fixture(scope="module", params=["right", "left"])
def pipe(request) -> ELMoQuestionAnsweringPipeline:
    tokenizer = make_tokenizer(padding_side=request.param)
    torch.manual_seed(0)
    config = ELMoConfig.from_preset("tiny", vocab_size=len(tokenizer), task_hidden_size=6, dropout=0.0)
    model = ELMoForQuestionAnswering(config).eval()
    with torch.no_grad():
        for parameter in model.reader.parameters():
            parameter.normal_(std=0.7)
    return ELMoQuestionAnsweringPipeline(model=model, tokenizer=tokenizer)


def plain_answers(pipe, longest: int, max_seq_len: int, doc_stride: int) -> tuple[dict, float]:
    """The probability of every span of characters, and of no answer: the best and the lowest of all windows."""
    windows = pipe.tokenizer(
        QUESTION,
        CONTEXT,
        truncation="only_second",
        max_length=max_seq_len,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    spans, nothing = {}, math.inf
    for number in range(len(windows["input_ids"])):
        names = ("input_ids", "character_ids", "attention_mask", "token_type_ids")
        inputs = pipe.tokenizer.pad({name: [windows[name][number]] for name in names}, return_tensors="pt")
        with torch.no_grad():
            output = pipe.model(**inputs)
        texts = windows.sequence_ids(number)
        places = [0, *(place for place, text in enumerate(texts) if text == 1)]
        starts, ends = (
            dict(zip(places, torch.tensor([float(logits[0, p]) for p in places]).softmax(0).tolist(), strict=True))
            for logits in (output.start_logits, output.end_logits)
        )
        nothing = min(nothing, starts[0] * ends[0])
        offsets = windows["offset_mapping"][number]
        for first, last in itertools.product(places[1:], places[1:]):
            if first <= last < first + longest:
                characters = (offsets[first][0], offsets[last][1])
                spans[characters] = max(spans.get(characters, 0), starts[first] * ends[last])
    return spans, nothing


@pytest.mark.parametrize("longest", [1, 3, 17])
@pytest.mark.parametrize("window", [SHORT, {"max_seq_len": 384, "doc_stride": 128}], ids=["windows", "whole"])
def test_answers_equal_plain_loops(pipe, longest, window):
    spans, nothing = plain_answers(pipe, longest, **window)
    expected = sorted(spans.items(), key=lambda item: -item[1])[:5]
    found = pipe(question=QUESTION, context=CONTEXT, top_k=5, max_answer_len=longest, **window)
    assert [(answer["start"], answer["end"]) for answer in found] == [characters for characters, _ in expected]
    assert [answer["score"] for answer in found] == pytest.approx([score for _, score in expected], rel=1e-4)
    assert all(answer["answer"] == CONTEXT[answer["start"] : answer["end"]] for answer in found)
    every = pipe(question=QUESTION, context=CONTEXT, top_k=9999, handle_impossible_answer=True, **window)
    assert len(every) == len(plain_answers(pipe, 17, **window)[0]) + 1
    (empty,) = [answer for answer in every if answer["answer"] == ""]
    assert empty["score"] == pytest.approx(nothing, rel=1e-4) and (empty["start"], empty["end"]) == (0, 0)


def test_batches_lists_and_ways_to_ask(pipe):
    """One context may have several questions."""
    other = {"question": "Where?", "context": "In London, they say."}
    both = [{"question": QUESTION, "context": CONTEXT}, other]
    singles = [pipe(**asked) for asked in both]
    pipe.model.train()
    assert pipe(question=QUESTION, context=CONTEXT) == pipe(both[0]) == singles[0]
    assert set(singles[0]) == {"score", "start", "end", "answer"}
    columns = {name: [asked[name] for asked in both] for name in other}
    for answers in (pipe(both, batch_size=3), pipe(**columns, batch_size=3)):
        assert [answer["answer"] for answer in answers] == [answer["answer"] for answer in singles]
        assert [answer["score"] for answer in answers] == pytest.approx([each["score"] for each in singles], rel=1e-4)
    assert [len(answers) for answers in pipe(both, top_k=2)] == [2, 2]
    data = Dataset.from_list(both)
    assert pipe(question=data["question"], context=data["context"]) == pipe(data) == pipe(both)
    questions = columns["question"]
    expected = pipe([{"question": each, "context": CONTEXT} for each in questions])
    assert pipe(question=questions, context=CONTEXT) == pipe(question=iter(questions), context=CONTEXT) == expected
    assert pipe([]) == pipe(question=[], context=[]) == pipe(question=[], context=CONTEXT) == []


@pytest.mark.parametrize("pipe, batch_size", [("right", 1), ("left", 2)], indirect=["pipe"])
def test_data_sets_are_read_row_by_row(pipe, check_streams, batch_size):
    rows = [
        {"question": word, "context": CONTEXT[start:], "id": start} for start, word in enumerate(["Who?", "a b"] * 3)
    ]
    expected = pipe(rows, batch_size=batch_size)
    check_streams(pipe, rows, expected, batch_size=batch_size)
    assert pipe(Dataset.from_list(rows), batch_size=batch_size) == expected
    with refused("`question` is None in 'a b'"):
        list(pipe(iter(["a b"])))


@pytest.mark.parametrize(
    "changes, shown",
    [
        ({"question": ""}, "`question` is ''"),
        ({"context": None}, "question=.*context="),
        ({"context": ["a", "b"]}, "question=.*context="),
        ({"question": ["a", "b"], "context": ["c"]}, "`context` is None in .*'b'"),
        ({"top_k": None}, "`top_k` is None.*at least 1"),
        ({"doc_stride": -1}, "`doc_stride` is -1.*at least 0"),
        ({"question": "why " * 30, "max_seq_len": 30}, "max_length=30"),
        ({"context": "\x01\x02"}, "has no words"),
        ({"topk": 2}, "topk"),
    ],
)
def test_calls_that_are_refused(pipe, changes, shown):
    with refused(shown, (TypeError, ValueError)):
        pipe(**{"question": QUESTION, "context": CONTEXT} | changes)
    with refused("question=.*context="):
        pipe({"question": QUESTION, "context": CONTEXT}, question=QUESTION)


@pytest.mark.parametrize("pipe", ["right"], indirect=True)
def test_only_question_answering_folders_have_the_pipeline(pipe, tmp_path):
    save(tmp_path / "qa", pipe.model, pipe.tokenizer)
    expected = pipe(question=QUESTION, context=CONTEXT)
    for task in ("question-answering", None):
        loaded = pipeline(task, model=str(tmp_path / "qa"), trust_remote_code=True)
        assert loaded(question=QUESTION, context=CONTEXT) == pytest.approx(expected)
    other = pipeline("extractive-question-answering", model=pipe.model, tokenizer=pipe.tokenizer)
    assert type(other) is ELMoQuestionAnsweringPipeline
    ELMoForTokenClassification.from_pretrained(tmp_path / "qa").save_pretrained(tmp_path / "tagger")
    assert not hasattr(ELMoConfig.from_pretrained(tmp_path / "tagger"), "custom_pipelines")


def test_weights_that_are_not_finite_raise_an_error(pipe):
    for scale in (pipe.model.reader.none, pipe.model.reader.start):
        kept = scale.bias.data.clone()
        scale.bias.data.fill_(math.nan)
        with refused("Some logits are not finite"):
            pipe(question=QUESTION, context=CONTEXT, handle_impossible_answer=True)
        scale.bias.data.copy_(kept)


def test_markers_that_a_context_spells_are_no_answer(pipe):
    vocab = ["<S>", "</S>", "<UNK>"]
    tokenizer = ELMoTokenizer(vocab=vocab, pre_tokenization="whitespace", literal_markers=True)
    reads_markers = ELMoQuestionAnsweringPipeline(model=pipe.model, tokenizer=tokenizer)
    answers = reads_markers(question=QUESTION, context="a </S> b", top_k=99)
    assert {answer["answer"] for answer in answers} == {"a", "a </S> b", "b"}


def test_a_short_window_shares_half_of_it(pipe):
    found = pipe(question=QUESTION, context=CONTEXT, max_seq_len=20)
    assert found == pipe(question=QUESTION, context=CONTEXT, max_seq_len=20, doc_stride=10)
