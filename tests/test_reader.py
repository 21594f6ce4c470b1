"""The reader against the papers' formulas in loops over rows and words; positions of answers; errors."""

import pytest
import torch
import torch.nn.functional as F
from head_models import (
    ELMO,
    SPANS,
    batch_of,
    fails,
    make_batch,
    make_model,
    make_network,
    make_network_inputs,
    read_by,
    run_network,
    stirred,
    targets_of,
)
from torch.testing import assert_close

from modeling_elmo import ELMoForQuestionAnswering
from modeling_elmo.heads.reader import SpanReader, TrilinearAttention


def softmax(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.double).softmax(0).tolist()


def weighted(weights, vectors):
    return sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))


def rnn(layer, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """A torch biGRU over the words only."""
    return list(layer.layers[0](torch.stack(words)[:, None])[0][:, 0])


def score(attention: TrilinearAttention, x, y) -> float:
    vector = torch.cat([attention.own.weight[0], attention.other.weight[0], attention.product])
    return float(vector @ torch.cat([x, y, x * y]))


def plain_reader(reader: SpanReader, words, elmo, question, context):
    """Scores of starts, ends and no answer for one row, from lists of word vectors and ELMo vectors."""

    def encoded(chosen):
        states = rnn(reader.encoder, [words[place] for place in chosen])
        return states if elmo is None else [torch.cat([s, elmo[p]]) for s, p in zip(states, chosen, strict=True)]

    h, q = encoded(context), encoded(question)
    scores = [[score(reader.attention, x, y) for y in q] for x in h]
    c = [weighted(softmax(row), q) for row in scores]
    summary = weighted(softmax([max(row) for row in scores]), h)
    x = [
        reader.attended(torch.cat([own, other, own * other, summary * other])).relu()
        for own, other in zip(h, c, strict=True)
    ]
    s = rnn(reader.self_encoder, x)
    z = []
    for i, own in enumerate(s):
        others = [j for j in range(len(s)) if j != i]
        weights = softmax([score(reader.self_attention, own, s[j]) for j in others]) if others else []
        found = weighted(weights, [s[j] for j in others]) if others else torch.zeros_like(own)
        z.append(x[i] + reader.self_attended(torch.cat([own, found, own * found])).relu())
    first = rnn(reader.start_encoder, z)
    last = rnn(reader.end_encoder, [torch.cat(pair) for pair in zip(first, z, strict=True)])
    starts, ends = [float(reader.start(v)) for v in first], [float(reader.end(v)) for v in last]
    pooled = [
        weighted(softmax(starts), first),
        weighted(softmax(ends), last),
        weighted(softmax([float(reader.pooling(v)) for v in z]), z),
    ]
    return starts, ends, float(reader.none(reader.none_hidden(torch.cat(pooled)).relu()))


@pytest.mark.parametrize("elmo", [ELMO, 0])
@torch.no_grad()
def test_scores_are_those_of_the_papers(elmo):
    reader = make_network(SpanReader, elmo)
    inputs, question, context, elmo_vectors = make_network_inputs(SPANS, elmo)
    found_starts, found_ends, found_none = run_network(reader, inputs, question, context, elmo_vectors)
    for row in range(len(SPANS)):
        places = [mask[row].nonzero().flatten().tolist() for mask in (question, context)]
        vectors = None if elmo_vectors is None else elmo_vectors[row]
        starts, ends, none = plain_reader(reader, inputs[row], vectors, *places)
        assert_close(found_starts[row, places[1]].tolist(), starts)
        assert_close(found_ends[row, places[1]].tolist(), ends)
        assert float(found_none[row]) == pytest.approx(none)


def test_a_context_of_one_word_and_rows_without_any():
    """A single word attends to nothing. A window may have no context."""
    reader, (inputs, question, context, elmo) = make_network(SpanReader), make_network_inputs(SPANS)
    none_there = torch.zeros_like(context)
    for masks in ((question, none_there), (none_there, context), (none_there, none_there)):
        for found in run_network(reader, inputs, *masks, elmo):
            assert found.isfinite().all()
        sum(found.sum() for found in run_network(reader, inputs, *masks, elmo)).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in reader.parameters())


@pytest.mark.parametrize("head", ["paper", "linear"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_answers_are_words_of_the_context_or_the_first_token(head, side):
    model = stirred(make_model(ELMoForQuestionAnswering, head=head, scalar_mix_l2=0.2))
    batch = batch_of(model, side=side, extra=2)
    targets = targets_of(model, batch)
    with torch.no_grad():
        output = model(**batch, **targets)
    context = (batch["token_type_ids"] == 1) & (batch["input_ids"] >= 4)
    first = batch["attention_mask"].cumsum(1).eq(1) & batch["attention_mask"].bool()
    assert (first.sum(1) == 1).all() and (targets["start_positions"] != targets["end_positions"]).any()
    for logits in (output.start_logits, output.end_logits):
        assert torch.equal(logits > -1e30, context | first) and logits.isfinite().all()
        assert (logits.softmax(1)[~(context | first)] == 0).all()
    losses = [F.cross_entropy(output[f"{side}_logits"], targets[f"{side}_positions"]) for side in ("start", "end")]
    assert_close(output.loss, sum(losses) / 2 + model.penalty())
    if head == "paper":  # "no answer" has one score for start and end
        assert torch.equal(output.start_logits[first], output.end_logits[first])


def test_a_question_changes_no_vector_of_the_context():
    model = stirred(make_model(ELMoForQuestionAnswering))
    first, second = (make_batch(model.config, [(words, 4)]) for words in (3, 5))
    for name, context in first.items():  # the same context after another question
        second[name][0, -6:] = context[0, -6:]
    layers = [model(**batch, output_hidden_states=True).hidden_states for batch in (first, second)]
    for one, other in zip(*layers, strict=True):
        assert_close(one[0, -6:], other[0, -6:], rtol=0, atol=1e-6)
    states = [read_by(model, model.reader.attention, batch) for batch in (first, second)]
    assert_close(states[0][0][0, -6:], states[1][0][0, -6:], rtol=0, atol=1e-6)
    logits = [model(**batch).start_logits[0, -5:-1] for batch in (first, second)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_word_vectors_of_a_reader_are_as_large_as_glove_s():
    model = make_model(ELMoForQuestionAnswering, vocab_size=999)
    assert model.token_features.word_embeddings.weight.std().item() == pytest.approx(0.4, rel=0.05)


def test_errors_of_readers():
    model = make_model(ELMoForQuestionAnswering)
    batch = make_batch(model.config, [(2, 3), (1, 2)])
    places = torch.tensor([5, 4])
    fails("`start_positions` and `end_positions` together", model, **batch, start_positions=places)
    for wrong in (1, 3, 8):  # the question, a marker of it, the last marker
        positions = {"start_positions": torch.tensor([wrong, 4]), "end_positions": places}
        fails(f"`start_positions` is {wrong} in row 0", model, **batch, **positions)
    column = {"start_positions": places[:, None], "end_positions": places}
    fails(r"`start_positions` has shape \(2, 1\); pass shape \(2\)", model, **batch, **column)
    types = batch["token_type_ids"]
    fails("`token_type_ids` has values from 0 to 2", model, **{**batch, "token_type_ids": 2 * types})
    del batch["token_type_ids"]
    fails(r"pass the `token_type_ids`", model, **batch)
