"""The tagger, whose chain has the words alone, and the reader: positions of answers, independence of texts, errors.

`test_crf.py` compares the CRF with all label sequences.
"""

import pytest
import torch
import torch.nn.functional as F
from head_models import NAMES, WORDS, batch_of, fails, make_batch, make_model, read_by, stirred, targets_of

from modeling_elmo import ELMoForQuestionAnswering, ELMoForTokenClassification
from modeling_elmo.heads.crf import bio_constraints


def chain_of_words(emissions_BTK, batch, row):
    """The emissions of one row's words alone, and their mask."""
    words_T = batch["input_ids"][row] >= 4
    return emissions_BTK[row, words_T][None], torch.ones(1, int(words_T.sum()), dtype=torch.bool)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("names", [NAMES, ["O", "X", "I-X", "Y", "Z"]], ids=["bio", "free"])
def test_tagger_finds_the_best_chain_of_the_words(names, side):
    model = stirred(make_model(ELMoForTokenClassification, id2label=dict(enumerate(names))), std=0.7, seed=4)
    batch = make_batch(model.config, [*WORDS, 4, 4, 4], side=side)
    with torch.no_grad():
        emissions = model.train()(**batch)
        found = model.eval()(**batch)
    assert emissions.predictions is None and emissions.logits.shape == found.logits.shape
    shares = found.logits.softmax(-1)
    torch.testing.assert_close(found.logits.exp(), shares)  # already a distribution
    words = batch["input_ids"] >= 4
    assert (found.predictions[~words] == -100).all() and (found.predictions[words] >= 0).all()
    allowed = bio_constraints(tuple(names))
    assert (allowed is not None) == (names is NAMES)
    swaps = forbidden = 0
    for row, words_T in enumerate(words):
        chain = chain_of_words(emissions.logits, batch, row)
        best = model.crf.decode(*chain, allowed)[0][0]
        assert torch.equal(found.predictions[row, words_T], best)
        assert torch.equal(found.logits[row, words_T].argmax(-1), best)
        expected = model.crf.decode(*chain, allowed)[1][0].exp().detach()
        for table, label in zip(expected, best.tolist(), strict=True):
            likeliest = int(table.argmax())
            swaps += likeliest != label
            table[[label, likeliest]] = table[[likeliest, label]]
        torch.testing.assert_close(shares[row, words_T], expected, atol=1e-5, rtol=1e-4)
        forbidden += not torch.equal(model.crf.decode(*chain)[0][0], best)
    assert swaps and bool(forbidden) == (names is NAMES)  # the batch has cases of both


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_of_a_tagger_is_its_negative_log_likelihood(side):
    model = stirred(make_model(ELMoForTokenClassification, elmo_placement="both", scalar_mix_l2=0.3))
    batch = make_batch(model.config, side=side)
    words = batch["input_ids"] >= 4
    labels = targets_of(model, batch)["labels"]
    labels[0, words[0].nonzero()[1]] = -100  # a word of unknown label
    emissions, expected = model.train()(**batch).logits, 0.0
    for row, words_T in enumerate(words):
        chain, mask = chain_of_words(emissions, batch, row)
        expected -= model.crf.log_likelihood(chain, labels[row, words_T][None], mask).item() / len(words)
    expected += 0.3 * sum(mix.weights.square().sum().item() for mix in (model.input_mix, model.output_mix))
    for mode in (True, False):
        assert model.train(mode)(**batch, labels=labels).loss.item() == pytest.approx(expected, rel=1e-5)
    labels = labels.where(words, 3)  # labels at markers and padding are ignored
    assert model(**batch, labels=labels).loss.item() == pytest.approx(expected, rel=1e-5)


def test_a_linear_tagger_divides_by_the_given_count():
    model = make_model(ELMoForTokenClassification, head="linear", scalar_mix_l2=0.5)
    with torch.no_grad():
        model.input_mix.weights.fill_(1.0)
    batch = make_batch(model.config, [6, 2, 4, 1])
    labels = targets_of(model, batch)["labels"]
    whole = model(**batch, labels=labels).loss
    count = (labels != -100).sum()
    halves = [
        model(**{k: v[rows] for k, v in batch.items()}, labels=labels[rows], num_items_in_batch=count).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(sum(halves), whole)
    output = model(**batch)
    assert output.predictions is None
    expected = F.cross_entropy(output.logits[labels != -100], labels[labels != -100]) + 0.5 * 3
    torch.testing.assert_close(whole, expected)
    for count in (None, torch.tensor(0), 7):  # without labels there is no loss
        loss = model(**batch, labels=torch.full_like(labels, -100), num_items_in_batch=count).loss
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        assert loss.item() == 0 and not any(gradient.any() for gradient in gradients)  # NaN would be true


# The reader


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
    torch.testing.assert_close(output.loss, sum(losses) / 2 + model.penalty())
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
