"""The tagger with its CRF, against the enumeration of all label sequences."""

import math
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from head_models import NAMES, WORDS, make_batch, make_model, stirred, targets_of

from modeling_elmo import ELMoForTokenClassification


def is_bio(names):
    return all(not name.startswith("I-") or before[1:] == name[1:] for before, name in pairwise(["O", *names]))


def chains(crf, emissions_NK, names=None):
    """All label sequences and their scores; only valid BIO sequences if names are given."""
    start, transitions, end = (p.detach().double().tolist() for p in (crf.start, crf.transitions, crf.end))
    scores, found = emissions_NK.double().tolist(), {}
    for labels in product(range(len(start)), repeat=len(scores)):
        if names is None or is_bio([names[label] for label in labels]):
            score = sum(scores[place][label] for place, label in enumerate(labels))
            score += sum(transitions[a][b] for a, b in pairwise(labels))
            found[labels] = score + (start[labels[0]] + end[labels[-1]] if labels else 0)
    return found


def log_sum(scores):
    return torch.tensor(list(scores), dtype=torch.float64).logsumexp(0).item()


def marginals(found, length, num_labels):
    """`(length, num_labels)` probabilities."""
    total = log_sum(found.values())
    table = torch.zeros(length, num_labels)
    for labels, score in found.items():
        for place, label in enumerate(labels):
            table[place, label] += math.exp(score - total)
    return table


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
    swaps = forbidden = 0
    for row, words_T in enumerate(words):
        every = chains(model.crf, emissions.logits[row, words_T], names if names is NAMES else None)
        best = max(every, key=every.__getitem__)
        assert found.predictions[row, words_T].tolist() == list(best)
        assert found.logits[row, words_T].argmax(-1).tolist() == list(best)
        expected = marginals(every, len(best), len(names))
        for table, label in zip(expected, best, strict=True):
            likeliest = int(table.argmax())
            swaps += likeliest != label
            table[[label, likeliest]] = table[[likeliest, label]]
        torch.testing.assert_close(shares[row, words_T], expected, atol=1e-5, rtol=1e-4)
        free = chains(model.crf, emissions.logits[row, words_T])
        forbidden += max(free, key=free.__getitem__) != best
    assert swaps and bool(forbidden) == (names is NAMES)  # the batch has cases of both


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_loss_of_a_tagger_is_its_negative_log_likelihood(side):
    model = stirred(make_model(ELMoForTokenClassification, elmo_placement="both", scalar_mix_l2=0.3))
    batch = make_batch(model.config, side=side)
    labels = targets_of(model, batch)["labels"]
    labels[0, (batch["input_ids"][0] >= 4).nonzero()[1]] = -100  # a word of unknown label
    emissions, losses = model.train()(**batch).logits, []
    for row, words_T in enumerate(batch["input_ids"] >= 4):
        every, given = chains(model.crf, emissions[row, words_T]), labels[row, words_T].tolist()
        agreeing = [
            score
            for chain, score in every.items()
            if all(known in (-100, label) for known, label in zip(given, chain, strict=True))
        ]
        assert len(agreeing) == (5 if row == 0 else 1)
        losses.append(log_sum(every.values()) - log_sum(agreeing))
    penalty = 0.3 * (model.input_mix.weights.square().sum() + model.output_mix.weights.square().sum()).item()
    for mode in (True, False):
        assert model.train(mode)(**batch, labels=labels).loss.item() == pytest.approx(
            sum(losses) / len(losses) + penalty, rel=1e-5
        )
    labels = labels.where(batch["input_ids"] >= 4, 3)  # labels at markers and padding are ignored
    assert model(**batch, labels=labels).loss.item() == pytest.approx(sum(losses) / len(losses) + penalty, rel=1e-5)


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
