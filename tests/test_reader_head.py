"""The question-answering head: possible positions of answers, independence of texts, errors."""

import math

import pytest
import torch
from head_models import batch_of, fails, make_batch, make_model, read_by, stirred, targets_of

from modeling_elmo import ELMoForQuestionAnswering


def plain_loss(model, output, targets):
    """The mean cross-entropy over all possible positions of starts and ends, and the penalty."""
    losses = [
        -logits[target].item() + math.log(sum(math.exp(logit) for logit in logits.tolist() if logit > -1e30))
        for side, name in ((output.start_logits, "start_positions"), (output.end_logits, "end_positions"))
        for logits, target in zip(side, targets[name], strict=True)
    ]
    return sum(losses) / len(losses) + sum(
        model.config.scalar_mix_l2 * m.weights.square().sum().item() for m in model.mixes().values()
    )


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
    assert output.loss.item() == pytest.approx(plain_loss(model, output, targets), rel=1e-5)
    if head == "paper":  # "no answer" has one score for start and end
        assert torch.equal(output.start_logits[first], output.end_logits[first])


def test_a_question_changes_no_vector_of_the_context():
    model = stirred(make_model(ELMoForQuestionAnswering))
    first, second = (make_batch(model.config, [(words, 4)]) for words in (3, 5))
    for name, context in first.items():  # the same context after another question
        second[name][0, -6:] = context[0, -6:]
    layers = [model(**batch, output_hidden_states=True).hidden_states for batch in (first, second)]
    for one, other in zip(*layers, strict=True):
        torch.testing.assert_close(one[0, -6:], other[0, -6:], rtol=0, atol=1e-6)
    states = [read_by(model, model.reader.attention, batch) for batch in (first, second)]
    torch.testing.assert_close(states[0][0][0, -6:], states[1][0][0, -6:], rtol=0, atol=1e-6)
    logits = [model(**batch).start_logits[0, -5:-1] for batch in (first, second)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_word_vectors_of_a_reader_are_as_large_as_glove_s():
    model = make_model(ELMoForQuestionAnswering, vocab_size=999)
    assert model.token_features.word_embeddings.weight.std().item() == pytest.approx(0.4, rel=0.05)


def test_errors_of_readers():
    model = make_model(ELMoForQuestionAnswering)
    batch = make_batch(model.config, [(2, 3), (1, 2)])
    places = torch.tensor([5, 4])
    fails("Pass `start_positions` and `end_positions` together", model, **batch, start_positions=places)
    for wrong in (1, 3, 8):  # the question, a marker of it, the last marker
        positions = {"start_positions": torch.tensor([wrong, 4]), "end_positions": places}
        message = f"`start_positions` is {wrong} in row 0, which is not a word of the context. Pass"
        fails(message, model, **batch, **positions)
    outside = {"start_positions": places, "end_positions": torch.tensor([5, 9])}
    fails("`end_positions` is 9 in row 1, which is not a word of the context", model, **batch, **outside)
    column = {"start_positions": places[:, None], "end_positions": places}
    fails(r"`start_positions` has shape \(2, 1\); pass shape \(2\)", model, **batch, **column)
    types = batch.pop("token_type_ids")
    fails(r"pass the `token_type_ids` of tokenizer\(question, context\)", model, **batch)
    del batch["input_ids"]
    fails("This head has word vectors: pass `input_ids`", model, **batch, token_type_ids=types)
    bare = make_model(ELMoForQuestionAnswering, task_word_embedding_size=0, task_char_cnn_filters=[])
    fails("only they tell the markers <S> and </S> from words; pass them with", bare, **batch, token_type_ids=types)
